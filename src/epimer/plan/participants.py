"""Who is who in a merge: every checkpoint under the names of the one that gives the output its shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from epimer.checkpoints.checkpoint import Checkpoint, Rows, is_table


@dataclass(frozen=True)
class Role:
    """A checkpoint's part in the merge: what errors call it, and its tensors under the merge's names."""

    label: str
    checkpoint: Checkpoint
    headers: Mapping[str, Tensor]
    stored: Mapping[str, str] = field(default_factory=dict)
    """names that this checkpoint keeps under another one, which they are tied to"""

    def read(self, name: str, rows: Rows = None) -> Tensor:
        """Return one tensor, or some of its rows."""
        return self.checkpoint.read(self.stored.get(name, name), rows)


def assign_roles(
    base: Checkpoint | None, models: Sequence[Checkpoint], names: Sequence[str]
) -> tuple[list[Role], Role | None, dict[str, str]]:
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
    roles, ties = [], dict(known)
    for t, (given, model) in enumerate(zip(names, models, strict=True)):
        stored = {}
        for name in template.headers:
            others = [other for other in groups[known.get(name, name)] if other in model.headers]
            if name not in model.headers and others:
                stored[name] = others[0]
        shared = {model.ties.get(name, name) for name in model.headers if name in template.headers}
        headers = {
            name: W
            for name, W in model.headers.items()
            if name in template.headers
            or not (model.ties.get(name, name) in shared or _twin(model, name, template.headers))
        } | {name: model.headers[other] for name, other in stored.items()}

        def place(name: str, model: Checkpoint = model, stored: Mapping[str, str] = stored) -> str:
            name = stored.get(name, name)
            return model.ties.get(name, name)

        ties = {name: twin for name, twin in ties.items() if place(name) == place(twin)}
        roles.append(Role(f"models[{t}] ({given})", model, headers, stored))
    return roles, None if base is None else Role("base", base, base.headers), ties


def _twin(model: Checkpoint, name: str, among: Mapping[str, Tensor]) -> str | None:
    """Return the embedding, named in `among`, that a model has also saved under this name, as its head."""
    for other, V in model.headers.items():
        if other != name and other in among and is_table(other) and V.dim() == 2 and model.equal(name, model, other):
            return other
    return None
