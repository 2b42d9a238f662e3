"""The walk that builds bases: the tasks' singular vectors of every matrix, before any curvature is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import header, nbytes
from epimer.engine.layer import named_failure
from epimer.engine.options import RunOptions, in_memory
from epimer.engine.task_vectors import Tensors, read_tensors, task_vectors
from epimer.geometry.subspace import Basis, clamp_rank, tagged, tensor_product
from epimer.methods.options import MethodOptions
from epimer.methods.registry import describe_method
from epimer.methods.rules import is_stack, stored_inputs_first
from epimer.plan.inputs import TensorRules, assign_rules
from epimer.plan.jobs import Job, precision
from epimer.plan.memory import TensorInputs, bytes_to_read, memory_of, smaller_settings
from epimer.plan.participants import Participants
from epimer.progress import Progress
from epimer.recipe.model import depths

KINDS = ("tagged", "tensor")

WeightsOf = Callable[[str, float], Sequence[float]]
"""a tensor's name and depth -> the models' weights"""


@dataclass(frozen=True)
class BasisWalk:
    """Builds the basis of every matrix; tensor names to Tagged or TensorProduct."""

    participants: Participants
    jobs: Sequence[Job]
    rank: int | None
    kind: str

    def read(self, job: Job) -> Tensors:
        """Read one matrix of the base and of every model."""
        return read_tensors(self.participants, job, job.rows, factors=False)

    def work(self, job: Job, tensors: Tensors, device: torch.device) -> Basis:
        """Return the basis of one matrix."""
        deltas = read_deltas(self.participants, job, tensors, device)
        deltas = [deltas[t] for t in job.models]
        with named_failure(job.matrix, deltas, job.models):
            atoms = tagged(deltas, clamp_rank(deltas[0].shape, len(deltas), self.rank))
        atoms = replace(atoms, owner=torch.tensor(job.models, device=atoms.owner.device)[atoms.owner])
        basis = atoms if self.kind == "tagged" else tensor_product(atoms)
        return basis if basis.U.device == job.device else basis.to(basis.U.to(job.device))


def matrix_jobs(
    participants: Participants, assigned: TensorRules, rank: int | None, weights: WeightsOf | None = None
) -> list[Job]:
    """Return a job for every matrix that can give each task a direction, with the memory that its basis takes."""
    tasks, jobs = len(participants.models), []
    method = describe_method("tsv")
    options = method.resolve({"rank": rank})
    depth, inputs_first = depths(list(assigned.rules)), stored_inputs_first(participants.template.headers)
    for name in assigned.matrices:
        W = participants.template.headers[name]
        tensors = [one.headers[name] for one in participants.all]
        reads, dtype = sum(map(nbytes, tensors)), precision(tensors)
        job = Job(
            name,
            "matrix",
            header(W.shape, dtype),
            None,
            MethodOptions(),
            [1 / tasks] * tasks if weights is None else list(weights(name, depth[name])),
            reads,
            0,
            dtype,
            device=torch.device("cpu") if W.is_meta else W.device,
            inputs=0 if name in inputs_first else 1,
            stacked=is_stack(name, W.shape),
        )
        count, parts = len(job.models), len(W) if job.stacked else 1
        if not clamp_rank(job.shape, count, rank):
            continue
        sizes = TensorInputs(count, dtype, bytes_to_read(participants, name) // parts, left_out=tasks - count)
        estimate = partial(memory_of, method, "matrix", header(job.shape, dtype), sizes)
        job = replace(job, memory=estimate(options), smaller=partial(smaller_settings, options, estimate))
        jobs += job.members() if job.stacked else [job]
    return jobs


def read_deltas(participants: Participants, job: Job, tensors: Tensors, device: torch.device) -> list[Tensor]:
    """Return a matrix's task vectors, dense, m x n."""
    assert tensors.base is not None
    return task_vectors(participants, job, tensors.base.to(device).to(job.precision), tensors, device)


def build_bases(
    participants: Participants,
    rules: Sequence[tuple[str, str]],
    *,
    rank: int | None,
    kind: str,
    weights: WeightsOf | None = None,
    run: RunOptions | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Basis]]:
    """Yield the basis of every matrix with its name, in the order of the template.

    Args:
        participants: the base and the models.
        rules: which tensors are matrices, by name pattern.
        rank: directions per task; None is floor(min(m, n) / T).
        kind: tagged or tensor.
        weights: of the models for every tensor; one of weight 0 gives no directions. By default all have the same.
        run: where and within which limits; by default in memory.
        progress: where to show how far it is.
    """
    assigned = assign_rules(participants, rules).checked()
    jobs = matrix_jobs(participants, assigned, rank, weights)
    engine = (run or in_memory(jobs[0].device if jobs else torch.device("cpu"), len(jobs))).start(jobs)
    stage = (progress or Progress(False)).begin("building", sum(job.reads for job in jobs))
    for job, basis in engine.map(BasisWalk(participants, jobs, rank, kind)):
        yield job.matrix, basis
        stage.advance(job.reads, job.matrix)
