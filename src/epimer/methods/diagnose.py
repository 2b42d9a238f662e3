"""Diagnose state dicts in memory: the theory of every matrix before anything is merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from epimer.errors import CurvatureError, ParameterError, TensorError, short
from epimer.geometry.metric import Metric, TaskGram
from epimer.geometry.subspace import Tagged, clamp_rank, tagged
from epimer.geometry.theory import diagnose_layer, total
from epimer.methods.curvatures import Curvatures, check_curvatures, layer_basis, layer_metrics
from epimer.methods.curved import rank_of
from epimer.methods.inputs import StateDict, check_inputs, check_weights, matrix_shape, task_vectors
from epimer.methods.registry import describe_method
from epimer.records import Diagnosis, LayerDiagnosis

KINDS = ("ekfac", "diagonal", "kronecker", "samples", "projected")


@torch.no_grad()
def diagnose_state_dicts(
    base: StateDict,
    models: Sequence[StateDict],
    *,
    curvature: Sequence[Mapping[str, Metric]] | None = None,
    rank: int | None = 32,
    weights: Sequence[float] | None = None,
    basis: Mapping[str, Tagged] | None = None,
    damping: float = 1e-2,
    rules: Sequence[tuple[str, str]] = (),
) -> Diagnosis:
    """Say, per matrix and in total, how much curvature would gain and how much the merge must lose.

    Args:
        base: the ancestor.
        models: the fine-tuned models.
        curvature: as in `merge_state_dicts`; None takes each task vector's own Gram matrices.
        rank: directions per task of the tagged basis; None is floor(min(m, n) / T).
        weights: one per model.
        basis: the bases that projected curvature was measured on.
        damping: added to each projected curvature of mean diagonal 1.
        rules: which tensors are matrices, by name pattern.
    """
    row = describe_method("epimer")
    p = row.resolve({"rank": rank, "damping": damping, "rules": rules})
    if basis is not None and not isinstance(basis, Mapping):
        raise ParameterError(f"basis must be a mapping from tensor names to bases or None. Got {short(basis)} instead.")
    inputs = check_inputs(base, models, row, p.rules)
    lam = check_weights(weights, len(models), row)
    curvatures = None if curvature is None else check_curvatures(curvature, len(models), row)
    jobs = [
        (name, W0, tensors, *_check(name, W0, tensors, curvatures, basis))
        for name, W0, tensors in inputs.merged()
        if inputs.rules[name] == "matrix" and clamp_rank(matrix_shape(tensors[0]), len(models), p.rank)
    ]
    if not jobs:
        raise TensorError("there is no matrix to diagnose: every tensor is averaged, copied or too small.")
    layers: dict[str, LayerDiagnosis] = {}
    energies = []
    for name, W0, tensors, metrics, fixed in jobs:
        deltas = task_vectors(W0, tensors, matrix=True)
        used = [metric.to(deltas[0].device, deltas[0].dtype) for metric in metrics] or [TaskGram(D) for D in deltas]
        k = clamp_rank(deltas[0].shape, len(models), p.rank) if fixed is None else rank_of(fixed)
        atoms = tagged(deltas, k or 0) if fixed is None else fixed.to(deltas[0])
        layers[name] = diagnose_layer(atoms, used, deltas, lam, damping=p.damping, rank=k)
        energies.append([float(D.double().square().sum()) for D in deltas])
    return Diagnosis(layers, total(list(layers.values()), energies, lam))


def _check(
    name: str,
    W0: Tensor | None,
    tensors: Sequence[Tensor],
    curvatures: Curvatures | None,
    basis: Mapping[str, Tagged] | None,
) -> tuple[tuple[Metric, ...], Tagged | None]:
    """Return the checked curvature and basis of one matrix."""
    metrics: tuple[Metric, ...] = ()
    if curvatures is not None:
        metrics = layer_metrics(curvatures, name, [W0, *tensors], matrix=True, kinds=KINDS, user="a diagnosis")
        if not metrics:
            raise CurvatureError(
                f"no model has curvature for {name!r}; measure it, or give {name!r} the rule 'average'."
            )
    fixed = layer_basis(basis, metrics, name, tensors)
    if fixed is not None and not isinstance(fixed, Tagged):
        raise ParameterError(f"basis[{name!r}] must be a tagged basis for a diagnosis, got {type(fixed).__name__}.")
    return metrics, fixed
