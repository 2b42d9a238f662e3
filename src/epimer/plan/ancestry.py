"""Whether models were fine-tuned from the base of their merge: what adapters say of it, and a sample of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

import torch
from torch import Tensor

from epimer.checkpoints.adapter_files import adapters_of
from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.lora import Adapted, model_config
from epimer.errors import short
from epimer.geometry.linalg import as_compute_dtype
from epimer.methods.rules import is_matrix
from epimer.plan.participants import Participant, Participants

SAMPLED_MATRICES = 8
SAMPLED_ENTRIES = 4096
"""how many entries of a sampled matrix are read, at least a row"""
FEWEST_ENTRIES = 1024
"""sampled entries below which nothing is said: the cosine of so few has an error of 0.03"""
LONGEST_ROW = 1 << 20
UNRELATED = 0.1
"""mean cosine of sampled matrices below which a model is taken for one of another ancestor

Unrelated weights have a cosine of 0 +- 0.01. If a task vector is independent of the base, the cosine is
1 / sqrt(1 + r^2), where r = ||D|| / ||W0||: a model below this limit has moved by more than 10 times the base's norm.
"""


def ancestry_notes(participants: Participants) -> list[str]:
    """Return warnings about models that were probably not fine-tuned from the base, without local paths."""
    return [*_adapters_of_other_bases(participants), *_unrelated_models(participants)]


def _adapters_of_other_bases(participants: Participants) -> Iterator[str]:
    """Yield the adapters whose config names another base than the one that they lie on."""
    for model in participants.models:
        for adapter in adapters_of(model.checkpoint):
            named, revision = adapter.config.get("base_model_name_or_path"), adapter.config.get("revision")
            base = _bottom(adapter)
            names = _names(base)
            commit = base.name.partition("@")[2]
            if isinstance(named, str) and named and _last_part(named) not in names:
                trained_on = short(PurePath(named).name if PurePath(named).is_absolute() else named)
            elif isinstance(revision, str) and len(revision) == len(commit) == 40 and revision != commit:
                trained_on = f"revision {revision}"
            else:
                continue
            yield (
                f"the adapter {adapter.adapter.files[0].parent.name} was trained on {trained_on}, as its "
                f"adapter_config.json says, and is used on {base.name}; if these are other weights, the merge is wrong."
            )


def _bottom(adapter: Adapted) -> Checkpoint:
    """Return the whole model under an adapter and those below it."""
    return adapters_of(adapter)[-1].base


def _names(base: Checkpoint) -> set[str]:
    """Return the names of a model without their paths: of its folder or hub id, and in its config."""
    names = [base.name.partition("@")[0], base.where.partition("@")[0], model_config(base).get("_name_or_path")]
    return {_last_part(name) for name in names if isinstance(name, str) and name}


def _last_part(name: str) -> str:
    """Return the last part of a path or hub id in lower case; of a snapshot in the hub's cache, that of its id."""
    parts = PurePath(name).parts or (name,)
    repository = next((part for part in parts if part.startswith("models--")), parts[-1])
    return repository.rpartition("--")[2].lower()


def _unrelated_models(participants: Participants) -> Iterator[str]:
    """Yield the models whose matrices have nothing in common with the base's, going by a few entries of a few."""
    base = participants.base
    if base is None:
        return
    names = [name for name, W in base.headers.items() if is_matrix(name, W.shape) and _can_be_sampled(base, name)]
    step = max(1, len(names) // SAMPLED_MATRICES)
    sampled = names[step // 2 :: step][:SAMPLED_MATRICES]
    of_base: dict[str, Tensor] = {}
    for model in participants.models:
        cosines: list[float] = []
        entries = 0
        for name in sampled:
            if not _is_comparable(model, base, name):
                continue
            if name not in of_base:
                of_base[name] = _middle(base, name)
            entries += of_base[name].numel()
            cosines.append(float(torch.cosine_similarity(of_base[name], _middle(model, name), dim=0)))
        if entries >= FEWEST_ENTRIES and abs(mean := sum(cosines) / len(cosines)) < UNRELATED:
            yield (
                f"{model.checkpoint.name} seems not to be fine-tuned from {base.checkpoint.name}: their matrices have "
                f"a cosine of {mean:.2f} (1 if equal, 0 if unrelated); look at base_model."
            )


def _is_comparable(model: Participant, base: Participant, name: str) -> bool:
    """Whether a model stores a matrix of its own, of the base's shape, and not a change of the base's as an adapter."""
    if name not in model.headers or model.headers[name].shape != base.headers[name].shape:
        return False
    return _can_be_sampled(model, name) and model.delta_rank(name, base) is None


def _can_be_sampled(one: Participant, name: str) -> bool:
    W = one.headers[name]
    return W.is_floating_point() and one.problem(name) is None and 0 < W[:1].numel() <= LONGEST_ROW


def _middle(one: Participant, name: str) -> Tensor:
    """Return some rows from the middle of a matrix as one vector in float64."""
    W = one.headers[name]
    count = min(len(W), max(1, SAMPLED_ENTRIES // W[:1].numel()))
    first = (len(W) - count) // 2
    return as_compute_dtype(one.read(name, (first, first + count))).flatten().double().cpu()
