"""From a recipe and the headers of its files to a list of independent jobs; all that can be checked is checked here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import epimer
from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.checkpoint import Checkpoint, Rows, header, nbytes
from epimer.checkpoints.hub import is_hub_id
from epimer.curvature.basis import StoredBasis
from epimer.curvature.curvature import Curvature
from epimer.errors import CurvatureError, EpimerError, ParameterError, RecipeError
from epimer.geometry.subspace import clamp_rank
from epimer.methods.curvatures import missing_metric, needs_metric, serves
from epimer.methods.frechet import check_without_base
from epimer.methods.inputs import Inputs, check_inputs, check_weights, matrix_shape, precision
from epimer.methods.merge import Setting, check_copy, check_per_model
from epimer.methods.registry import Method, describe_method
from epimer.plan.curvature_inputs import (
    check_basis,
    check_curvatures,
    check_models,
    open_basis,
    open_curvatures,
    placed,
)
from epimer.plan.participants import Role, assign_roles
from epimer.recipe.model import Recipe, Settings, depths

PART = 1 << 28  # a job that takes more memory than this is divided if it can be


@dataclass(frozen=True)
class Job:
    """One tensor of the output, and all that is needed to make it."""

    name: str
    rule: str
    template: Tensor
    """shape and dtype of the result, without data"""
    setting: Setting | None
    """None where the tensor is copied"""
    reads: int
    """bytes to read"""
    memory: int
    """bytes in use at once while it is made"""
    precision: torch.dtype = torch.float32
    """of the task vectors and of all arithmetic"""
    rows: Rows = None
    """the part of the tensor that this job makes; None for all of it"""

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

    def parts(self) -> list[Job]:
        """Divide a wide tensor whose entries do not depend on each other into blocks of rows."""
        count = min(-(-self.memory // PART), len(self.template)) if self.template.dim() else 1
        if count <= 1 or self.setting is None or not self.setting.entrywise:
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
    """A merge that has been thought through."""

    recipe: Recipe
    method: Method
    base: Role | None
    """what task vectors are taken from; None where the method needs none"""
    models: list[Role]
    donor: Checkpoint
    """whose config and other files the output gets"""
    tokenizer: Path | None
    """the folder whose tokenizer the output gets"""
    curvatures: list[Curvature] | None
    basis: StoredBasis | None
    jobs: list[Job]
    skipped: dict[str, Tensor]
    ties: dict[str, str]
    problems: list[EpimerError]
    notes: list[str]

    @property
    def roles(self) -> list[Role]:
        """The base, if there is one, and the models."""
        return [*([self.base] if self.base else []), *self.models]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Everything that is read, each once."""
        every = [role.checkpoint for role in self.roles] + [self.donor]
        return list({id(one): one for one in every}.values())

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Return the tensors of the output in their order, tied ones included."""
        return {job.name: job.template for job in self.jobs}

    @property
    def merged(self) -> list[Job]:
        """Return the jobs that take part in arithmetic."""
        return [job for job in self.parts if job.setting is not None]

    @cached_property
    def parts(self) -> list[Job]:
        """Return what is to be done: every tensor but the tied ones, wide ones in parts."""
        return [part for job in self.jobs if job.name not in self.ties for part in job.parts()]

    @property
    def memory(self) -> int:
        """Return the bytes the widest job needs at once."""
        return max((job.memory for job in self.parts), default=0)

    @property
    def reads(self) -> int:
        """Return the bytes read by the jobs, without pre-passes."""
        return sum(job.reads for job in self.jobs)

    @property
    def writes(self) -> int:
        """Return the bytes of the output's tensors."""
        return sum(job.writes for job in self.jobs if job.name not in self.ties)

    @cached_property
    def request(self) -> str:
        """A hash of what was asked for: the recipe, with every model replaced by its fingerprint."""
        models = [one.fingerprint for one in (self.donor, *(role.checkpoint for role in self.roles))]
        beside = [one.fingerprint for one in self.beside]
        text = json.dumps([epimer.__version__, self.public_recipe(), models, beside])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def beside(self) -> list[Checkpoint]:
        """The files of curvature and bases."""
        found = [one.file for one in self.curvatures or () if one.file is not None]
        return [*found, *([self.basis.file] if self.basis else [])]

    @property
    def named(self) -> dict[str, Checkpoint]:
        """Every name of a checkpoint in the recipe, and what it stands for."""
        found = {}
        if self.recipe.base_model is not None:
            found[self.recipe.base_model] = self.base.checkpoint if self.base else self.donor
        for entry, role in zip(self.recipe.models, self.models, strict=True):
            found[entry.model] = role.checkpoint
        return found

    def public_recipe(self) -> str:
        """Return the recipe as YAML without local paths."""
        names = {text: one.name for text, one in self.named.items()}
        source = self.recipe.tokenizer_source
        if source != "base" and source not in names:
            cached = self.tokenizer is not None and "snapshots" in self.tokenizer.parts
            names[source] = source if is_hub_id(source) and cached else Path(source).name
        for path in (self.recipe.basis, self.recipe.eval, *(entry.curvature for entry in self.recipe.models)):
            if path is not None:
                names[path] = Path(path).name
        return self.recipe.to_yaml(names)


