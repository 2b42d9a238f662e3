"""The models of a merge: opened once, compared, and brought to the names of the template, the base if there is one."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.adapter_files import adapters_of
from epimer.checkpoints.checkpoint import Checkpoint, Rows, is_embedding
from epimer.checkpoints.hub import is_hub_id
from epimer.checkpoints.lora import head_is_table
from epimer.checkpoints.memory import Cached, Model, StateDict, total_bytes
from epimer.checkpoints.quantized import dequantized
from epimer.checkpoints.renamed import Renamed
from epimer.errors import CheckpointError, EpimerError, MissingError, TensorError
from epimer.geometry.linalg import LowRank, as_compute_dtype, nonfinite
from epimer.plan.slices import stack_sources
from epimer.plan.vocabularies import Vocabulary, align_vocabularies
from epimer.recipe.model import UNION, Recipe
from epimer.recipe.non_finite import ERROR, skips_tensors

BLOCK = 1 << 22  # entries that are looked at at once
SAMPLED = 1 << 18  # entries of a model that tell about all of them
PLACES = 1024  # where such entries are taken from


@dataclass(frozen=True)
class Participant:
    """A checkpoint under the names of the merge: its methods do as those of `Checkpoint`."""

    label: str
    """what errors call it"""
    checkpoint: Checkpoint
    headers: Mapping[str, Tensor]
    stored: Mapping[str, str] = field(default_factory=dict)
    """name -> the tied name under which this checkpoint stores the tensor"""

    def read(self, name: str, rows: Rows = None) -> Tensor:
        return self.checkpoint.read(self.stored.get(name, name), rows)

    def prefetch(self, name: str, rows: Rows = None) -> None:
        self.checkpoint.prefetch(self.stored.get(name, name), rows)

    def delta(self, name: str, base: Participant, rows: Rows = None) -> LowRank | None:
        return self.checkpoint.delta(self.stored.get(name, name), base.checkpoint, rows)

    def delta_rank(self, name: str, base: Participant) -> int | None:
        return self.checkpoint.delta_rank(self.stored.get(name, name), base.checkpoint)

    def size(self, name: str) -> int:
        return self.checkpoint.size(self.stored.get(name, name))

    def problem(self, name: str) -> str | None:
        return self.checkpoint.problem(self.stored.get(name, name))

    def sample(self, name: str) -> bytes:
        return b"" if self.problem(name) else self.checkpoint.sample(self.stored.get(name, name))

    def non_finite(self, name: str) -> str:
        """Return how many entries of a tensor are NaN or Inf and where the first is, in words; nothing for none."""
        W, bad, first = self.headers[name], 0, None
        length = len(W) if W.dim() and self.checkpoint.streams else 1
        step = max(1, BLOCK * length // max(1, W.numel()))
        for start in range(0, length, step):
            part = self.read(name, (start, min(start + step, length)) if step < length else None)
            if found := nonfinite(part):
                if first is None:
                    place = [int(i) for i in (~torch.isfinite(as_compute_dtype(part))).nonzero()[0]]
                    first = [place[0] + start, *place[1:]] if place else []
                bad += found
        at = f", the first at {first}" if first else ""
        return f"{self.label}[{name!r}] holds NaN or Inf in {bad} of {W.numel()} entries{at}" if bad else ""

    def shares(self, name: str, twin: str) -> bool:
        first, second = self.stored.get(name, name), self.stored.get(twin, twin)
        return {first, second} <= self.checkpoint.headers.keys() and self.checkpoint.shares(first, second)


@dataclass(frozen=True)
class Participants:
    """The base and the fine-tuned models, all under the template's names."""

    base: Participant | None
    """what task vectors are taken from; None where there is none"""
    models: list[Participant]
    ties: Mapping[str, str]
    """name -> the earlier name that is the same tensor in the template and in every model"""
    donor: Checkpoint
    """whose config and other files an output gets"""
    names: Mapping[str, str] = field(default_factory=dict)
    """what a recipe calls a model -> what to call it where paths must not be shown"""
    places: Mapping[str, str] = field(default_factory=dict)
    """what a recipe calls an input that lies on this disk -> its absolute path"""
    downloads: Mapping[str, int] = field(default_factory=dict)
    """files of theirs that are still on the hub -> their bytes"""
    skip_non_finite: bool = False
    """whether a tensor with NaN or Inf in a model is left as the base has it, instead of refused"""

    @property
    def all(self) -> list[Participant]:
        return [*([self.base] if self.base else []), *self.models]

    @property
    def template(self) -> Participant:
        """Whose names, shapes and dtypes the output gets."""
        return self.models[0] if self.base is None else self.base

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Every checkpoint that is read, each once."""
        every = [one.checkpoint for one in self.all] + [self.donor]
        return list({id(one): one for one in every}.values())

    @cached_property
    def differing_integers(self) -> dict[str, str]:
        """The integer and boolean tensors that are not the same in all models -> the first model that differs."""
        differing: dict[str, str] = {}
        for name, W in self.template.headers.items():
            if W.is_floating_point() or W.is_complex():
                continue
            for model in self.models:
                if name in model.headers and not _same_integers(self.template, model, name):
                    differing.setdefault(name, model.label)
        return differing

    @cached_property
    def non_finite(self) -> dict[str, tuple[Participant, str]]:
        """The tensors with NaN or Inf -> who has it first, the base or a model, and where; all tensors are read."""
        damaged: dict[str, tuple[Participant, str]] = {}
        for name in (name for name, W in self.template.headers.items() if W.is_floating_point()):
            for one in self.all if name not in self.ties else ():
                readable = name in one.headers and one.headers[name].is_floating_point() and not one.problem(name)
                if readable and name not in damaged and (text := one.non_finite(name)):
                    damaged[name] = one, text
        return damaged

    def moved(self, name: str) -> bool:
        """Whether a model has another tensor than the base, going by some of its entries."""
        if self.base is None or not self.base.headers[name].is_floating_point():
            return False
        sample = self.base.sample(name)
        return any(model.sample(name) != sample for model in self.models if name in model.headers)

    def without_base(self) -> Participants:
        """Return the same models without the base, whose files the output still gets."""
        labels = [model.label for model in self.models]
        alone = align(None, [model.checkpoint for model in self.models], labels, donor=self.donor)
        same = {key: getattr(self, key) for key in ("names", "places", "downloads", "skip_non_finite")}
        return replace(alone, **same)

    def kept_in_memory(self, most: int) -> Participants:
        """Return the same models with tensors that are read once and kept, where they fit in `most` bytes."""
        if sum(map(total_bytes, self.checkpoints)) > most:
            return self
        kept = {id(one): one if one.in_memory else Cached(one) for one in self.checkpoints}

        cached = [replace(one, checkpoint=kept[id(one.checkpoint)]) for one in self.all]
        base = None if self.base is None else cached.pop(0)
        return replace(self, base=base, models=cached, donor=kept[id(self.donor)])


def state_dict_participants(base: Model | None, models: Sequence[Model], non_finite: str = ERROR) -> Participants:
    """Return state dicts and modules as participants; `non_finite` as a recipe has it."""
    skips = skips_tensors(non_finite)
    if isinstance(models, Mapping) or not isinstance(models, Sequence) or not models:
        raise TensorError("models must be a non-empty list of state dicts or modules, one per fine-tuned model.")
    labels = [f"models[{t}]" for t in range(len(models))]
    ancestor = None if base is None else dequantized(StateDict(base, "base"))
    states = [dequantized(StateDict(model, label)) for model, label in zip(models, labels, strict=True)]
    return replace(align(ancestor, states, labels), skip_non_finite=skips)


def open_participants(
    recipe: Recipe,
    folder: Path | None,
    problems: list[EpimerError],
    notes: list[str],
    *,
    progress: bool,
    download: bool,
) -> tuple[Participants | None, Path | None, Vocabulary]:
    """Open the base and the models that a recipe names, the folder of the output's tokenizer, and its vocabulary.

    What cannot be opened is added to `problems`, and there are no participants then. Without `download` weights that
    are on the hub stay there.
    """
    opened: dict[str, Checkpoint] = {}
    missing: dict[str, list[tuple[str, MissingError]]] = {}

    def opening(text: str, label: str, *, download: bool = download) -> None:
        if text not in opened:
            with collect_errors(problems, label):
                try:
                    opened[text] = open_checkpoint(
                        locate(text, folder), progress=progress, download=download, folder=folder
                    )
                except MissingError as error:
                    missing.setdefault(error.reason, []).append((label, error))

    if recipe.base_model is not None:
        opening(recipe.base_model, recipe.spoken.get("base_model", "base_model"))
    for label, text in recipe.sources.items():
        opening(text, recipe.spoken.get(label, label))
    for text, prefix in {entry.model: entry.prefix for entry in recipe.models if entry.prefix}.items():
        if text in opened:
            with collect_errors(problems, text):
                opened[text] = Renamed(opened[text], prefix)
    models = dict(opened)
    source = recipe.tokenizer_source or "base"
    place = Path(os.path.expanduser(locate(source, folder)))
    if source not in ("base", UNION) and not os.path.isdir(place):
        opening(source, "tokenizer_source", download=False)
    problems += map(_missing_models, missing.values())
    if problems:
        return None, None, Vocabulary()
    if source in ("base", UNION):
        tokenizer = next(iter(models.values())).tokenizer_folder
    else:
        tokenizer = opened[source].tokenizer_folder if source in opened else place
    vocabulary = Vocabulary()
    with collect_errors(problems, "tokenizer"):
        models, vocabulary = align_vocabularies(recipe, models, tokenizer, notes)
    base = None if recipe.base_model is None else models[recipe.base_model]
    present: list[Checkpoint] = []
    donor = None
    with collect_errors(problems, "slices"):
        if recipe.slices:
            base, present, donor = stack_sources(recipe, base, models)
        else:
            present = [models[entry.model] for entry in recipe.models]
    if problems:
        return None, None, vocabulary
    each = "sources" if recipe.slices else "models"
    labels = [
        f"{recipe.spoken.get(f'{each}[{t}]', f'{each}[{t}]')} ({entry.model})" for t, entry in enumerate(recipe.models)
    ]
    names = {text: checkpoint.name for text, checkpoint in opened.items()}
    downloads = {file: size for text in models for file, size in opened[text].downloads.items()}
    participants = replace(
        align(base, present, labels, donor=donor),
        names=names,
        places=_places(recipe, folder),
        downloads=downloads,
        skip_non_finite=skips_tensors(recipe.non_finite),
    )
    return participants, tokenizer, vocabulary


def _missing_models(missing: Sequence[tuple[str, MissingError]]) -> CheckpointError:
    """Return the error about models that were not found for one reason; several are listed before the reason."""
    if len(missing) == 1:
        label, error = missing[0]
        return CheckpointError(f"{label}: {error}")
    names = ", ".join(f"{label} {error.name}" for label, error in missing)
    remedy = "give paths from here or from the recipe's folder, or download models of the hub first: hf download NAME"
    return CheckpointError(f"{names}: each {missing[0][1].reason}; {remedy}.")


@contextmanager
def collect_errors(problems: list[EpimerError], label: str) -> Iterator[None]:
    """Add an error of the block to `problems`, after what it is about."""
    try:
        yield
    except EpimerError as error:
        problems.append(type(error)(f"{label}: {error}"))


def locate(text: str, folder: Path | None) -> str:
    """Return a path that exists here or, failing that, beside the recipe in `folder`; other names as they are."""
    if folder is None or os.path.exists(os.path.expanduser(text)):
        return text
    if os.path.exists(folder / text):
        return str(folder / text)
    parts = [part.strip() for part in text.split("+")]
    return text if len(parts) == 1 else "+".join(locate(part, folder) for part in parts)


def _places(recipe: Recipe, folder: Path | None) -> dict[str, str]:
    """Return the absolute paths of a recipe's inputs that lie on this disk; an adapter's with that of its base."""
    sources = [*recipe.sources.values(), recipe.base_model, recipe.tokenizer_source, recipe.basis]
    places: dict[str, str] = {}
    for text in (*sources, *(entry.curvature for entry in recipe.models)):
        if text is not None:
            parts = [os.path.expanduser(part.strip()) for part in locate(text, folder).split("+")]
            if any(map(os.path.exists, parts)):
                places[text] = "+".join(os.path.abspath(part) if os.path.exists(part) else part for part in parts)
    return places


def recipe_from(recipe: Recipe, participants: Participants, tokenizer: Path | None, out: Path) -> str | None:
    """Return a recipe as YAML with paths relative to the folder `out`; None for inputs that are elsewhere or far away.

    Paths are left out whose common folder with `out` is the root or the folder of all home folders: they would tell
    the names of users and disks.
    """
    if not participants.places:
        return None
    names = public_names(recipe, participants, tokenizer)
    for text, place in participants.places.items():
        parts = place.split("+")
        for part in filter(os.path.isabs, parts):
            if Path(os.path.commonpath([part, out])) in (Path(out.anchor), Path.home().parent):
                return None
        names[text] = "+".join(os.path.relpath(part, out) if os.path.isabs(part) else part for part in parts)
    return recipe.to_yaml(names)


def sample_rows(
    participants: Participants, tensors: Sequence[tuple[str, Rows, Tensor]]
) -> Iterator[tuple[Tensor | None, list[Tensor]]]:
    """Yield entries of the base and of the models from places spread evenly over tensors, `SAMPLED` in all.

    Every tensor, given by its name, the rows to take it from and what these look like, has the same share of entries.
    """
    share = min(1.0, SAMPLED / sum(W.numel() for _, _, W in tensors))
    most = max(1, PLACES // len(tensors))
    for name, rows, W in tensors:
        length, first = len(W) if W.dim() else 1, rows[0] if rows else 0
        wanted = max(1, round(share * W.numel()))
        places = max(1, min(most, length, wanted))
        count = max(1, math.ceil(share * length / places))
        for i in range(places):
            entries = wanted * (i + 1) // places - wanted * i // places
            start = first + (2 * i + 1) * (length - count) // (2 * places)
            part = (start, start + count) if W.dim() else None
            there = [one.read(name, part).flatten() for one in participants.all]
            right = (2 * i + 1) * max(0, len(there[0]) - entries) // (2 * places)  # as it goes down
            base, *models = [W[right : right + entries].cpu() for W in there]
            yield (base, models) if participants.base else (None, [base, *models])


def public_recipe(recipe: Recipe, participants: Participants, tokenizer: Path | None) -> str:
    """Return a recipe as YAML without local paths."""
    return recipe.to_yaml(public_names(recipe, participants, tokenizer))


def public_names(recipe: Recipe, participants: Participants, tokenizer: Path | None) -> dict[str, str]:
    """Return what a recipe calls its inputs -> what to call them without local paths."""
    names = dict(participants.names)
    source = recipe.tokenizer_source
    if source not in (None, "base", UNION) and source not in names:
        cached = tokenizer is not None and "snapshots" in tokenizer.parts
        names[source] = source if is_hub_id(source) and cached else Path(source).name
    for path in (recipe.basis, recipe.eval, *(entry.curvature for entry in recipe.models)):
        if path is not None:
            names[path] = Path(path).name
    return names


def equal_models(participants: Participants) -> list[str]:
    """Say which models equal the base or each other, going by their fingerprints."""
    notes, base = [], participants.base
    for t, model in enumerate(participants.models):
        fingerprint = model.checkpoint.fingerprint
        if base is not None and model.checkpoint is not base.checkpoint and fingerprint == base.checkpoint.fingerprint:
            notes.append(f"{model.label} equals the base: its task vector is zero.")
        other = [one for one in participants.models[:t] if one.checkpoint.fingerprint == fingerprint]
        if other:
            notes.append(f"{model.label} equals {other[0].label}: it counts twice.")
    return notes


def tied_updates(participants: Participants) -> list[str]:
    """Say which adapters update a table that is also the head: merging moves the head, PEFT's live adapter does not."""
    return [
        f"{model.label} updates {name!r}, which the base also uses as its head: merged, both change, as by PEFT's "
        "merge_and_unload(); an adapter that PEFT has loaded leaves the head as it was, so outputs differ from it."
        for model in participants.models
        for adapter in adapters_of(model.checkpoint)
        for name in adapter.updates
        if is_embedding(name) and (name in adapter.ties.values() or head_is_table(adapter.base))
        if not adapter.config.get("ensure_weight_tying")
    ]


