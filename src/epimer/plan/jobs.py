"""Plan a merge: every tensor's rule, options, weights and cost, as independent jobs; problems are collected."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

import epimer
from epimer.checkpoints.checkpoint import Checkpoint, Rows, header, nbytes
from epimer.curvature.basis import StoredBasis
from epimer.curvature.curvature import Curvature
from epimer.errors import EpimerError, TensorError
from epimer.methods.frechet import FrechetOptions
from epimer.methods.options import MethodOptions
from epimer.methods.registry import Method, describe_method
from epimer.methods.rules import matrix_shape
from epimer.plan.curvature_inputs import basis_bytes, curvature_bytes
from epimer.plan.inputs import Fates, check_models
from epimer.plan.layer_curvature import Curvatures
from epimer.plan.participants import Participants, public_recipe
from epimer.recipe.model import Recipe, depths

PART = 1 << 28  # a job that takes more memory than this is divided if it can be

Settings = Callable[[str, float], tuple[MethodOptions, list[float]]]
"""a tensor's name and depth -> the method's options and the weights of the models for it"""


@dataclass(frozen=True)
class Job:
    """One tensor of the output, and all that is needed to make it."""

    name: str
    rule: str
    template: Tensor
    """shape and dtype of the result, without data"""
    method: Method | None
    """None where the tensor is copied"""
    options: MethodOptions
    weights: list[float]
    reads: int
    """bytes to read"""
    memory: int
    """bytes in use at once while it is made"""
    precision: torch.dtype = torch.float32
    """of the task vectors and of all arithmetic"""
    rows: Rows = None
    """the part of the tensor that this job makes; None for all of it"""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """where the result goes"""

    @property
    def key(self) -> str:
        """What the job is called, apart from the tensor's other parts."""
        return self.name if self.rows is None else f"{self.name}[{self.rows[0]}:{self.rows[1]}]"

    @property
    def skip(self) -> int:
        """Bytes of the tensor before this part."""
        return 0 if self.rows is None else self.rows[0] * nbytes(self.template[:1])

    @property
    def writes(self) -> int:
        """Bytes to write."""
        return nbytes(self.template)

    @property
    def entrywise(self) -> bool:
        """Whether each entry is merged without a look at the others."""
        elementwise = self.rule == "elementwise" and self.method is not None and self.method.separable
        return self.method is not None and (self.rule == "average" or elementwise)

    @property
    def factored(self) -> bool:
        """Whether task vectors of low rank are merged as their factors."""
        if self.method is None or self.rule != "matrix" or not self.method.factored:
            return False
        return not (isinstance(self.options, FrechetOptions) and self.options.basis == "full")

    def parts(self) -> list[Job]:
        """Divide a wide tensor whose entries do not depend on each other into blocks of rows."""
        count = min(-(-self.memory // PART), len(self.template)) if self.template.dim() else 1
        if count <= 1 or not self.entrywise:
            return [self]
        cuts = [len(self.template) * i // count for i in range(count + 1)]
        return [
            replace(
                self,
                template=self.template[start:stop],
                reads=self.reads * (stop - start) // len(self.template),
                memory=self.memory * (stop - start) // len(self.template) + 1,
                rows=(start, stop),
            )
            for start, stop in pairwise(cuts)
        ]


@dataclass(frozen=True)
class Plan:
    """A validated merge: inputs, jobs, problems."""

    participants: Participants
    method: Method
    curvatures: Curvatures | None
    jobs: list[Job]
    skipped: dict[str, Tensor]
    ties: dict[str, str]
    problems: list[EpimerError]
    notes: list[str]
    recipe: Recipe | None = None
    """what the merge was planned from, where it was a recipe"""
    tokenizer: Path | None = None
    """the folder whose tokenizer the output gets"""
    basis: StoredBasis | None = None

    @property
    def outputs(self) -> dict[str, Tensor]:
        """The tensors of the output in their order, tied ones included."""
        return {job.name: job.template for job in self.jobs}

    @cached_property
    def parts(self) -> list[Job]:
        """What is to be done: every tensor but the tied ones, wide ones in parts."""
        return [part for job in self.jobs if job.name not in self.ties for part in job.parts()]

    @property
    def merged(self) -> list[Job]:
        """The parts that take part in arithmetic."""
        return [job for job in self.parts if job.method is not None]

    @property
    def memory(self) -> int:
        """The bytes that the widest job needs at once."""
        return max((job.memory for job in self.parts), default=0)

    @property
    def reads(self) -> int:
        """The bytes read by the jobs, without pre-passes."""
        return sum(job.reads for job in self.jobs)

    @property
    def writes(self) -> int:
        """The bytes of the output's tensors."""
        return sum(job.writes for job in self.jobs if job.name not in self.ties)

    @cached_property
    def request(self) -> str:
        """A hash of what was asked for: the recipe, with every model replaced by its fingerprint."""
        every = (self.participants.donor, *(one.checkpoint for one in self.participants.all))
        models, beside = ([one.fingerprint for one in some] for some in (every, self.measured_files))
        text = json.dumps([epimer.__version__, self.public_recipe(), models, beside])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def measured_files(self) -> list[Checkpoint]:
        """The files of curvature and bases."""
        files = [one.file for one in self.curvatures or () if isinstance(one, Curvature) and one.file is not None]
        return [*files, *([self.basis.file] if self.basis else [])]

    def public_recipe(self) -> str:
        """Return the recipe as YAML without local paths."""
        return "" if self.recipe is None else public_recipe(self.recipe, self.participants, self.tokenizer)

    def check(self) -> None:
        """Refuse a plan with problems."""
        if self.problems:
            first, more = self.problems[0], len(self.problems) - 1
            raise first if not more else type(first)(f"{first} ({more} more: see epimer merge --dry-run)")
        if not self.jobs:
            raise EpimerError("there is nothing to write: the rules skip every tensor.")


def plan_jobs(
    participants: Participants,
    method: Method,
    settings: Settings,
    rules: Sequence[tuple[str, str]],
    curvatures: Curvatures | None,
    problems: list[EpimerError],
    *,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[list[Job], Fates]:
    """Return a job for every tensor that is written, in the template's order; none where there are problems.

    Args:
        participants: the base and the models.
        method: how they are merged.
        settings: the method's options and the weights for each tensor.
        rules: the user's (pattern, rule) pairs.
        curvatures: one mapping per model, where there is curvature.
        problems: where everything that is wrong is added.
        dtype: float64 to compute in it whatever the models are in.
        out_dtype: of the output's floating-point tensors; by default the template's.
    """
    fates = check_models(participants, rules, problems.append, elementwise=method.elementwise)
    if problems:
        return [], fates
    depth = depths(list(fates.rules))
    jobs = []
    for name, rule in fates.rules.items():
        if rule == "skip":
            continue
        try:
            W = participants.template.headers[name]
            result = header(W.shape, out_dtype if out_dtype is not None and W.is_floating_point() else W.dtype)
            device = torch.device("cpu") if W.is_meta else W.device
            if rule == "copy":
                check_copy(name, W, participants)
                reads = 0 if name in fates.ties else nbytes(W)
                jobs.append(Job(name, rule, result, None, MethodOptions(), [], reads, 2 * nbytes(W), device=device))
                continue
            options, weights = settings(name, depth[name])
            tensors = [one.headers[name] for one in participants.all]
            tasks = len(participants.models)
            extra = reads = 0
            if name not in fates.ties:
                extra = curvature_bytes(name, rule, W, method, curvatures)
                extra += basis_bytes(name, rule, W, tasks, getattr(options, "basis", None))
                reads = sum(map(nbytes, tensors)) + extra
            wide = torch.float64 if dtype == torch.float64 else precision(tensors)
            memory = memory_of(method, rule, reads, W, wide, extra, tasks)
            jobs.append(Job(name, rule, result, method, options, weights, reads, memory, wide, device=device))
        except EpimerError as error:
            if str(error) not in map(str, problems):
                problems.append(error)
    return jobs, fates


def check_copy(name: str, W: Tensor, participants: Participants) -> None:
    """Refuse to copy weights from a base that is not there."""
    if participants.base is None and W.is_floating_point() and W.numel():
        raise TensorError(f"The rule 'copy' takes {name!r} from base, but there is none; pass base.")


def precision(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the precision to compute in: float64 if any input is, float32 otherwise."""
    return torch.float64 if any(W.dtype == torch.float64 for W in tensors) else torch.float32


def memory_of(method: Method, rule: str, reads: int, W: Tensor, dtype: torch.dtype, curvature: int, tasks: int) -> int:
    """Estimate the memory one tensor's merge takes: what is read, the task vectors, and the method's own workspace."""
    method = method if rule != "average" else describe_method("average")
    per_task, fixed = method.workspace
    m, n = matrix_shape(W) if W.numel() and W.dim() else (1, 1)
    aspect = max(m, n) / min(m, n) if method.squares else 1.0
    tensors = tasks + aspect * (tasks * per_task + fixed)
    return int(reads + W.numel() * dtype.itemsize * tensors + 2 * curvature)