def make_plan(
    recipe: Recipe, *, folder: Path | None = None, progress: bool = False, any_curvature: bool = False
) -> Plan:
    """Open everything a recipe names, read the headers, and plan each tensor; problems are collected, not raised.

    Args:
        recipe: what is wanted.
        folder: where relative paths are looked for when they do not exist here: the recipe's own folder.
        progress: show the progress of downloads.
        any_curvature: use curvature even where it was measured on another model.
    """
    if recipe.auto:
        raise RecipeError(
            f"the recipe leaves {' and '.join(recipe.auto)} open; `epimer merge` or epimer.merge choose it."
        )
    problems: list[EpimerError] = []
    notes: list[str] = []
    opened: dict[str, Checkpoint] = {}

    def opening(text: str, label: str) -> Checkpoint | None:
        if text not in opened:
            try:
                opened[text] = open_checkpoint(placed(text, folder), progress=progress)
            except EpimerError as error:
                problems.append(type(error)(f"{label}: {error}"))
                return None
        return opened[text]

    method = describe_method(recipe.merge_method)
    base = None if recipe.base_model is None else opening(recipe.base_model, "base_model")
    models = [opening(entry.model, f"models[{t}]") for t, entry in enumerate(recipe.models)]
    source = recipe.tokenizer_source
    place = Path(placed(source, folder)).expanduser()
    given = None if source == "base" else place if place.is_dir() else opening(source, "tokenizer_source")
    curvatures = open_curvatures(recipe, folder, problems)
    basis = open_basis(recipe, folder, problems)
    if problems:
        raise EpimerError("; also ".join(str(problem).rstrip(".") for problem in problems) + ".")
    present = [model for model in models if model is not None]
    donor = base if base is not None else present[0]
    # mergekit's `normalize: false` sums the models themselves, so there is nothing to take differences from.
    summed = method.name == "average" and recipe.normalize_weights is False
    roles, base_role, ties = assign_roles(None if summed else base, present, [entry.model for entry in recipe.models])
    for t, role in enumerate(roles):
        if base is not None and role.checkpoint is not base and role.checkpoint.fingerprint == base.fingerprint:
            notes.append(f"{role.label} equals the base: its task vector is zero.")
        other = [s for s in roles[:t] if s.checkpoint.fingerprint == role.checkpoint.fingerprint]
        if other:
            notes.append(f"{role.label} equals {other[0].label}: it counts twice.")
    check_models(roles, curvatures or [], problems, notes, any_curvature=any_curvature)
    check_curvatures(curvatures or [], basis, problems)
    if basis is not None:
        check_basis(basis, recipe, [role.checkpoint.fingerprint for role in (base_role, *roles) if role], problems)
    inputs = check_inputs(
        None if base_role is None else base_role.headers,
        [role.headers for role in roles],
        method,
        recipe.rules,
        labels=[role.label for role in roles],
        headers=True,
        ties=ties,
        report=problems.append,
    )
    planner = _Planner(recipe, method, base_role, roles, inputs, curvatures, basis, problems)
    jobs = [] if problems else planner.jobs()
    if curvatures is not None and not method.needs_curvature and "fisher" not in inputs.rules.values():
        notes.append(f"{method.name} uses no curvature; what the recipe gives is ignored.")
    skipped = {name: W for name, W in inputs.template.items() if inputs.rules[name] == "skip"}
    return Plan(
        recipe=recipe,
        method=method,
        base=base_role,
        models=roles,
        donor=donor,
        tokenizer=given if isinstance(given, Path) else (given or donor).folder,
        curvatures=curvatures,
        basis=basis,
        jobs=jobs,
        skipped=skipped,
        ties=inputs.ties,
        problems=problems,
        notes=notes,
    )