def align(
    base: Checkpoint | None, models: Sequence[Checkpoint], labels: Sequence[str], *, donor: Checkpoint | None = None
) -> Participants:
    """Bring all checkpoints to the template's names: a tied tensor may be stored under one name or under both."""
    template = models[0] if base is None else base
    known = dict(template.ties)
    for name in template.headers:
        alone = name not in known and name not in known.values()
        lacking = alone and any(name not in model.headers for model in models)
        if lacking and (twin := _twin(template, name, models[0].headers)):
            known[name] = twin
    groups: dict[str, list[str]] = {}
    for name in template.headers:
        groups.setdefault(known.get(name, name), []).append(name)
    aligned = [_aligned(*pair, template, groups.values()) for pair in zip(models, labels, strict=True)]
    ties: dict[str, str] = {}
    for names in groups.values():
        first: list[str] = []
        for name in names:
            twin = next((one for one in first if all(model.shares(name, one) for model in aligned)), None)
            if twin is None:
                first.append(name)
            else:
                ties[name] = twin
    ancestor = None if base is None else Participant("base", base, base.headers)
    return Participants(ancestor, aligned, ties, donor or template)


def _aligned(model: Checkpoint, label: str, template: Checkpoint, groups: Iterable[list[str]]) -> Participant:
    """Return a model under the template's names; `groups` are the names that stand for one tensor in the template."""
    stored: dict[str, str] = {}
    for names in groups:
        if present := [name for name in names if name in model.headers]:
            stored |= {name: present[0] for name in names if name not in model.headers}
    shared = {model.ties.get(name, name) for name in model.headers if name in template.headers}
    headers = {
        name: W
        for name, W in model.headers.items()
        if name in template.headers
        or not (model.ties.get(name, name) in shared or _twin(model, name, template.headers))
    }
    return Participant(label, model, headers | {name: model.headers[other] for name, other in stored.items()}, stored)


def _same_integers(one: Participant, other: Participant, name: str) -> bool:
    """Whether two models have the same integers, whatever their width; what cannot be compared is for other checks."""
    W, V = one.headers[name], other.headers[name]
    if one.checkpoint is other.checkpoint or V.is_floating_point() or V.is_complex():
        return True
    if one.problem(name) or other.problem(name):
        return True
    if (W.dtype == torch.bool) != (V.dtype == torch.bool):
        return False
    return W.shape == V.shape and torch.equal(one.read(name).cpu().to(V.dtype), other.read(name).cpu())


def _twin(model: Checkpoint, name: str, among: Mapping[str, Tensor]) -> str | None:
    """Return the embedding, named in `among`, that a model has also saved under this name, as its head."""
    for other, V in model.headers.items():
        table = other != name and other in among and is_embedding(other) and V.dim() == 2
        if table and not (model.problem(name) or model.problem(other)) and model.equal(name, model, other):
            return other
    return None
