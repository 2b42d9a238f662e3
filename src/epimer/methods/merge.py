"""Merge state dicts in memory: check, pre-pass, then one independent job per tensor."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epimer.errors import EpimerWarning, ParameterError, TensorError, listed
from epimer.geometry.linalg import as_compute_dtype, dense, nonfinite
from epimer.geometry.metric import Metric
from epimer.geometry.solution import Solution
from epimer.geometry.subspace import Subspace, clamp_rank, tagged, tensor_product
from epimer.methods.averaging import average
from epimer.methods.curvatures import NOTHING, Checked, check_curvatures, check_layer
from epimer.methods.frechet import FISHER, FrechetOptions, check_without_base, fisher
from epimer.methods.inputs import (
    Inputs,
    StateDict,
    check_inputs,
    check_weights,
    matrix_shape,
    precision,
    task_vectors,
)
from epimer.methods.options import MethodOptions
from epimer.methods.registry import Layer, Method, Prepared, Prepass, describe_method
from epimer.records import MergeRecord, Status, TensorRecord


class MergedState(dict[str, Tensor]):
    """A merged state dict that remembers how it was made."""

    def __init__(self, tensors: Mapping[str, Tensor], record: MergeRecord) -> None:
        super().__init__(tensors)
        self.record = record


def merge_state_dicts(
    base: StateDict | None,
    models: Sequence[StateDict],
    method: str = "epimer",
    *,
    weights: Sequence[float] | None = None,
    curvature: Sequence[Mapping[str, Metric]] | None = None,
    device: str | torch.device | None = None,
    **parameters: Any,
) -> MergedState:
    """Merge models fine-tuned from one base; the result has base's names, shapes and dtypes.

    Args:
        base: the ancestor, name to tensor; None where the method needs none.
        models: the fine-tuned models, with base's names and shapes.
        method: one of `list_methods()`.
        weights: one per model; scaled to sum 1, except in task_arithmetic and dare.
        curvature: one mapping per model from tensor name to Diagonal, Kronecker, Samples or Projected.
        device: where to compute; by default where base is.
        **parameters: the method's own, see `describe_method(method)`.

    Returns:
        The merged state dict; its `record` tells each tensor's rule, rank, status and residual.
    """
    with torch.no_grad():
        row = describe_method(method)
        p = row.resolve(parameters)
        where = check_device(device)
        inputs = check_inputs(base, models, row, p.rules)
        if base is None:
            check_without_base(row, p)
        lam = check_weights(weights, len(models), row)
        curvatures = check_curvatures(curvature, len(models), row)
        check_per_model(p, row, len(models))
        settings = {
            name: Setting(
                name,
                inputs.rules[name],
                row,
                p,
                lam,
                None,
                check_layer(name, inputs.rules[name], W0, tensors, row, p, curvatures),
            )
            for name, W0, tensors in inputs.merged()
        }
        if curvatures is not None and not row.needs_curvature and "fisher" not in inputs.rules.values():
            warnings.warn(f"{method} uses no curvature; what was given is ignored.", EpimerWarning, stacklevel=2)
        prepared = Prepared()
        if row.prepare is not None:
            merged_tensors = [W for _, W0, tensors in inputs.merged() for W in (W0, *tensors)]
            entries = sum(tensors[0].numel() for _, _, tensors in inputs.merged())
            mean = partial(_averaged, inputs, settings, where)
            prepared = row.prepare(Prepass(inputs.merged, lam, mean, entries, precision(merged_tensors)), p)
        settings = {name: s.prepared(prepared) for name, s in settings.items()}
        merged, records = _run(inputs, settings, where)
    warn_of(row.name, records)
    shown = {key: plain(value) for key, value in row.values(p).items()}
    return MergedState(merged, MergeRecord(row.name, shown, tuple(prepared.weights or lam), records))


@torch.no_grad()
def build_basis(
    base: StateDict,
    models: Sequence[StateDict],
    *,
    rank: int | None = 32,
    basis: str = "tagged",
    rules: Sequence[tuple[str, str]] = (),
) -> dict[str, Subspace]:
    """Return the basis of every matrix, by name, to project curvature on before the merge that uses it."""
    row = describe_method("epimer")
    p = row.resolve({"rank": rank, "basis": basis, "rules": rules})
    if p.basis not in ("tagged", "tensor"):
        raise ParameterError(
            f"The 'basis' parameter of build_basis must be 'tagged' or 'tensor'. Got {basis!r} instead."
        )
    inputs = check_inputs(base, models, row, p.rules)
    bases: dict[str, Subspace] = {}
    for name, W0, tensors in inputs.merged():
        k = clamp_rank(matrix_shape(tensors[0]), len(models), p.rank) if inputs.rules[name] == "matrix" else 0
        if k:
            atoms = tagged(task_vectors(W0, tensors, matrix=True), k)
            bases[name] = atoms if basis == "tagged" else tensor_product(atoms)
    return bases


@dataclass(frozen=True)
class Setting:
    """How one tensor is to be merged."""

    name: str
    rule: str
    method: Method
    p: MethodOptions
    weights: list[float]
    context: Any = None
    """what the method's pre-pass found"""
    curvature: Checked = NOTHING

    def prepared(self, found: Prepared) -> Setting:
        """Return the setting with what the pre-pass found."""
        return replace(self, weights=found.weights or self.weights, context=found.context)

    @property
    def entrywise(self) -> bool:
        """Whether each entry is merged without a look at the others."""
        return self.rule == "average" or (self.rule == "elementwise" and self.method.separable)

    @property
    def factored(self) -> bool:
        """Whether task vectors of low rank are taken as they are."""
        full = isinstance(self.p, FrechetOptions) and self.p.basis == "full"
        return self.rule == "matrix" and self.method.factored and not full