class _Planner:
    """Turns checked headers into jobs."""

    def __init__(
        self,
        recipe: Recipe,
        method: Method,
        base: Role | None,
        models: Sequence[Role],
        inputs: Inputs,
        curvatures: list[Curvature] | None,
        basis: StoredBasis | None,
        problems: list[EpimerError],
    ) -> None:
        self.recipe, self.method, self.base, self.models = recipe, method, base, models
        self.inputs, self.curvatures, self.basis, self.problems = inputs, curvatures, basis, problems
        self.resolved: dict[str, tuple[Any, list[float]]] = {}
        wanted = recipe.out_dtype or recipe.dtype
        self.out_dtype: torch.dtype | None = getattr(torch, wanted) if wanted else None
        self.wide = recipe.dtype == "float64"

    def jobs(self) -> list[Job]:
        """Return a job for every tensor that is written, in the template's order."""
        constant = self.recipe.varying() & self.method.whole_model
        if constant:
            self.problems.append(
                RecipeError(
                    f"{self.method.name} looks at the whole model to use {sorted(constant)[0]!r}, so its value cannot "
                    "differ between tensors; give one number."
                )
            )
        if any(parameter.kind == "callable" for parameter in self.method.parameters):
            self.problems.append(
                RecipeError(f"{self.method.name} takes a Python function: use merge_state_dicts instead of a recipe.")
            )
        if self.problems:
            return []
        depth = depths(list(self.inputs.rules))
        jobs = []
        for name, rule in self.inputs.rules.items():
            if rule == "skip":
                continue
            try:
                jobs.append(self._job(name, rule, depth[name]))
            except EpimerError as error:
                if str(error) not in map(str, self.problems):
                    self.problems.append(error)
        return jobs

    def _job(self, name: str, rule: str, t: float) -> Job:
        W = self.inputs.template[name]
        dtype = self.out_dtype if self.out_dtype is not None and W.is_floating_point() else W.dtype
        template = header(W.shape, dtype)
        if rule == "copy":
            check_copy(name, W, self.inputs.base)
            return Job(name, rule, template, None, 0 if name in self.inputs.ties else nbytes(W), 2 * nbytes(W))
        p, weights = self._resolve(self.recipe.settings(name, t))
        setting = Setting(name, rule, self.method, p, weights)
        tensors = [model.headers[name] for model in self.models]
        if self.base is not None:
            tensors.append(self.base.headers[name])
        curvature = self._curvature(name, rule) + self._basis(name, rule, W)
        reads = 0 if name in self.inputs.ties else sum(map(nbytes, tensors)) + curvature
        dtype = torch.float64 if self.wide else precision(tensors)
        memory = needs(setting, reads, W, dtype, curvature, len(self.models))
        return Job(name, rule, template, setting, reads, memory, dtype)

    def _curvature(self, name: str, rule: str) -> int:
        """Return the bytes of a tensor's curvature; refuse a method that needs what is not there."""
        if rule != "fisher" and (not self.method.needs_curvature or rule == "average"):
            return 0
        if self.curvatures is None:
            raise CurvatureError(
                f"{self.method.name} needs {self.method.curvature} curvature; give every model of the recipe a "
                "curvature: folder, or take a method that needs no data (epimer_free, tsv)."
            )
        wanted = "diagonal" if rule == "fisher" else self.method.curvature
        for curvature in self.curvatures:
            projected = curvature.provenance.basis is not None and rule == "matrix"
            fits = projected or serves(curvature.kind, wanted)
            if not fits or (self.method.name == "regmean" and (projected or curvature.kind == "ekfac")):
                raise CurvatureError(
                    f"{curvature.where} is {curvature.kind} curvature, but {self.method.name} needs {wanted} "
                    f"for {name!r}; measure that kind, or take a method that uses this one."
                )
        have = [name in curvature for curvature in self.curvatures]
        if not any(have):
            if needs_metric(name, rule, self.inputs.template[name]):
                raise missing_metric(name, self.method)
            return 0
        if not all(have):
            where = self.curvatures[have.index(False)].where
            raise CurvatureError(f"{where} has nothing for {name!r}, which the others have; measure it again.")
        return sum(curvature.size(name) for curvature in self.curvatures)

    def _basis(self, name: str, rule: str, W: Tensor) -> int:
        """Return the bytes of a tensor's basis; refuse a basis that does not have it."""
        if self.basis is None or rule != "matrix":
            return 0
        if name in self.basis:
            return self.basis.size(name)
        if clamp_rank(matrix_shape(W), len(self.models), None):
            raise CurvatureError(f"{self.basis.where} has no basis for {name!r}; build it from these models.")
        return 0

    def _resolve(self, settings: Settings) -> tuple[Any, list[float]]:
        """Return a tensor's parameters and weights; equal settings are resolved once."""
        key = json.dumps([settings.parameters, settings.weights], sort_keys=True)
        if key not in self.resolved:
            given = {**settings.parameters, "rules": list(self.recipe.rules)}
            if self.basis is not None:
                given["basis"] = self.basis
            p = self.method.resolve(given)
            check_per_model(p, self.method, len(self.models))
            if self.base is None:
                check_without_base(self.method, p)
            self.resolved[key] = p, self._weights(settings.weights)
        return self.resolved[key]

    def _weights(self, given: list[float] | None) -> list[float]:
        """Return the weights: scaled to sum 1 or as given, as the method or mergekit's `normalize` says."""
        tasks, asked = len(self.models), self.recipe.normalize_weights
        weights = check_weights(given, tasks, self.method)
        if asked is None or asked is not self.method.absolute_weights:
            return weights
        if self.method.absolute_weights:
            if not sum(weights):
                raise ParameterError(f"weights {weights} sum to 0 and cannot be normalised; remove normalize.")
            return [w / sum(weights) for w in weights]
        if self.method.name != "average":
            raise ParameterError(
                f"{self.method.name} takes a mean, so `normalize: false` means nothing to it; remove it, or set scale."
            )
        return [1.0] * tasks if given is None else [float(w) for w in given]


def needs(setting: Setting, reads: int, W: Tensor, dtype: torch.dtype, curvature: int, tasks: int) -> int:
    """Estimate the memory one tensor's merge takes: what is read, the task vectors, and the method's own room."""
    method = setting.method if setting.rule != "average" else describe_method("average")
    per_task, fixed = method.workspace
    m, n = matrix_shape(W) if W.numel() and W.dim() else (1, 1)
    aspect = max(m, n) / min(m, n) if method.squares else 1.0
    tensors = tasks + aspect * (tasks * per_task + fixed)
    return int(reads + W.numel() * dtype.itemsize * tensors + 2 * curvature)
