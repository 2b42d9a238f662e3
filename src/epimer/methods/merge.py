"""Merge state dicts in memory: check, pre-pass, then one independent job per tensor."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from epimer.errors import CurvatureError, EpimerError, EpimerWarning, ParameterError, TensorError, listed
from epimer.geometry.frechet import weighted_sum
from epimer.geometry.linalg import nonfinite, working
from epimer.geometry.metric import Metric
from epimer.geometry.subspace import Subspace, clamp_rank, pairs, tagged
from epimer.methods.curved import check_without_base, frechet
from epimer.methods.inputs import (
    Curvatures,
    Inputs,
    StateDict,
    check_curvatures,
    check_inputs,
    check_metric,
    check_weights,
    layer_basis,
    layer_metrics,
    matrix_shape,
    task_vectors,
)
from epimer.methods.registry import Layer, Method, Outcome, Prepared, Prepass, describe_method
from epimer.methods.rules import is_matrix
from epimer.records import MergeRecord, TensorRecord

# The rule 'fisher': the fisher preset, for single tensors of any method.
_FISHER = SimpleNamespace(
    basis="full", rank=None, aggregator="mean", normalize="none", damping=0.0, jitter=0.0, projection_tol=0.0
)


class MergedState(dict[str, Tensor]):
    """A merged state dict that remembers how it was made."""

    def __init__(self, tensors: Mapping[str, Tensor], record: MergeRecord) -> None:
        super().__init__(tensors)
        self.record = record


@torch.no_grad()
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
    row = describe_method(method)
    p = row.resolve(parameters)
    inputs = check_inputs(base, models, row, p.rules)
    if base is None:
        check_without_base(row, p)
    lam = check_weights(weights, len(models), row)
    curvatures = check_curvatures(curvature, len(models), row)
    if curvatures is not None and not row.needs_curvature and "fisher" not in inputs.rules.values():
        warnings.warn(f"{method} uses no curvature; what was given is ignored.", EpimerWarning, stacklevel=2)
    if getattr(p, "samples", None) and len(p.samples) != len(models):
        raise ParameterError(f"samples has {len(p.samples)} entries for {len(models)} models; give one per model.")
    prepared = Prepared(lam)
    if row.prepare is not None:
        prepared = row.prepare(Prepass(inputs.merged, lam, lambda w: _average(inputs, w)), p)
    job = _Job(inputs, row, p, prepared, curvatures, _device(device))
    merged, records = job.run()
    _warn(row.name, records)
    shown = {key: _plain(value) for key, value in vars(p).items()}
    return MergedState(merged, MergeRecord(row.name, shown, tuple(prepared.weights), records))


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
    if basis not in ("tagged", "tensor"):
        raise ParameterError(
            f"The 'basis' parameter of build_basis must be 'tagged' or 'tensor'. Got {basis!r} instead."
        )
    inputs = check_inputs(base, models, row, p.rules)
    bases: dict[str, Subspace] = {}
    for name, W0, tensors in inputs.merged():
        k = clamp_rank(matrix_shape(tensors[0]), len(models), rank) if inputs.rules[name] == "matrix" else 0
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
        curvatures: Curvatures | None,
        device: torch.device | None,
    ) -> None:
        self.inputs, self.method, self.p = inputs, method, p
        self.prepared, self.curvatures, self.device = prepared, curvatures, device

    def run(self) -> tuple[dict[str, Tensor], dict[str, TensorRecord]]:
        merged: dict[str, Tensor] = {}
        records: dict[str, TensorRecord] = {}
        seen: dict[Any, str] = {}
        for name, rule in self.inputs.rules.items():
            W = self.inputs.template[name]
            shape = tuple(W.shape)
            if rule == "skip":
                records[name] = TensorRecord(rule, shape)
                continue
            twin = seen.setdefault((_storage(W), rule), name) if W.numel() else name
            if twin != name and self._tied(name, twin):
                merged[name] = merged[twin]
                records[name] = replace(records[twin], status="tied", note=f"tied to {twin}")
                continue
            if rule == "copy":
                if self.inputs.base is None and W.is_floating_point() and W.numel():
                    raise TensorError(f"The rule 'copy' takes {name!r} from base, but there is none; pass base.")
                merged[name], records[name] = W.detach().clone(), TensorRecord(rule, shape)
                continue
            outcome = self._merge(name, rule)
            merged[name] = self._finish(name, outcome.delta)
            records[name] = TensorRecord(
                rule, shape, outcome.status, outcome.rank, outcome.residual, outcome.eta, outcome.note
            )
        return merged, records

    def _tied(self, name: str, twin: str) -> bool:
        """Whether two names tied in the template are one tensor in every model as well."""
        return all(
            name in model
            and twin in model
            and (_storage(model[name]) == _storage(model[twin]) or torch.equal(model[name], model[twin]))
            for model in self.inputs.models
        )

    def _merge(self, name: str, rule: str) -> Outcome:
        inputs, method, p = self.inputs, self.method, self.p
        W0 = None if inputs.base is None else self._here(inputs.base[name])
        tensors = [self._here(model[name]) for model in inputs.models]
        layer = Layer(
            name,
            task_vectors(W0, tensors, matrix=rule == "matrix"),
            self.prepared.weights,
            context=self.prepared.context,
        )
        if rule == "average":
            return Outcome(weighted_sum(layer.deltas, layer.weights))
        if rule == "fisher":
            metrics = self._metrics(name, rule, layer.deltas[0], "diagonal", required=True)
            return frechet(replace(layer, metrics=metrics), _FISHER)
        if method.needs_curvature:
            required = rule == "matrix" or is_matrix(name, tensors[0].shape)
            metrics = self._metrics(name, rule, layer.deltas[0], method.curvature or "", required=required)
            if not metrics:
                delta = weighted_sum(layer.deltas, layer.weights) * (p.scale if method.own_scale else 1)
                return Outcome(delta, note="no curvature: averaged")
            layer = replace(layer, metrics=metrics, base_metric=self._base_metric(name, layer.deltas[0]))
        if rule == "matrix" and hasattr(p, "basis"):
            layer = replace(layer, basis=layer_basis(p.basis, layer.metrics, name))
        return method.merge(layer, p)

    def _metrics(self, name: str, rule: str, D: Tensor, kind: str, *, required: bool) -> list[Metric]:
        found = None
        if self.curvatures is not None:
            found = layer_metrics(
                self.curvatures,
                name,
                self.inputs.template[name],
                matrix=rule == "matrix",
                kinds=(kind, "projected") if rule == "matrix" else (kind,),
                user=self.method.name,
            )
        if found is None and required:
            raise CurvatureError(
                f"no model has curvature for {name!r}, which {self.method.name} needs; "
                f"measure it, or give {name!r} the rule 'average'."
            )
        return [metric.to(D.device, D.dtype) for metric in found or ()]

    def _base_metric(self, name: str, D: Tensor) -> Metric | None:
        metric = (getattr(self.p, "base_curvature", None) or {}).get(name)
        if metric is None:
            return None
        where = f"base_curvature[{name!r}]"
        if getattr(metric, "kind", None) != "diagonal":
            raise CurvatureError(f"{where} must be epimer.Diagonal, got {type(metric).__name__}.")
        return check_metric(metric, where, self.inputs.template[name], matrix=False).to(D.device, D.dtype)

    def _finish(self, name: str, delta: Tensor) -> Tensor:
        """Add the scaled delta to the base, in the template's shape, dtype and device."""
        template = self.inputs.template[name]
        scale = 1.0 if self.method.own_scale and self.inputs.rules[name] == "elementwise" else self.p.scale
        total = scale * delta.reshape(template.shape)
        if self.inputs.base is not None:
            total = working(self._here(self.inputs.base[name])) + total
        result = total.to(device=template.device, dtype=template.dtype)
        if nonfinite(result):
            raise TensorError(
                f"the merged {name!r} does not fit in {template.dtype}; lower scale, or pass base in float32."
            )
        return result

    def _here(self, W: Tensor) -> Tensor:
        return W.detach() if self.device is None else W.detach().to(self.device)


def _average(inputs: Inputs, weights: list[float]) -> dict[str, Tensor]:
    row = describe_method("average")
    return _Job(inputs, row, row.resolve({}), Prepared(weights), None, None).run()[0]


def _device(device: str | torch.device | None) -> torch.device | None:
    if device is None:
        return None
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise EpimerError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return found


def _storage(W: Tensor) -> tuple[Any, ...]:
    return W.data_ptr(), W.device, W.dtype, tuple(W.shape), W.stride()


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