def merge_tensor(
    setting: Setting, W0: Tensor | None, deltas: list[Any], template: Tensor
) -> tuple[Tensor, TensorRecord]:
    """Merge one tensor's task vectors onto the base; the result has the template's shape, dtype and device."""
    name = setting.name
    solution = _solution(setting, deltas)
    total = setting.p.scale * dense(solution.value).reshape(template.shape)
    if W0 is not None:
        total += as_compute_dtype(W0)
    result = total.to(device="cpu" if template.is_meta else template.device, dtype=template.dtype)
    if nonfinite(result):
        raise TensorError(f"the merged {name!r} does not fit in {template.dtype}; lower scale, or widen its dtype.")
    record = TensorRecord(
        setting.rule,
        tuple(template.shape),
        solution.status,
        solution.rank,
        solution.residual,
        solution.eta,
        solution.note,
    )
    return result, record


def _solution(setting: Setting, deltas: list[Any]) -> Solution:
    layer = Layer(setting.name, deltas, setting.weights, context=setting.context)
    if setting.rule == "average":
        return average(layer, setting.p)
    checked, like = setting.curvature, deltas[0]
    if setting.method.needs_curvature and not checked.metrics:
        return replace(average(layer, setting.p), note="no curvature: averaged")
    base_metric = checked.base_metric
    layer = replace(
        layer,
        metrics=[metric.to(like.device, like.dtype) for metric in checked.metrics],
        base_metric=None if base_metric is None else base_metric.to(like.device, like.dtype),
        basis=None if checked.basis is None else checked.basis.to(like),
    )
    return fisher(layer, FISHER) if setting.rule == "fisher" else setting.method.merge(layer, setting.p)


def check_delta(who: str, name: str, D: Tensor) -> None:
    """Refuse a task vector that overflowed."""
    if nonfinite(D):
        raise TensorError(f"{who}[{name!r}] is too far from base for {D.dtype}; pass both in float64.")


