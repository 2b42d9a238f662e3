"""The walk of a merge into an adapter: task vectors kept as factors where they are, and factors out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from epimer.engine.layer import merge_layer, named_failure
from epimer.engine.task_vectors import Tensors, task_vectors
from epimer.errors import TensorError
from epimer.geometry.factors import below_each_other, cores_of, in_columns, of_rank, padded
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
        if job.experts:  # read one by one as they are merged
            return Tensors(None, [])
        for model in self.plan.participants.models:
            delta = model.delta(job.name, base, job.rows)
            for factor in () if delta is None else (delta.A, delta.B):
                check_finite(model, job.name, factor)
            if delta is not None and job.rows is not None and not len(delta.A):  # of a stack, as one of its matrices
                delta = LowRank(torch.zeros(job.shape[0], 0), torch.zeros(0, job.shape[1]))
            models.append(model.read(job.name, job.rows) if delta is None else delta)
        whole = any(isinstance(W, Tensor) for W in models) or (job.method is not None and job.method.uses_base)
        start = base.read(job.name, job.rows) if whole else None
        return Tensors(start, models, layer_curvature(job, self.plan.participants, self.plan.curvatures))

    def work(self, job: Job, tensors: Tensors, device: torch.device) -> tuple[dict[str, Tensor], TensorRecord]:
        """Return the factors of one merged layer in the shapes of the file, and how it was merged."""
        started, lora = time.perf_counter(), job.lora
        assert lora is not None
        if job.experts:
            written, solution, error = self._merge_experts(job, device)
        else:
            given = [D for D in tensors.models if D is not None]
            merged, solution, error = self._merge(job, tensors, device)
            if isinstance(merged, Tensor):
                with named_failure(job.name, given, range(len(given))):
                    merged, error = of_rank(merged, lora.rank)
            written = lora.tensors(padded(merged, lora.rank).to(torch.device("cpu")))
        if any(map(nonfinite, written.values())):
            raise TensorError(f"the merged {job.name!r} does not fit in {lora.dtype}; lower scale, or widen its dtype.")
        found = solution.status, solution.rank, solution.residual, solution.eta, solution.note
        seconds, unchanged = time.perf_counter() - started, not any(bool(W.any()) for W in written.values())
        return written, TensorRecord(job.rule, tuple(job.template.shape), *found, seconds, unchanged, error)

    def _merge_experts(self, job: Job, device: torch.device) -> tuple[dict[str, Tensor], Solution, float]:
        """Merge the matrices of all experts, one after the other; return A and B of the parameter that holds them.

        Of tensors that are one expert's together (gate and up) the factors are those of both, one below the other. The
        status and the error are the worst.
        """
        assert job.lora is not None
        (outputs, inputs), lora = job.lora.shape, job.lora
        A_eri = torch.zeros(lora.experts, lora.rank, inputs, dtype=lora.dtype)
        B_ore = torch.zeros(outputs, lora.rank, lora.experts, dtype=lora.dtype)
        worst, most = Solution(B_ore[:0]), 0.0
        for e, members in groupby(job.experts, key=lambda one: one[1].number):
            assert e is not None
            pieces = list[tuple[int, Tensor | LowRank]]()
            for one, part in members:
                merged, solution, error = self._merge(one, self.read(one), device)
                pieces.append((part.outputs[0], merged.T if part.inputs_first else merged))
                worst, most = max(worst, solution, key=lambda known: bool(known.status.remedy)), max(most, error)
            factors, error = below_each_other(pieces, outputs, lora.rank)
            whole, most = padded(factors, lora.rank).to(torch.device("cpu")), max(most, error)
            A_eri[e], B_ore[:, :, e] = whole.A, whole.B
        A, B = lora.names
        return {A: A_eri.flatten(0, 1), B: B_ore.flatten(1)}, worst, most

    def _merge(self, job: Job, tensors: Tensors, device: torch.device) -> tuple[Tensor | LowRank, Solution, float]:
        """Return one tensor's merge, as factors or, where they are to have a rank that it may exceed, as a matrix.

        Also how it was merged, and the share that the factors leave out.
        """
        if self.prepared is not None:
            job = replace(job, weights=self.prepared.weights or job.weights)
        given = [D for D in tensors.models if D is not None]
        with named_failure(job.name, given, range(len(given))):
            if job.lora is not None and job.lora.thin:
                return merge_factors(job, [_low_rank(D).to(device) for D in given])
            return self._merge_dense(job, tensors, device)

    def _merge_dense(
        self, job: Job, tensors: Tensors, device: torch.device
    ) -> tuple[Tensor | LowRank, Solution, float]:
        """Merge one tensor's task vectors by a method that forms their merge; as factors where its rank is bounded."""
        given = list(tensors.models)
        start = None if tensors.base is None else tensors.base.to(device, job.precision)
        deltas = task_vectors(self.plan.participants, job, start, tensors, device)
        context = None if self.prepared is None else self.prepared.context
        start = start.reshape(job.shape) if start is not None and job.rows is not None else start
        layer = Layer(job.name, deltas, job.weights, context=context, inputs=job.inputs, base=start)
        solution = merge_layer(job, layer, tensors.curvature.converted(deltas[0]))
        D = job.options.scale * dense(solution.value).reshape(_matrix_shape(job))
        assert self.plan.recipe is not None
        if self.plan.recipe.lora_rank is not None:
            return D, solution, 0.0
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
    m, n = _matrix_shape(job)
    layer = Layer(job.name, cores, job.weights, inputs=job.inputs, whole_shape=(m, n))
    solution = merge_layer(job, layer, NO_CURVATURE)
    factors, error = of_rank(scale * solution.value, job.lora.rank)
    return space.lift(factors), solution, error


def _matrix_shape(job: Job) -> tuple[int, int]:
    """Return the shape of the matrix that is merged: the tensor's, or that of one of a stack."""
    return matrix_shape(job.template[0] if job.stacked else job.template)


def _low_rank(D: Tensor | LowRank | None) -> LowRank:
    assert isinstance(D, LowRank)
    return D
