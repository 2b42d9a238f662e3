"""Plan a merge: every tensor's rule, options, weights and cost, as independent jobs; problems are collected."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

import epimer
from epimer.checkpoints.adapter_files import LoraModule
from epimer.checkpoints.checkpoint import Checkpoint, Rows, header, nbytes
from epimer.checkpoints.expert_factors import ExpertPart
from epimer.curvature.basis import StoredBasis
from epimer.curvature.curvature import Curvature
from epimer.errors import EpimerError, TensorError
from epimer.methods.averaging import average
from epimer.methods.frechet import FrechetOptions
from epimer.methods.options import MethodOptions, Rules
from epimer.methods.plugins import plugin_of_method
from epimer.methods.registry import Method
from epimer.methods.rules import AVERAGED, is_stack, matrix_shape, member_name, stored_inputs_first
from epimer.plan.curvature_inputs import basis_bytes, curvature_bytes
from epimer.plan.inputs import TensorRules, assign_rules
from epimer.plan.layer_curvature import Curvatures
from epimer.plan.memory import (
    MARGIN,
    CurvatureSize,
    Smaller,
    TensorInputs,
    bytes_to_read,
    curvature_size,
    memory_in_float64,
    memory_of,
    smaller_merges,
    streamed_rows,
    workload,
)
from epimer.plan.participants import Participants, public_recipe
from epimer.plan.time import Speeds, Work, seconds, times, work_of
from epimer.recipe.model import Recipe, depths

PART = 1 << 28  # a job that takes more memory than this is divided if it can be
STREAMED_PART = 1 << 26  # as is one that is streamed and reads and writes more, so that workers finish together

LARGEST_SCALE = 10.0
USUAL_SCALES = "the merged change is multiplied by it, and most merges are best between 0.1 and 3."

SettingsOf = Callable[[str, float], tuple[MethodOptions, list[float]]]
"""a tensor's name and depth -> the method's options and the weights of the models for it"""


@dataclass(frozen=True)
class Job:
    """One tensor of the output, or a block of its rows, and all that is needed to compute it."""

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
    """bytes in use at once while it is computed"""
    precision: torch.dtype = torch.float32
    """of the task vectors and of all arithmetic"""
    rows: Rows = None
    """the part of the tensor that this job computes; None for all of it"""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """where the result goes"""
    inputs: int = 1
    """the dimension of the stored tensor that the layer's inputs belong to"""
    smaller: Callable[[], Iterable[Smaller]] = tuple
    """returns the settings under which it takes less memory"""
    memory_in_float64: Callable[[], int] = int
    """returns the bytes in use at once where it is merged once more in float64"""
    work: Work = field(default_factory=Work)
    """what is to be computed, in units of kernels"""
    stacked: bool = False
    """whether each entry of the first dimension is a matrix of its own: the experts of a layer"""
    streams: bool = False
    """whether its tensors can be read and merged some rows at a time, by a CPU; its memory is that of such rows"""
    lora: LoraModule | None = None
    """the layer of an adapter that it is written to, as factors; None where the tensor itself is written"""
    tokens: tuple[int, ...] = ()
    """the rows of a table, in their order, that alone are merged and written to an adapter; the result has these"""
    experts: tuple[tuple[Job, ExpertPart], ...] = ()
    """the jobs of all experts where that layer is a parameter that holds them, and where in it their matrices lie"""

    @property
    def key(self) -> str:
        """A name that tells it from the tensor's other parts."""
        return self.name if self.rows is None else f"{self.name}[{self.rows[0]}:{self.rows[1]}]"

    @property
    def matrix(self) -> str:
        """The name of what is merged, by which it has curvature and a basis: the tensor, or one of a stack."""
        return member_name(self.name, self.rows[0]) if self.stacked and self.rows is not None else self.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in which it is merged: its matrix's, a stack's member's, or the tensor's."""
        W = self.template[0] if self.stacked else self.template
        return matrix_shape(W) if self.rule == "matrix" else tuple(W.shape)

    @property
    def names(self) -> list[str]:
        """The tensors that it merges: one, or all that hold a layer's experts."""
        return list(dict.fromkeys(job.name for job, _ in self.experts)) or [self.name]

    @property
    def models(self) -> list[int]:
        """The models that take part: those with a weight other than 0, or all where there is none."""
        return [t for t, weight in enumerate(self.weights) if weight] or list(range(len(self.weights)))

    @property
    def skip(self) -> int:
        """Bytes of the tensor before this part."""
        if self.rows is None:
            return 0
        place = bisect_left(self.tokens, self.rows[0]) if self.tokens else self.rows[0]
        return place * nbytes(self.template[:1])

    @property
    def writes(self) -> int:
        return nbytes(self.template) if self.lora is None else sum(map(nbytes, self.lora.headers.values()))

    @property
    def entrywise(self) -> bool:
        """Whether each entry is merged without a look at the others."""
        if self.method is None:
            return False
        return self.rule in AVERAGED or (self.rule == "elementwise" and self.method.separable)

    @property
    def is_weighted_sum(self) -> bool:
        """Whether it is merged by Σ λ_t D_t alone."""
        if self.method is None or self.rule == "statistic":
            return False
        return self.rule == "average" or self.method.merge is average

    @property
    def factored(self) -> bool:
        """Whether task vectors of low rank are merged as their factors."""
        if self.method is None or self.rule != "matrix" or not self.method.factored:
            return False
        return not (isinstance(self.options, FrechetOptions) and self.options.basis == "full")

    def on(self, device: torch.device) -> Job:
        """Return the job with the memory that it takes where `device` merges it: a GPU has its tensors read whole."""
        if device.type == "cpu" or not self.streams:
            return self
        return replace(self, memory=max(self.memory, int(MARGIN * (self.reads + self.writes))))

    def parts(self) -> list[Job]:
        """Divide a stack into its matrices, and a wide tensor whose entries do not depend on each other into blocks."""
        if self.lora is not None:
            return [self]
        if self.tokens:
            return self._runs()
        if self.stacked and self.rows is None:
            return self.members()
        if not self.entrywise:
            return [self]
        if self.streams:
            return self._divided(-(-(self.reads + self.writes) // STREAMED_PART), streamed_rows(self.template))
        return self._divided(-(-self.memory // PART))

    def members(self) -> list[Job]:
        """Return a job for each matrix of a stack."""
        count, parts = len(self.template), []
        work, reads = times(1 / count, self.work), self.reads // count
        for e in range(count):
            parts.append(replace(self, template=self.template[e : e + 1], rows=(e, e + 1), reads=reads, work=work))
        return parts

    def _runs(self) -> list[Job]:
        """Return a job for each run of neighbouring rows of a table."""
        parts = []
        for _, run in groupby(enumerate(self.tokens), key=lambda one: one[1] - one[0]):
            places, rows = zip(*run, strict=True)
            share, template = len(rows) / len(self.tokens), self.template[places[0] : places[-1] + 1]
            reads, work = int(share * self.reads), times(share, self.work)
            parts.append(replace(self, template=template, rows=(rows[0], rows[-1] + 1), reads=reads, work=work))
        return parts

    def blocks(self, entries: int) -> list[Job]:
        """Divide what is only read into blocks of rows that have about so many entries."""
        return self._divided(-(-self.template.numel() // entries))

    def _divided(self, count: int, multiple: int = 1) -> list[Job]:
        """Return about `count` jobs, each but the last of a multiple of so many rows."""
        count = min(count, len(self.template)) if self.template.dim() else 1
        if count <= 1:
            return [self]
        length, first, parts = len(self.template), self.rows[0] if self.rows else 0, []
        step = -(-length // count)  # one size for all but the last, so that they can use the same memory
        step = -(-step // multiple) * multiple
        for start in range(0, length, step):
            stop = min(start + step, length)
            reads = self.reads * (stop - start) // length
            memory = self.memory if self.streams else self.memory * (stop - start) // length + 1
            template, rows = self.template[start:stop], (first + start, first + stop)
            work = times((stop - start) / length, self.work)
            parts.append(replace(self, template=template, reads=reads, memory=memory, rows=rows, work=work))
        return parts


@dataclass(frozen=True)
class Plan:
    """A validated merge: inputs, jobs, problems."""

    participants: Participants
    method: Method
    curvatures: Curvatures | None
    jobs: list[Job]
    """one for every tensor that is written, in the template's order; none if the models do not fit together"""
    assigned: TensorRules
    problems: list[EpimerError]
    notes: list[str]
    recipe: Recipe | None = None
    """what the merge was planned from, unless it was planned in Python"""
    tokenizer: Path | None = None
    """the folder whose tokenizer the output gets"""
    generation: Path | None = None
    """the folder whose settings for generating it gets"""
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    """files of its tokenizer that no folder has"""
    basis: StoredBasis | None = None
    unlabelled: int | None = None
    """inputs per task, without labels, by which something was chosen or refined"""
    choices: tuple[str, ...] = ()
    """what was chosen and by what, in words"""
    inputs: Mapping[str, int] | None = None
    """these inputs by their use, see `MergeRecord.inputs`"""
    timings: Mapping[str, float] = field(default_factory=dict)
    """seconds that went into the plan, by what was done"""
    corrections: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> what is added to the merged tensor: the steps of its refinement"""
    network_names: Mapping[str, str] = field(default_factory=dict)
    """name -> its name in the network, where an adapter is written and the file has another"""
    whole_model: Sequence[Job] | None = None
    """the jobs of the whole model where `jobs` are those of an adapter, for methods that look at all of it first"""

    @property
    def modules(self) -> Path | None:
        """The first folder with modules.json of sentence-transformers, which the output gets."""
        folders = (self.participants.donor.folder, *(one.checkpoint.folder for one in self.participants.models))
        return next((folder for folder in folders if folder is not None and (folder / "modules.json").is_file()), None)

    @property
    def ties(self) -> dict[str, str]:
        return self.assigned.ties

    @property
    def skipped(self) -> dict[str, Tensor]:
        """The template's tensors that are not in the output."""
        headers = self.participants.template.headers
        return {name: headers[name] for name, rule in self.assigned.rules.items() if rule == "skip"}

    @property
    def outputs(self) -> dict[str, Tensor]:
        """The tensors of the output in their order, tied ones included."""
        return {job.name: job.template for job in self.jobs}

    @cached_property
    def parts(self) -> list[Job]:
        """The jobs to run: every tensor but the tied ones, wide ones in parts."""
        return self._parts_of(self.jobs)

    @property
    def merged(self) -> list[Job]:
        """The parts of the whole model that take part in arithmetic."""
        parts = self.parts if self.whole_model is None else self._parts_of(self.whole_model)
        return [job for job in parts if job.method is not None]

    def _parts_of(self, jobs: Sequence[Job]) -> list[Job]:
        return [part for job in jobs if job.name not in self.ties for part in job.parts()]

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
        return sum(job.writes for job in self.jobs if job.name not in self.ties)

    def seconds(self, speeds: Speeds, workers: int) -> float:
        """Return how long the jobs take `workers` of the given speeds, with their share of a pre-pass."""
        each = [seconds(job.work, speeds) for job in self.parts]
        return max(sum(each) / workers, max(each, default=0.0))

    @property
    def cautions(self) -> list[str]:
        """Warnings about the options and weights of this merge, each once."""
        merged = [job for job in self.jobs if job.rule in ("matrix", "elementwise")]
        scales = dict.fromkeys(job.options.scale for job in self.merged if abs(job.options.scale) > LARGEST_SCALE)
        texts: list[str | None] = [f"scale {scale:g} is unusual: {USUAL_SCALES}" for scale in scales]
        texts += [self.method.weight_caution(job.weights) for job in merged]
        if self.method.caution is not None:
            texts += [self.method.caution(job.options) for job in merged]
        return [text for text in dict.fromkeys(texts) if text]

    @cached_property
    def request(self) -> str:
        """A hash of the recipe, with every model replaced by its fingerprint."""
        checkpoints = (self.participants.donor, *(one.checkpoint for one in self.participants.all))
        models, measured = ([one.fingerprint for one in files] for files in (checkpoints, self.measured_files))
        asked = [epimer.__version__, self.public_recipe(), models, measured]
        plugin = plugin_of_method(self.method.name)
        text = json.dumps([*asked, *([plugin.sha256] if plugin else [])])
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
    settings: SettingsOf,
    patterns: Rules,
    curvatures: Curvatures | None,
    *,
    problems: Sequence[EpimerError] = (),
    notes: Sequence[str] = (),
    recipe: Recipe | None = None,
) -> Plan:
    """Plan a job for every tensor that is written; `problems` and `notes` are those known so far."""
    assigned = assign_rules(participants, patterns, elementwise=method.elementwise)
    known = [*problems, *assigned.problems]
    plan = Plan(participants, method, curvatures, [], assigned, known, list(notes), recipe)
    used = method.needs_curvature or "fisher" in assigned.rules.values() or (recipe is not None and recipe.refine)
    if curvatures is not None and not used:
        source = "was given" if recipe is None else "the recipe gives"
        plan.notes.append(f"{method.name} uses no curvature; what {source} is ignored.")
    depth, inputs_first = depths(list(assigned.rules)), stored_inputs_first(participants.template.headers)
    for name, rule in {} if known else assigned.rules.items():
        try:
            if rule != "skip":
                plan.jobs.append(_plan_job(plan, name, settings, depth[name], 0 if name in inputs_first else 1))
        except EpimerError as error:
            if str(error) not in map(str, plan.problems):
                plan.problems.append(error)
    plan.notes.extend([*assigned.notes, *plan.cautions])
    return plan


def _plan_job(plan: Plan, name: str, settings: SettingsOf, depth: float, inputs: int) -> Job:
    participants, method, rule, recipe = plan.participants, plan.method, plan.assigned.rules[name], plan.recipe
    W, tied = participants.template.headers[name], name in plan.ties
    out_dtype = None if recipe is None else recipe.out_dtype or recipe.dtype
    result = header(W.shape, getattr(torch, out_dtype) if out_dtype and W.is_floating_point() else W.dtype)
    device = torch.device("cpu") if W.is_meta else W.device
    if rule == "copy":
        if participants.base is None and W.is_floating_point() and W.numel():
            raise TensorError(f"The rule 'copy' takes {name!r} from base, but there is none; pass base.")
        reads = 0 if tied else nbytes(W)
        return Job(name, rule, result, None, MethodOptions(), [], reads, 2 * nbytes(W), device=device, inputs=inputs)
    options, weights = settings(name, depth)
    tensors = [one.headers[name] for one in participants.all]
    dtype = torch.float64 if recipe is not None and recipe.dtype == "float64" else precision(tensors)
    job = Job(name, rule, result, method, options, weights, 0, 0, dtype, device=device, inputs=inputs)
    if tied:
        return job
    curved = rule in ("fisher", "elementwise") and (rule == "fisher" or method.needs_curvature)
    stacked = is_stack(name, W.shape) and (rule == "matrix" or curved)
    parts, one = (len(W), header(W.shape[1:], W.dtype)) if stacked else (1, header(W.shape, W.dtype))
    names = [member_name(name, e) for e in range(parts)] if stacked else [name]
    measured = sum(curvature_bytes(matrix, rule, one, method, plan.curvatures) for matrix in names)
    basis = max(basis_bytes(matrix, rule, one, len(job.models), getattr(options, "basis", None)) for matrix in names)
    reads = sum(map(nbytes, tensors)) + measured + parts * basis
    curvature = curvature_size(plan.curvatures, names[0]) if measured else CurvatureSize(inputs=inputs)
    to_read, left_out = bytes_to_read(participants, name) // parts, len(weights) - len(job.models)
    streams = job.entrywise and W.dim() > 0 and all(one.checkpoint.streams for one in participants.all)
    sizes = TensorInputs(len(job.models), dtype, to_read, basis, curvature, left_out, streams)
    load = method, rule, one, sizes, options
    work = times(parts, work_of(*workload(method, rule, one, sizes, options))) + Work(files=2 * reads)
    return replace(
        job,
        reads=reads,
        memory=memory_of(*load),
        smaller=partial(smaller_merges, *load),
        memory_in_float64=partial(memory_in_float64, *load),
        work=work,
        stacked=stacked,
        streams=streams,
    )


def precision(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the precision to compute in: float64 if any input is, float32 otherwise."""
    return torch.float64 if any(W.dtype == torch.float64 for W in tensors) else torch.float32
