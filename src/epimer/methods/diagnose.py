"""Diagnose state dicts in memory: the theory of every matrix before anything is merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from epimer.errors import CurvatureError, TensorError
from epimer.geometry.metric import Metric, TaskGram
from epimer.geometry.subspace import Tagged, clamp_rank, tagged
from epimer.geometry.theory import diagnose_layer, total
from epimer.methods.inputs import (
    StateDict,
    check_curvatures,
    check_inputs,
    check_weights,
    layer_basis,
    layer_metrics,
    matrix_shape,
    task_vectors,
)
from epimer.methods.registry import describe_method
from epimer.records import Diagnosis, LayerDiagnosis

KINDS = ("diagonal", "kronecker", "samples", "projected")


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
    row.resolve({"rank": rank, "damping": damping, "rules": rules})
    inputs = check_inputs(base, models, row, rules)
    lam = check_weights(weights, len(models), row)
    curvatures = None if curvature is None else check_curvatures(curvature, len(models), row)
    layers: dict[str, LayerDiagnosis] = {}
    energies = []
    for name, W0, tensors in inputs.merged():
        k = clamp_rank(matrix_shape(tensors[0]), len(models), rank) if inputs.rules[name] == "matrix" else 0
        if k == 0:
            continue
        deltas = task_vectors(W0, tensors, matrix=True)
        metrics: list[Metric] | None = [TaskGram(D) for D in deltas]
        if curvatures is not None:
            metrics = layer_metrics(curvatures, name, tensors[0], matrix=True, kinds=KINDS, user="a diagnosis")
        if metrics is None:
            raise CurvatureError(
                f"no model has curvature for {name!r}; measure it, or give {name!r} the rule 'average'."
            )
        metrics = [metric.to(deltas[0].device, deltas[0].dtype) for metric in metrics]
        atoms = layer_basis(basis, metrics, name) or tagged(deltas, k)
        layers[name] = diagnose_layer(atoms, metrics, deltas, lam, damping=damping, rank=k)
        energies.append([float(D.double().square().sum()) for D in deltas])
    if not layers:
        raise TensorError("there is no matrix to diagnose: every tensor is averaged, copied or too small.")
    return Diagnosis(layers, total(list(layers.values()), energies, lam))