def check_per_model(p: MethodOptions, method: Method, tasks: int) -> None:
    """Refuse parameters that come as a list of another length than there are models."""
    for parameter in method.parameters:
        value = getattr(p, parameter.name)
        if (parameter.per_model or parameter.kind == "numbers") and isinstance(value, list) and len(value) != tasks:
            raise ParameterError(
                f"The {parameter.name!r} parameter of {method.name} must be {parameter.expected}. "
                f"Got {len(value)} entries for {tasks} models instead."
            )


def _run(
    inputs: Inputs, settings: Mapping[str, Setting], device: torch.device | None
) -> tuple[dict[str, Tensor], dict[str, TensorRecord]]:
    """Merge state dicts in memory, tensor by tensor."""
    merged: dict[str, Tensor] = {}
    records: dict[str, TensorRecord] = {}
    for name, rule in inputs.rules.items():
        W = inputs.template[name]
        if twin := inputs.ties.get(name):
            merged[name] = merged[twin]
            records[name] = tied(records[twin], twin)
        elif rule in ("copy", "skip"):
            if rule == "copy":
                check_copy(name, W, inputs.base)
                merged[name] = W.detach().clone()
            records[name] = TensorRecord(rule, tuple(W.shape))
        else:
            W0 = None if inputs.base is None else _here(inputs.base[name], device)
            tensors = [_here(model[name], device) for model in inputs.models]
            deltas = task_vectors(W0, tensors, matrix=rule == "matrix")
            for t, D in enumerate(deltas):
                check_delta(f"models[{t}]", name, D)
            merged[name], records[name] = merge_tensor(settings[name], W0, deltas, W)
    return merged, records


def tied(record: TensorRecord, twin: str) -> TensorRecord:
    """Return the record of a tensor that shares another's."""
    return replace(record, status=Status.TIED, note=f"tied to {twin}")


def check_copy(name: str, W: Tensor, base: object) -> None:
    """Refuse to copy weights from a base that is not there."""
    if base is None and W.is_floating_point() and W.numel():
        raise TensorError(f"The rule 'copy' takes {name!r} from base, but there is none; pass base.")


def _averaged(
    inputs: Inputs, settings: Mapping[str, Setting], device: torch.device | None, weights: list[float]
) -> dict[str, Tensor]:
    """Return the models' plain average under these weights, with this merge's rules."""
    row = describe_method("average")
    p = row.resolve({})
    return _run(inputs, {n: replace(s, method=row, p=p, weights=weights) for n, s in settings.items()}, device)[0]


def _here(W: Tensor, device: torch.device | None) -> Tensor:
    return W.detach() if device is None else W.detach().to(device)


def check_device(device: str | torch.device | None) -> torch.device | None:
    """Return a device that can be used here."""
    if device is None:
        return None
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ParameterError(
            f"device {device!r} cannot be used here ({str(error).splitlines()[0]}); use 'cpu'."
        ) from error
    if found.type == "meta":
        raise ParameterError("device 'meta' cannot be used: it has no data; use 'cpu' or 'cuda'.")
    return found


def plain(value: Any) -> Any:
    """Return a parameter as it can be written down: what is not plain data is named by its type."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return type(value).__name__


def warn_of(method: str, records: Mapping[str, TensorRecord]) -> None:
    """Say once per kind what did not go exactly as asked."""
    lowered = [name for name, r in records.items() if r.note.startswith("rank") and r.status is not Status.TIED]
    if lowered:
        ranks = sorted({r for name in lowered if (r := records[name].rank) is not None})
        note = records[lowered[0]].note
        note = note if len(ranks) < 2 else f"{note.rpartition(' ')[0]} {ranks[0]} to {ranks[-1]}"
        warnings.warn(f"{method}: {note} in {listed(lowered)}: floor(min(m, n) / T).", EpimerWarning, stacklevel=3)
    for status in (Status.CLAMPED, Status.DAMPED, Status.STALLED):
        names = [name for name, r in records.items() if r.status is status]
        if names:
            text = f"{method}: {status.meaning}: {listed(names)}. {status.remedy}"
            warnings.warn(text.rstrip(), EpimerWarning, stacklevel=3)
