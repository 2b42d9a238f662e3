"""A suite that a file describes, made ready: tensors read when they are needed, one network per task, data in batches.

A network is loaded by transformers once, with its task's own model, and every state dict is copied into it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epimer.checkpoints import open_checkpoint
from epimer.errors import CheckpointError, DataError, EpimerError, listed
from epimer.evaluation.metrics import CLASSES, TOKENS
from epimer.evaluation.suite import Suite, SuiteTask, classification_loss
from epimer.evaluation.suite_file import Described, Entry, describe_suite
from epimer.plan.participants import Role, assign_roles
from epimer.tasks.loading import CAUSAL_LM, Output, WithHead
from epimer.tasks.tables import Table
from epimer.tasks.task import Task, load_task, sample_losses

KEPT = 1 << 28  # bytes of a split's batches that are kept for the next evaluation


def read_suite(
    path: str | Path, *, device: str = "auto", keep: bool = True, labels: bool = True, progress: bool = False
) -> Suite:
    """Read a suite from its file.

    Args:
        path: the YAML file; paths in it are relative to its folder.
        device: where networks compute: cpu, cuda, cuda:N, or auto.
        keep: hold every network and tensor in memory for many evaluations; otherwise one task's network at a time.
        labels: refuse data without them.
        progress: show the progress of downloads.
    """
    described = describe_suite(path, labels=labels, progress=progress)
    with described.at(("base",)):
        base = open_checkpoint(described.base, progress=progress)
    models = []
    for entry in described.entries:
        with described.at((*entry.place, "model")):
            models.append(open_checkpoint(entry.model, progress=progress))
    roles, ancestor, ties = assign_roles(base, models, [entry.model for entry in described.entries])
    assert ancestor is not None
    merged = _shared(described, ancestor, roles)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    networks = Networks(described, roles, merged, device, keep=keep, labels=labels)
    return Suite(
        name=described.name,
        base=Stored(ancestor, merged, ties, keep=keep),
        models=[Stored(role, merged, ties, keep=keep) for role in roles],
        tasks=[networks.task(entry) for entry in described.entries],
        network=networks.network,
        batch=described.batch,
        names=networks.names,
        untrained="base",
    )


class Stored(Mapping[str, Tensor]):
    """Tensors of a checkpoint: read when they are asked for, and kept where they will be asked for again."""

    def __init__(self, role: Role, names: Sequence[str], ties: Mapping[str, str], *, keep: bool) -> None:
        self.role, self.ties = role, ties
        self.headers = {name: role.headers[name] for name in names}
        self.kept: dict[str, Tensor] | None = {} if keep else None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.headers:
            raise KeyError(name)
        if self.kept is None:
            return self.role.read(name)
        first = self.ties.get(name, name)  # names that share a tensor share it here too
        first = first if first in self.headers else name
        if first not in self.kept:
            self.kept[first] = self.role.read(first)
        return self.kept[first]

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)


def _shared(described: Described, base: Role, roles: Sequence[Role]) -> list[str]:
    """Return the tensors that are merged: the base's, without those that are a task's own or that no model has."""
    own = {pattern for entry in described.entries for pattern in entry.own}
    merged = [name for name in base.headers if not _any(own, name) and any(name in role.headers for role in roles)]
    for entry, role in zip(described.entries, roles, strict=True):

        def refuse(message: str, entry: Entry = entry) -> EpimerError:
            return described.source.error((*entry.place, "model"), message)

        for pattern in entry.own:
            if not any(fnmatchcase(name, pattern) for name in role.headers):
                raise described.source.error(
                    (*entry.place, "classifier"),
                    f"the model of task {entry.name!r} has no tensor {pattern!r}; it has {listed(role.headers)}: "
                    "'classifier' takes whole names or patterns such as 'classifier.*'.",
                )
        missing = [name for name in merged if name not in role.headers]
        if not merged or len(missing) == len(merged):
            raise refuse(
                f"{entry.model} shares no tensor with the base: it has {listed(role.headers)}, the base "
                f"{listed(base.headers)}; is it a model of this ancestor, saved with the same prefix?"
            )
        if missing:
            raise refuse(
                f"{entry.model} lacks {listed(missing)}, which base and other models have; give a whole model."
            )
        for name in merged:
            W, W0 = role.headers[name], base.headers[name]
            if W.shape != W0.shape:
                raise refuse(
                    f"{entry.model}[{name!r}] has shape {tuple(W.shape)}, the base's {tuple(W0.shape)}; "
                    "if it belongs to the task, name it in 'classifier'."
                )
        extra = [name for name, W in role.headers.items() if name not in base.headers and W.is_floating_point()]
        extra = [name for name in extra if not _any(own, name)]
        if extra and entry.head is None:
            raise refuse(
                f"{entry.model} has {listed(extra)}, which the base lacks; name them in 'classifier' if they belong "
                "to the task, or give the task a 'head'."
            )
    return merged


def _any(patterns: set[str] | Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# --- networks --------------------------------------------------------------------------------------------------------


class Placed(WithHead):
    """A model with a head that, where the two do not fit, tells the place in the file that names the head."""

    def __init__(self, plain: WithHead, at: Callable[[], Any]) -> None:
        super().__init__(plain.backbone, plain.head, plain.pooling)
        self.at = at
        """what adds the place to an error"""

    def forward(self, **inputs: Tensor) -> Output:
        """Return the logits of a batch."""
        with self.at():
            return super().forward(**inputs)


@dataclass(frozen=True)
class Loaded:
    """A task's network, and where in it each tensor of a state dict belongs."""

    task: Task
    names: dict[str, str]
    """parameter -> its name in state dicts"""
    places: dict[str, Tensor]
    """name in state dicts -> the parameter or buffer"""


