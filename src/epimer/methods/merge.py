"""Merge state dicts in memory: check, pre-pass, then one independent job per tensor."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from epimer.errors import EpimerWarning, ParameterError, TensorError, listed
from epimer.geometry.linalg import nonfinite, working
from epimer.geometry.metric import Metric
from epimer.geometry.subspace import Subspace, clamp_rank, pairs, tagged
from epimer.methods.curvatures import Checked, check_curvatures, check_layers
from epimer.methods.curved import FISHER, check_without_base, entrywise
from epimer.methods.elementwise import average
from epimer.methods.inputs import Inputs, StateDict, check_inputs, check_weights, matrix_shape, task_vectors
from epimer.methods.registry import Layer, Method, Outcome, Prepared, Prepass, describe_method
from epimer.records import MergeRecord, TensorRecord


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
        where = _device(device)
        inputs = check_inputs(base, models, row, p.rules)
        if base is None:
            check_without_base(row, p)
        lam = check_weights(weights, len(models), row)
        curvatures = check_curvatures(curvature, len(models), row)
        if getattr(p, "samples", None) is not None and len(p.samples) != len(models):
            raise ParameterError(f"samples has {len(p.samples)} entries for {len(models)} models; give one per model.")
        checked = check_layers(inputs, row, p, curvatures)
        if curvatures is not None and not row.needs_curvature and "fisher" not in inputs.rules.values():
            warnings.warn(f"{method} uses no curvature; what was given is ignored.", EpimerWarning, stacklevel=2)
        job = _Job(inputs, row, p, Prepared(lam), checked, where)
        if row.prepare is not None:
            job.prepared = row.prepare(Prepass(inputs.merged, lam, job.average), p)
        merged, records = job.run()
    _warn(row.name, records)
    shown = {key: _plain(value) for key, value in vars(p).items()}
    return MergedState(merged, MergeRecord(row.name, shown, tuple(job.prepared.weights), records))


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
            bases[name] = atoms if basis == "tagged" else pairs(atoms)
    return bases


class _Job:
    """One merge: the parts every tensor needs."""

    def __init__(
        self,
        inputs: Inputs,
        method: Method,
        p: Any,
        prepared: Prepared,
        checked: Mapping[str, Checked],
        device: torch.device | None,
    ) -> None:
        self.inputs, self.method, self.p = inputs, method, p
        self.prepared, self.checked, self.device = prepared, checked, device

    def average(self, weights: list[float]) -> dict[str, Tensor]:
        """Return the models' plain average under these weights, with this merge's rules."""
        row = describe_method("average")
        return _Job(self.inputs, row, row.resolve({}), Prepared(weights), self.checked, self.device).run()[0]

    def run(self) -> tuple[dict[str, Tensor], dict[str, TensorRecord]]:
        merged: dict[str, Tensor] = {}
        records: dict[str, TensorRecord] = {}
        for name, rule in self.inputs.rules.items():
            W = self.inputs.template[name]
            if twin := self.inputs.ties.get(name):
                merged[name] = merged[twin]
                records[name] = replace(records[twin], status="tied", note=f"tied to {twin}")
                continue
            outcome = Outcome(W)
            if rule == "copy":
                if self.inputs.base is None and W.is_floating_point() and W.numel():
                    raise TensorError(f"The rule 'copy' takes {name!r} from base, but there is none; pass base.")
                merged[name] = W.detach().clone()
            elif rule != "skip":
                W0 = None if self.inputs.base is None else self._here(self.inputs.base[name])
                outcome = self._merge(name, rule, W0)
                merged[name] = self._finish(name, outcome.delta, W0)
            records[name] = TensorRecord(
                rule, tuple(W.shape), outcome.status, outcome.rank, outcome.residual, outcome.eta, outcome.note
            )
        return merged, records

    def _merge(self, name: str, rule: str, W0: Tensor | None) -> Outcome:
        tensors = [self._here(model[name]) for model in self.inputs.models]
        deltas = task_vectors(W0, tensors, matrix=rule == "matrix")
        for t, D in enumerate(deltas):
            if nonfinite(D):
                raise TensorError(f"models[{t}][{name!r}] is too far from base for {D.dtype}; pass both in float64.")
        layer = Layer(name, deltas, self.prepared.weights, context=self.prepared.context)
        if rule == "average":
            return average(layer, self.p)
        checked, like = self.checked[name], deltas[0]
        if self.method.needs_curvature and not checked.metrics:
            return replace(average(layer, self.p), note="no curvature: averaged")
        base_metric = checked.base_metric
        layer = replace(
            layer,
            metrics=[metric.to(like.device, like.dtype) for metric in checked.metrics],
            base_metric=None if base_metric is None else base_metric.to(like.device, like.dtype),
            basis=None if checked.basis is None else checked.basis.to(like),
        )
        return entrywise(layer, FISHER) if rule == "fisher" else self.method.merge(layer, self.p)

    def _finish(self, name: str, delta: Tensor, W0: Tensor | None) -> Tensor:
        """Add the scaled delta to the base, in the template's shape, dtype and device."""
        template = self.inputs.template[name]
        total = self.p.scale * delta.reshape(template.shape)
        if W0 is not None:
            total = working(W0) + total
        result = total.to(device=template.device, dtype=template.dtype)
        if nonfinite(result):
            raise TensorError(f"the merged {name!r} does not fit in {template.dtype}; lower scale, or widen base.")
        return result

    def _here(self, W: Tensor) -> Tensor:
        return W.detach() if self.device is None else W.detach().to(self.device)


def _device(device: str | torch.device | None) -> torch.device | None:
    if device is None:
        return None
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ParameterError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error
    if found.type == "meta":
        raise ParameterError("device 'meta' cannot be used: it has no data; use 'cpu' or 'cuda'.")
    return found


def _plain(value: Any) -> Any:
    """Return a parameter as it can be written down: what is not plain data is named by its type."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return type(value).__name__


def _warn(method: str, records: Mapping[str, TensorRecord]) -> None:
    """Say once per kind what did not go exactly as asked."""
    lowered = [name for name, r in records.items() if r.note.startswith("rank") and r.status != "tied"]
    if lowered:
        first = records[lowered[0]].note
        warnings.warn(f"{method}: {first} in {listed(lowered)}: floor(min(m, n) / T).", EpimerWarning, stacklevel=3)
    for status, meaning in (
        ("clamped", "too small to give every task a direction, averaged"),
        ("damped", "singular curvature, damped"),
        ("stalled", "conjugate gradients stopped above the tolerance"),
    ):
        names = [name for name, r in records.items() if r.status == status]
        if names:
            warnings.warn(f"{method}: {meaning}: {listed(names)}.", EpimerWarning, stacklevel=3)
