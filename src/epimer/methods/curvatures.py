"""Check the curvature a user gave, before any work; every error names the tensor and the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from epimer.errors import CurvatureError, ParameterError
from epimer.geometry.metric import Diagonal, Metric, Projected
from epimer.geometry.subspace import Pairs, Tagged, clamp_rank
from epimer.methods.inputs import matrix_shape
from epimer.methods.registry import Method
from epimer.methods.rules import is_matrix

Curvatures = Sequence[Mapping[str, Metric]]

CLASSES = {"diagonal": "epimer.Diagonal", "kronecker": "epimer.Kronecker", "samples": "epimer.Samples"}


@dataclass(frozen=True)
class Checked:
    """The curvature of one tensor, fit for use."""

    metrics: tuple[Metric, ...] = ()
    base_metric: Metric | None = None
    basis: Tagged | Pairs | None = None


NOTHING = Checked()


def check_curvatures(curvature: Any, tasks: int, method: Method) -> Curvatures | None:
    """Refuse curvature that is not one mapping per model; None where the method needs none."""
    if curvature is None:
        if method.needs_curvature:
            raise CurvatureError(
                f"{method.name} needs {method.curvature} curvature: pass curvature=, one mapping per model from "
                f"tensor name to {CLASSES[method.curvature or '']}."
            )
        return None
    if isinstance(curvature, Mapping) or not isinstance(curvature, Sequence):
        raise CurvatureError("curvature must be a list with one mapping from tensor names to curvature per model.")
    if len(curvature) != tasks:
        raise CurvatureError(f"curvature has {len(curvature)} entries for {tasks} models; give one mapping per model.")
    for t, one in enumerate(curvature):
        if not isinstance(one, Mapping):
            raise CurvatureError(f"curvature[{t}] must be a mapping from tensor names, got {type(one).__name__}.")
    return curvature


def check_layer(
    name: str,
    rule: str,
    W0: Tensor | None,
    tensors: Sequence[Tensor],
    method: Method,
    p: Any,
    curvatures: Curvatures | None,
) -> Checked:
    """Check everything about curvature and bases that the merge of one tensor will use."""
    if rule == "average":
        return NOTHING
    matrix = rule == "matrix"
    metrics: tuple[Metric, ...] = ()
    if rule == "fisher" or method.needs_curvature:
        kind = "diagonal" if rule == "fisher" else method.curvature or ""
        kinds: tuple[str, ...] = (kind, "projected") if matrix else (kind,)
        kinds += tuple(other.kind for other in Metric.__subclasses__() if kind in other.serves)
        kinds = (kind,) if method.name == "regmean" else kinds
        metrics = layer_metrics(curvatures or (), name, [W0, *tensors], matrix=matrix, kinds=kinds, user=method.name)
        if not metrics and needs_metric(name, rule, tensors[0]):
            raise missing_metric(name, method)
    base_metric = (getattr(p, "base_curvature", None) or {}).get(name)
    if base_metric is not None:
        where = f"base_curvature[{name!r}]"
        base_metric = check_metric(
            base_metric, where, [W0, *tensors], matrix=False, kinds=("diagonal",), user=method.name
        )
    basis = None
    if matrix and hasattr(p, "basis"):
        basis = layer_basis(p.basis, metrics, name, tensors)
        if basis is not None and W0 is None:
            raise CurvatureError(f"{method.name} without a base model cannot use a basis for {name!r}; pass base.")
    return Checked(metrics, base_metric, basis)


def serves(kind: str | None, wanted: str | None) -> bool:
    """Whether methods that want one kind of curvature can take another, as EKFAC in place of Kronecker factors."""
    return kind == wanted or any(metric.kind == kind and wanted in metric.serves for metric in Metric.__subclasses__())


def needs_metric(name: str, rule: str, W: Tensor) -> bool:
    """Whether a tensor of a curved method cannot do without curvature; a vector is averaged where it has none."""
    return rule in ("matrix", "fisher") or is_matrix(name, W.shape)


def missing_metric(name: str, method: Method) -> CurvatureError:
    """Say that a tensor has no curvature."""
    return CurvatureError(
        f"no model has curvature for {name!r}, which {method.name} needs; "
        f"measure it, or give {name!r} the rule 'average'."
    )


def layer_metrics(
    curvature: Curvatures,
    name: str,
    tensors: Sequence[Tensor | None],
    *,
    matrix: bool,
    kinds: Sequence[str],
    user: str,
) -> tuple[Metric, ...]:
    """Return the checked metrics of one tensor, on its matrix view if asked; none if no model has any."""
    found = [one.get(name) for one in curvature]
    if all(metric is None for metric in found):
        return ()
    metrics: list[Metric] = []
    for t, metric in enumerate(found):
        where = f"curvature[{t}][{name!r}]"
        if metric is None:
            raise CurvatureError(f"{where} is missing, while other models have it; measure it for every model.")
        metrics.append(check_metric(metric, where, tensors, matrix=matrix, kinds=kinds, user=user))
        if metrics[t].kind != metrics[0].kind:
            raise CurvatureError(
                f"{where} is of kind {metrics[t].kind}, but curvature[0] is {metrics[0].kind}; use one kind for all."
            )
    return tuple(metrics)


def check_metric(
    metric: Any, where: str, tensors: Sequence[Tensor | None], *, matrix: bool, kinds: Sequence[str], user: str
) -> Metric:
    """Return a metric that fits the tensor, on its matrix view, or say what is wrong with it."""
    wanted = " or ".join(CLASSES[kind] for kind in kinds if kind in CLASSES)
    if not isinstance(metric, Metric) or metric.kind not in kinds:
        raise CurvatureError(
            f"{where} is {type(metric).__name__}, but {user} needs {wanted} here; "
            "measure that kind, or take a method that uses this one."
        )
    present = [W for W in tensors if W is not None]
    narrow = all(W.dtype != torch.float64 for W in present)
    for field in fields(metric):  # type: ignore[arg-type]
        value = getattr(metric, field.name)
        if field.name in ("basis", "inputs") or (value is None and metric.kind in ("kronecker", "projected")):
            continue
        if not isinstance(value, Tensor):
            raise CurvatureError(f"{where}: {field.name} must be a tensor, got {type(value).__name__}.")
        if value.is_complex() or value.layout != torch.strided or value.is_meta:
            raise CurvatureError(f"{where}: {field.name} must be a dense, real tensor, got {value.dtype}.")
        if not narrow or value.dtype != torch.float64 or not value.numel():
            continue
        largest = float(value.abs().max())
        if 0 < largest < 1e-35 or 1e38 < largest < float("inf"):
            raise CurvatureError(
                f"{where}: {field.name} reaches {largest:.1e}, which float32 cannot hold; "
                "multiply every model's curvature by one constant, or pass models in float64."
            )
    W = present[0]
    shape = matrix_shape(W) if matrix else tuple(W.shape)
    problem = metric.problem(tuple(W.shape) if isinstance(metric, Diagonal) else shape)
    if problem:
        raise CurvatureError(f"{where}: {problem}.")
    return Diagonal(metric.F.reshape(shape)) if isinstance(metric, Diagonal) else metric


def layer_basis(bases: Any, metrics: Sequence[Metric], name: str, tensors: Sequence[Tensor]) -> Tagged | Pairs | None:
    """Return the basis the caller fixed for a matrix, from `basis=` or from its projected curvature, if any."""
    chosen: Tagged | Pairs | None = None
    if isinstance(bases, Mapping):
        chosen = bases.get(name)
        if chosen is not None:
            _check_basis(chosen, f"basis[{name!r}]", tensors[0])
    for t, metric in enumerate(metrics):
        if not isinstance(metric, Projected):
            continue
        where = f"curvature[{t}][{name!r}]"
        if metric.basis is not None:
            _check_basis(metric.basis, f"{where}.basis", tensors[0])
            if chosen is None:
                chosen = metric.basis  # type: ignore[assignment]
            elif not _same_basis(chosen, metric.basis):
                raise CurvatureError(f"{where} was measured on another basis than the merge uses; use one basis.")
        if chosen is None:
            raise CurvatureError(
                f"{where} is projected, but its basis is not given; "
                "pass basis= (epimer.build_basis) to the merge or to Projected."
            )
        _check_projected(metric, where, chosen)
    if chosen is None and isinstance(bases, Mapping) and clamp_rank(matrix_shape(tensors[0]), len(tensors), None):
        raise ParameterError(f"basis= has no entry for {name!r}; build it from these models with epimer.build_basis.")
    return chosen


def _check_basis(basis: Any, where: str, W: Tensor) -> None:
    if not isinstance(basis, Tagged | Pairs):
        raise ParameterError(f"{where} must be a basis made by epimer.build_basis, got {type(basis).__name__}.")
    if (len(basis.U), len(basis.V)) != matrix_shape(W):
        raise ParameterError(
            f"{where} is a basis of {len(basis.U)} x {len(basis.V)} matrices, but the tensor is "
            f"{' x '.join(map(str, matrix_shape(W)))}; build it from these models with epimer.build_basis."
        )


def _same_basis(one: Any, other: Any) -> bool:
    return one is other or (
        type(one) is type(other)
        and one.U.shape == other.U.shape
        and one.V.shape == other.V.shape
        and torch.equal(one.U, other.U)
        and torch.equal(one.V, other.V)
    )


def _check_projected(metric: Projected, where: str, basis: Tagged | Pairs) -> None:
    """Refuse projected curvature whose sizes do not fit the basis."""
    if metric.H is not None and isinstance(basis, Pairs):
        raise CurvatureError(f"{where} has a matrix H, which only a tagged basis takes; give A and G.")
    p, q = basis.U.shape[1], basis.V.shape[1]
    dimension = p if isinstance(basis, Pairs) or basis.mix is None else basis.mix.shape[1]
    for label, M, expected in (("H", metric.H, dimension), ("G", metric.G, p), ("A", metric.A, q)):
        if M is not None and len(M) != expected:
            raise CurvatureError(
                f"{where}: {label} is {len(M)} x {len(M)}, but its basis has {expected} directions; "
                "project it on the same basis."
            )