@dataclass
class Networks:
    """One network per task, loaded when it is first needed."""

    described: Described
    roles: Sequence[Role]
    merged: Sequence[str]
    device: str
    keep: bool = True
    labels: bool = True
    """whether data without labels is an error"""
    _loaded: dict[str, Loaded] = field(default_factory=dict)

    def task(self, entry: Entry) -> SuiteTask:
        """Return a task whose data is read by its own model's tokenizer or image processor."""
        splits = {split: Rows(self, entry, table) for split, table in entry.tables.items()}
        tokens = entry.kind == CAUSAL_LM
        return SuiteTask(
            entry.name,
            entry.classes,
            splits,
            score=(TOKENS if tokens else CLASSES)[entry.metric],
            loss=sample_losses if tokens else classification_loss,
            metric=entry.metric,
        )

    def network(self, state: Mapping[str, Tensor], task: SuiteTask) -> nn.Module:
        """Put a state dict into the task's network; what it lacks there is the task's own, and stays."""
        loaded = self.loaded(task.name)
        with torch.no_grad():
            for name, place in loaded.places.items():
                place.copy_(state[name])
        return loaded.task.model

    def names(self, task: SuiteTask) -> dict[str, str]:
        """Return parameter -> its name in state dicts."""
        return self.loaded(task.name).names

    def loaded(self, name: str) -> Loaded:
        """Load a task's network, or return it."""
        if name not in self._loaded:
            if not self.keep:
                self._loaded.clear()
            t = next(t for t, entry in enumerate(self.described.entries) if entry.name == name)
            entry = self.described.entries[t]
            with self.described.at((*entry.place, "model")):
                self._loaded[name] = self._load(entry, self.roles[t])
        return self._loaded[name]

    def _load(self, entry: Entry, role: Role) -> Loaded:
        task = load_task(
            entry.model,
            entry.kind,
            head=entry.head,
            pooling=entry.pooling,
            dtype=self.described.dtype,
            device=self.device,
        )
        task.require_labels = self.labels
        if isinstance(task.model, WithHead):
            task.model = Placed(task.model, partial(self.described.at, (*entry.place, "head"))).eval()
        if entry.classes:
            if len(entry.classes) != task.classes:
                raise DataError(f"the model has {task.classes} classes, but 'classes' names {len(entry.classes)}.")
            task.label2id = {name: i for i, name in enumerate(entry.classes)}
        formed = [name for name in task.unmatched if not (isinstance(task.model, WithHead) and "pooler" in name)]
        if formed:
            raise CheckpointError(
                f"{entry.model} holds {listed(formed)} in another form than transformers does, so merged tensors "
                "cannot be put in; write a suite in Python that can."
            )
        merged, other = set(self.merged), {stored: name for name, stored in role.stored.items()}
        memory: dict[str, Any] = dict(task.model.named_parameters())
        stored = {name: disk if disk in merged else other.get(disk, disk) for name, disk in task.names.items()}
        foreign = [disk for name, disk in task.names.items() if stored[name] not in merged and not self._own(disk)]
        if foreign:
            raise CheckpointError(
                f"{entry.model} is run with {listed(foreign)}, which the base lacks; name them in 'classifier' if they "
                "belong to the task."
            )
        names = {name: disk for name, disk in stored.items() if disk in merged}
        places = {disk: memory[name].data for name, disk in names.items()}
        for disk, buffer in _buffers(task.model, merged).items():
            places.setdefault(disk, buffer)
        return Loaded(task, names, places)

    def _own(self, disk: str) -> bool:
        return any(_any(entry.own, disk) for entry in self.described.entries)


def _buffers(model: nn.Module, merged: set[str]) -> dict[str, Tensor]:
    """Return the buffers that are saved with a model, by the name of the tensor they belong to: equal, or its end."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found = {}
    for name, value in model.state_dict().items():
        inner = name.removeprefix("backbone.") if isinstance(model, WithHead) else name
        ends = [disk for disk in merged if f".{inner}".endswith(f".{disk}") or f".{disk}".endswith(f".{inner}")]
        disk = inner if inner in merged else ends[0] if len(ends) == 1 else None
        if name not in parameters and disk is not None:
            found[disk] = value
    return found


# --- data ------------------------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """Rows of a table, made ready for a task's network; small splits are made ready once."""

    networks: Networks
    entry: Entry
    table: Table
    _kept: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.table)

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield (inputs, targets) of all rows, or of those in `order`, some at a time."""
        if order is None and self._kept is not None:
            yield from self._kept
            return
        described, held = self.networks.described, 0
        made: list[Any] = []
        batches = self.networks.loaded(self.entry.name).task.batches(
            self.table,
            range(len(self)) if order is None else order.tolist(),
            batch_size=min(size, described.batch),
            max_length=described.longest,
            **self.entry.columns,
        )
        for inputs, targets in batches:
            held += sum(value.nbytes for value in inputs.values())
            if order is not None or not self.networks.keep or held > KEPT:
                made.clear()
            else:
                made.append((inputs, targets))
            yield inputs, targets
        self._kept = made or None
