"""The curvature and the basis of one tensor, read and checked before its merge; errors name tensor and model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import header
from epimer.curvature.curvature import Curvature
from epimer.errors import CurvatureError, ParameterError
from epimer.geometry.linalg import Delta, LowRank
from epimer.geometry.metric import Diagonal, Metric, Projected
from epimer.geometry.subspace import Basis, TensorProduct, atoms_of, basis_problem, clamp_rank, owner_problem
from epimer.methods.frechet import FrechetOptions
from epimer.methods.registry import Method
from epimer.methods.rules import AVERAGED, is_matrix, matrix_shape, stored_name
from epimer.plan.participants import Participants

if TYPE_CHECKING:
    from epimer.plan.jobs import Job

Curvatures = Sequence[Mapping[str, Metric]]
"""one mapping per model from tensor name to curvature"""

CLASSES = {"diagonal": "epimer.Diagonal", "kronecker": "epimer.Kronecker", "samples": "epimer.Samples"}


@dataclass(frozen=True)
class LayerCurvature:
    """The curvature and the basis that the merge of one tensor uses."""

    metrics: list[Metric] = field(default_factory=list)
    base_metric: Metric | None = None
    basis: Basis | None = None

    def converted(self, like: Delta) -> LayerCurvature:
        """Return the same on the device and in the precision of a task vector, letting go of each metric on the way."""
        metrics = [self.metrics.pop(0).to(like.device, like.dtype) for _ in range(len(self.metrics))]
        base_metric = None if self.base_metric is None else self.base_metric.to(like.device, like.dtype)
        factor = like.B if isinstance(like, LowRank) else like
        return LayerCurvature(metrics, base_metric, None if self.basis is None else self.basis.to(factor))


NO_CURVATURE = LayerCurvature()


def layer_curvature(job: Job, participants: Participants, curvatures: Curvatures | None) -> LayerCurvature:
    """Read and check the curvature and the basis that the merge of one tensor will use."""
    name, method = job.matrix, job.method
    if method is None or job.rule in AVERAGED:
        return NO_CURVATURE
    shape, matrix = job.template.shape[1:] if job.stacked else job.template.shape, job.rule == "matrix"
    W = header(shape, job.precision)
    metrics: tuple[Metric, ...] = ()
    if job.rule == "fisher" or method.needs_curvature:
        kinds = accepted_kinds(method, job.rule)
        metrics = layer_metrics(curvatures or (), name, W, matrix=matrix, kinds=kinds, user=method.name)
        if not metrics and needs_metric(name, job.rule, W):
            raise missing_metric(name, method.name, curvatures)
    base_metric = (getattr(job.options, "base_curvature", None) or {}).get(name)
    if base_metric is not None:
        where = f"base_curvature[{name!r}]"
        base_metric = check_metric(base_metric, where, W, matrix=False, kinds=("diagonal",), user=method.name)
    basis = None
    if matrix and isinstance(job.options, FrechetOptions):
        basis = layer_basis(job.options.basis, metrics, name, W, len(job.models), len(job.weights))
        if basis is not None and participants.base is None:
            raise CurvatureError(f"{method.name} without a base model cannot use a basis for {name!r}; pass base.")
    return LayerCurvature(list(metrics), base_metric, basis)


def accepted_kinds(method: Method, rule: str) -> tuple[str, ...]:
    """Return the kinds of curvature that a tensor with this rule can be merged under."""
    return ("diagonal",) if rule == "fisher" else method.accepted


def needs_metric(name: str, rule: str, W: Tensor) -> bool:
    """Whether a tensor of a curved method cannot do without curvature; a vector is averaged where it has none."""
    return rule in ("matrix", "fisher") or is_matrix(name, W.shape)


def missing_metric(name: str, user: str, curvatures: Curvatures | None = None) -> CurvatureError:
    """Return the error about a tensor without curvature, with the reason for which it was not measured."""
    measured = [one.provenance.left_out for one in curvatures or () if isinstance(one, Curvature)]
    tensor = stored_name(name)
    why = next((f" ({left_out[one]})" for left_out in measured for one in (name, tensor) if one in left_out), "")
    problem = f"no model has curvature for {name!r}, which {user} needs{why}"
    return CurvatureError(f"{problem}; measure it, or give {tensor!r} the rule 'average'.")


def layer_metrics(
    curvatures: Curvatures, name: str, W: Tensor, *, matrix: bool, kinds: Sequence[str], user: str
) -> tuple[Metric, ...]:
    """Return the checked metrics of one tensor, or of its `matrix` view; none if no model has any."""
    if not any(name in curvature for curvature in curvatures):
        return ()
    metrics: list[Metric] = []
    for t, curvature in enumerate(curvatures):
        where = f"curvature[{t}][{name!r}]"
        if name not in curvature:
            raise CurvatureError(f"{where} is missing, while other models have it; measure it for every model.")
        metrics.append(check_metric(curvature[name], where, W, matrix=matrix, kinds=kinds, user=user))
        if metrics[t].kind != metrics[0].kind:
            raise CurvatureError(
                f"{where} is of kind {metrics[t].kind}, but curvature[0] is {metrics[0].kind}; use one kind for all."
            )
    return tuple(metrics)


def check_metric(metric: Any, where: str, W: Tensor, *, matrix: bool, kinds: Sequence[str], user: str) -> Metric:
    """Return a metric that fits a tensor, or its `matrix` view; raise why it does not fit otherwise."""
    wanted = " or ".join(CLASSES[kind] for kind in kinds if kind in CLASSES)
    if not isinstance(metric, Metric) or metric.kind not in kinds:
        raise CurvatureError(
            f"{where} is {type(metric).__name__}, but {user} needs {wanted} here; "
            "measure that kind, or take a method that uses this one."
        )
    for part in fields(metric):  # type: ignore[arg-type]
        value = getattr(metric, part.name)
        if part.name in ("basis", "inputs") or (value is None and metric.kind in ("kronecker", "projected")):
            continue
        if not isinstance(value, Tensor):
            raise CurvatureError(f"{where}: {part.name} must be a tensor, got {type(value).__name__}.")
        if value.is_complex() or value.layout != torch.strided or value.is_meta:
            raise CurvatureError(f"{where}: {part.name} must be a dense, real tensor, got {value.dtype}.")
        if W.dtype == torch.float64 or value.dtype != torch.float64 or not value.numel():
            continue
        largest = float(value.abs().max())
        if 0 < largest < 1e-35 or 1e38 < largest < float("inf"):
            raise CurvatureError(
                f"{where}: {part.name} reaches {largest:.1e}, which float32 cannot hold; "
                "multiply every model's curvature by one constant, or pass models in float64."
            )
    shape = matrix_shape(W) if matrix else tuple(W.shape)
    problem = metric.problem(tuple(W.shape) if isinstance(metric, Diagonal) else shape)
    if problem:
        raise CurvatureError(f"{where}: {problem}.")
    return Diagonal(metric.F.reshape(shape)) if isinstance(metric, Diagonal) else metric


def layer_basis(bases: Any, metrics: Sequence[Metric], name: str, W: Tensor, tasks: int, models: int) -> Basis | None:
    """Return the basis that `basis=` or projected curvature fixes for a matrix, if any; `tasks` have a weight."""
    chosen: Basis | None = bases.get(name) if isinstance(bases, Mapping) else None
    if chosen is not None:
        _check_basis(chosen, f"basis[{name!r}]", W, models)
    for t, metric in enumerate(metrics):
        if not isinstance(metric, Projected):
            continue
        where = f"curvature[{t}][{name!r}]"
        if metric.basis is not None:
            _check_basis(metric.basis, f"{where}.basis", W, models)
            if chosen is None:
                chosen = metric.basis  # type: ignore[assignment]
            elif not _equal_bases(chosen, metric.basis):
                raise CurvatureError(f"{where} was measured on another basis than the merge uses; use one basis.")
        if chosen is None:
            raise CurvatureError(
                f"{where} is projected, but its basis is not given; "
                "pass basis= (epimer.build_basis) to the merge or to Projected."
            )
        _check_projected(metric, where, chosen)
    if chosen is None and isinstance(bases, Mapping) and clamp_rank(matrix_shape(W), tasks, None):
        raise ParameterError(f"basis= has no entry for {name!r}; build it from these models with epimer.build_basis.")
    return chosen


def _check_basis(basis: Any, where: str, W: Tensor, models: int) -> None:
    if not isinstance(basis, Basis):
        raise ParameterError(f"{where} must be a basis made by epimer.build_basis, got {type(basis).__name__}.")
    if (len(basis.U), len(basis.V)) != matrix_shape(W):
        raise ParameterError(
            f"{where} is a basis of {len(basis.U)} x {len(basis.V)} matrices, but the tensor is "
            f"{' x '.join(map(str, matrix_shape(W)))}; build it from these models with epimer.build_basis."
        )
    if problem := basis_problem(basis) or owner_problem(atoms_of(basis).owner, models):
        raise ParameterError(f"{where}: {problem}; build it from these models with epimer.build_basis.")


def _equal_bases(left: Any, right: Any) -> bool:
    same_type = type(left) is type(right)
    return left is right or (same_type and torch.equal(left.U, right.U) and torch.equal(left.V, right.V))


def _check_projected(metric: Projected, where: str, basis: Basis) -> None:
    """Refuse projected curvature whose sizes do not fit the basis."""
    if metric.H is not None and isinstance(basis, TensorProduct):
        raise CurvatureError(f"{where} has a matrix H, which only a tagged basis takes; give A and G.")
    p, q = basis.U.shape[1], basis.V.shape[1]
    dimension = p if isinstance(basis, TensorProduct) or basis.mix is None else basis.mix.shape[1]
    for label, M, expected in (("H", metric.H, dimension), ("G", metric.G, p), ("A", metric.A, q)):
        if M is not None and len(M) != expected:
            raise CurvatureError(
                f"{where}: {label} is {len(M)} x {len(M)}, but its basis has {expected} directions; "
                "project it on the same basis."
            )
