"""The walk of a merge into an adapter: task vectors kept as factors where they are, and factors out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epimer.engine.layer import merge_layer, named_failure
from epimer.engine.task_vectors import Tensors, task_vectors
from epimer.errors import TensorError
from epimer.geometry.factors import cores_of, in_columns, of_rank, padded
from epimer.geometry.linalg import LowRank, dense, nonfinite
from epimer.geometry.solution import Solution
from epimer.methods.registry import Layer, Prepared
from epimer.methods.rules import matrix_shape
from epimer.plan.inputs import check_finite
from epimer.plan.jobs import Job, Plan
from epimer.plan.layer_curvature import NO_CURVATURE, layer_curvature
from epimer.records import TensorRecord

ROUNDING = 1e-3  # share of a merge of bounded rank that may lie outside of the adapters' columns in float32


@dataclass(frozen=True)
class FactorWalk:
    """Merges the layers of an adapter: jobs to the tensors A and B by name, and a record."""

    plan: Plan
    jobs: Sequence[Job]
    prepared: Prepared | None = None

    def read(self, job: Job) -> Tensors:
        """Read what every model adds to one tensor as factors; the tensor itself, and the base's, where it has none."""
        base, models = self.plan.participants.base, list[Tensor | LowRank | None]()
        assert base is not None
        for model in self.plan.participants.models:
            delta = model.delta(job.name, base)
            for factor in () if delta is None else (delta.A, delta.B):
                check_finite(model, job.name, factor)
            models.append(model.read(job.name) if delta is None else delta)
        whole = any(isinstance(W, Tensor) for W in models) or (job.method is not None and job.method.uses_base)
        start = base.read(job.name) if whole else None
        return Tensors(start, models, layer_curvature(job, self.plan.participants, self.plan.curvatures))

    def work(self, job: Job, tensors: Tensors, device: torch.device) -> tuple[dict[str, Tensor], TensorRecord]:
        """Return the factors of one merged layer in the shapes of the file, and how it was merged."""
        started, lora = time.perf_counter(), job.lora
        assert lora is not None
        if self.prepared is not None:
            job = replace(job, weights=self.prepared.weights or job.weights)
        given = [D for D in tensors.models if D is not None]
        with named_failure(job.name, given, range(len(given))):
            if lora.thin:
                factors, solution, error = merge_factors(job, [_low_rank(D).to(device) for D in given])
            else:
                factors, solution, error = self._merge_dense(job, tensors, device)
        written = lora.tensors(padded(factors, lora.rank).to(torch.device("cpu")))
        if any(map(nonfinite, written.values())):
            raise TensorError(f"the merged {job.name!r} does not fit in {lora.dtype}; lower scale, or widen its dtype.")
        found = solution.status, solution.rank, solution.residual, solution.eta, solution.note
        seconds, unchanged = time.perf_counter() - started, not any(bool(W.any()) for W in (factors.B, factors.A))
        return written, TensorRecord(job.rule, tuple(job.template.shape), *found, seconds, unchanged, error)

    def _merge_dense(self, job: Job, tensors: Tensors, device: torch.device) -> tuple[LowRank, Solution, float]:
        """Merge one tensor's task vectors by a method that forms their merge, and return that as factors."""
        assert job.lora is not None
        given = list(tensors.models)
        start = None if tensors.base is None else tensors.base.to(device, job.precision)
        deltas = task_vectors(self.plan.participants, job, start, tensors, device)
        context = None if self.prepared is None else self.prepared.context
        layer = Layer(job.name, deltas, job.weights, context=context, inputs=job.inputs, base=start)
        solution = merge_layer(job, layer, tensors.curvature.converted(deltas[0]))
        D = job.options.scale * dense(solution.value).reshape(matrix_shape(job.template))
        assert self.plan.recipe is not None
        if self.plan.recipe.lora_rank is not None:
            return _replaced(of_rank(D, job.lora.rank), solution)
        parts = [_low_rank(given[t]).to(device) for t in job.models]
        if job.inputs:
            factors, error = in_columns(D, torch.cat([part.B for part in parts], dim=1))
        else:
            factors, error = in_columns(D.T, torch.cat([part.A for part in parts]).T)
            factors = factors.T
        if error > ROUNDING:
            raise TensorError(
                f"{error:.2g} of the merged {job.name!r} lies outside of the adapters' directions; give lora_rank."
            )
        return factors, solution, error


def merge_factors(job: Job, deltas: Sequence[LowRank]) -> tuple[LowRank, Solution, float]:
    """Return the merge of factors as factors of the job's rank, and the share of it that they leave out.

    A weighted sum whose ranks add up is [w_1 B_1 … w_T B_T] [A_1; …; A_T]. Anything else is merged in the space that
    the factors span: with D_t = P C_t Qᵀ, the merge is P (merge of C_t) Qᵀ.
    """
    assert job.lora is not None
    taking_part = [deltas[t] for t in job.models]
    scale, rank = job.options.scale, sum(len(D.A) for D in taking_part)
    if job.is_weighted_sum and rank == job.lora.rank:
        weighted = [LowRank(scale * job.weights[t] * deltas[t].B, deltas[t].A) for t in job.models]
        B, A = torch.cat([D.B for D in weighted], dim=1), torch.cat([D.A for D in weighted])
        return LowRank(B, A), Solution(B), 0.0
    space = cores_of(taking_part)
    zero = torch.zeros(space.P.shape[1], space.Q.shape[1], dtype=torch.float64, device=space.P.device)
    cores = [zero] * len(deltas)
    for t, core in zip(job.models, space.cores, strict=True):
        cores[t] = core
    m, n = matrix_shape(job.template)
    layer = Layer(job.name, cores, job.weights, inputs=job.inputs, whole_shape=(m, n))
    solution = merge_layer(job, layer, NO_CURVATURE)
    factors, error = of_rank(scale * solution.value, job.lora.rank)
    return space.lift(factors), solution, error


def _replaced(factors: tuple[LowRank, float], solution: Solution) -> tuple[LowRank, Solution, float]:
    return factors[0], solution, factors[1]


def _low_rank(D: Tensor | LowRank | None) -> LowRank:
    assert isinstance(D, LowRank)
    return D
