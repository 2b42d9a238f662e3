"""A task's network into which state dicts are copied by name, as merges of its model are judged and measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from epimer.errors import CheckpointError, listed
from epimer.tasks.loading import WithHead
from epimer.tasks.task import Task


@dataclass(frozen=True)
class TaskNetwork:
    """A loaded task, and where in its network each tensor of a state dict belongs."""

    task: Task
    names: dict[str, str]
    """parameter -> its name in state dicts"""
    targets: dict[str, Tensor]
    """name in state dicts -> the parameter or buffer"""
    stored: dict[str, str]
    """name in state dicts -> name in the model's own checkpoint"""
    aliases: dict[str, list[str]]
    """name in state dicts -> other names of a tied tensor"""
    _changed: set[str] = field(default_factory=set)

    def copy(self, state: Mapping[str, Tensor]) -> nn.Module:
        """Copy a state dict into the network, and return it.

        Tensors that the state dict lacks, or has in another shape, get the values of the task's own model; those that
        the network lacks are left out. A state dict of which nothing fits is refused.
        """
        copied = False
        with torch.no_grad():
            for name, target in self.targets.items():
                found = next((one for one in (name, *self.aliases.get(name, ())) if one in state), None)
                value = None if found is None else state[found]
                if value is not None and value.shape == target.shape:
                    target.copy_(value)
                    self._changed.add(name)
                    copied = True
                elif name in self._changed:
                    target.copy_(self.task.checkpoint.read(self.stored[name]))
                    self._changed.discard(name)
        if not copied:
            raise CheckpointError(
                f"{self.task.checkpoint.where} shares no tensor of the same name and shape with the model to copy into "
                f"it, which has {listed(state)}; give a model of the same ancestor."
            )
        return self.task.model


def task_network(task: Task, known: Collection[str], renamed: Mapping[str, str] | None = None) -> TaskNetwork:
    """Return a task's network for state dicts with the names `known`; `renamed` maps some to the task's own names."""
    converted = [name for name in task.unmatched if not (isinstance(task.model, WithHead) and "pooler" in name)]
    if converted:
        raise CheckpointError(
            f"{task.checkpoint.where} holds {listed(converted)} in another form than transformers does, so merged "
            "tensors cannot be copied in; write a suite as a Python function."
        )
    tied = {stored: name for name, stored in (renamed or {}).items()}
    aliases = _aliases(task)
    names = {}
    for parameter, disk in task.names.items():
        candidates = (disk, tied.get(disk), *aliases.get(disk, ()))
        if (name := next((one for one in candidates if one in known), None)) is not None:
            names[parameter] = name
    parameters: dict[str, Any] = dict(task.model.named_parameters())
    targets = {name: parameters[parameter].data for parameter, name in names.items()}
    buffers = {disk: value for disk, value in _buffers(task.model, known).items() if disk in task.checkpoint.headers}
    stored = {disk: disk for disk in buffers} | {name: task.names[parameter] for parameter, name in names.items()}
    others = {name: [one for one in aliases.get(stored[name], ()) if one != name] for name in targets}
    return TaskNetwork(task, names, {**buffers, **targets}, stored, others)


def _aliases(task: Task) -> dict[str, list[str]]:
    """Return a tensor's name on disk -> all names of it, on disk and in memory, where it is tied to others."""
    groups: dict[int, list[str]] = {}
    for name, W in task.model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(W), []).append(name.removeprefix("backbone."))
    parameters = dict(task.model.named_parameters())
    aliases = {}
    for parameter, disk in task.names.items():
        root = task.checkpoint.ties.get(disk, disk)
        twins = [name for name, twin in task.checkpoint.ties.items() if twin == root]
        group = groups[id(parameters[parameter])]
        if len(group) > 1 or twins:
            aliases[disk] = list(dict.fromkeys((disk, root, *twins, *group)))
    return aliases


def _buffers(model: nn.Module, known: Collection[str]) -> dict[str, Tensor]:
    """Return the buffers that are saved with a model, by the name of the tensor they belong to: equal, or its end."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {}
    for name, value in model.state_dict().items():
        if name in parameters:
            continue
        inner = name.removeprefix("backbone.") if isinstance(model, WithHead) else name
        ends = [disk for disk in known if f".{inner}".endswith(f".{disk}") or f".{disk}".endswith(f".{inner}")]
        disk = inner if inner in known else ends[0] if len(ends) == 1 else None
        if disk is not None:
            buffers[disk] = value
    return buffers
