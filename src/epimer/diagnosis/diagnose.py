"""Diagnose models before they are merged: one walk over their matrices, whose findings add up to the model's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import epimer
from epimer.checkpoints.checkpoint import header
from epimer.diagnosis.advice import advise
from epimer.diagnosis.layer import Question, Sums, conflict_of, examine, floats, share
from epimer.engine.basis import matrix_jobs, read_deltas
from epimer.engine.layer import named_failure
from epimer.engine.options import RunOptions, in_memory
from epimer.engine.task_vectors import Tensors, read_tensors
from epimer.errors import ParameterError, TensorError
from epimer.evaluation.unlabelled import task_names
from epimer.geometry.metric import Metric, TaskGram
from epimer.geometry.subspace import Basis, Tagged, atoms_of, clamp_rank
from epimer.geometry.theory import total
from epimer.methods.registry import Layer, default_forecasts, describe_method
from epimer.methods.workspace import DOUBLE
from epimer.plan.inputs import assign_rules, check_weights
from epimer.plan.jobs import Job
from epimer.plan.layer_curvature import Curvatures, layer_basis, layer_metrics, missing_metric
from epimer.plan.memory import TensorInputs, bytes_to_read, curvature_size, memory_of, smaller_settings
from epimer.plan.merge import OpenedModels
from epimer.plan.participants import Participants, public_recipe
from epimer.progress import Progress
from epimer.recipe.model import AUTO, Recipe, depths, known_parameters
from epimer.records import Diagnosis, Forecast, LayerFindings

KINDS = ("ekfac", "diagonal", "kronecker", "samples", "projected")
SCALES = [round(0.05 * i, 2) for i in range(1, 81)]
STEPS = 8  # of conjugate gradients, which give the same forecast as a solve to the end

Weights = Callable[[str, float], list[float]]
"""a tensor's name and depth -> the models' weights, summing to 1"""
Methods = Sequence[str] | Mapping[str, Mapping[str, Any]]
"""merges to forecast: names of methods, or names with their parameters"""


@dataclass(frozen=True)
class MatrixInputs:
    """What was read for one matrix."""

    tensors: Tensors
    metrics: tuple[Metric, ...]
    basis: Tagged | None


@dataclass(frozen=True)
class DiagnosisWalk:
    """Examines every matrix."""

    participants: Participants
    jobs: Sequence[Job]
    curvatures: Curvatures | None
    bases: Mapping[str, Basis] | None
    question: Question

    def read(self, job: Job) -> MatrixInputs:
        """Read and check one matrix of the base and of every model, its curvature and its basis."""
        metrics: tuple[Metric, ...] = ()
        name, W = job.matrix, job.template[0] if job.stacked else job.template
        if self.curvatures is not None:
            metrics = layer_metrics(self.curvatures, name, W, matrix=True, kinds=KINDS, user="a diagnosis")
            if not metrics:
                raise missing_metric(name, "a diagnosis", self.curvatures)
        count = len(self.participants.models)
        basis = layer_basis(self.bases, metrics, name, W, count, count)
        if basis is not None and not isinstance(basis, Tagged):
            kind = type(basis).__name__
            raise ParameterError(f"basis[{name!r}] must be a tagged basis for a diagnosis, got {kind}.")
        return MatrixInputs(read_tensors(self.participants, job, job.rows, factors=False), metrics, basis)

    def work(self, job: Job, loaded: MatrixInputs, device: torch.device) -> tuple[LayerFindings, Sums]:
        """Examine one matrix."""
        W0 = loaded.tensors.base
        assert W0 is not None
        deltas = read_deltas(self.participants, job, loaded.tensors, device)
        like, basis = deltas[0], loaded.basis
        metrics = [metric.to(like.device, like.dtype) for metric in loaded.metrics] or [TaskGram(D) for D in deltas]
        rank = clamp_rank(like.shape, len(deltas), self.question.rank) if basis is None else basis.rank
        fixed = None if basis is None else basis.to(like)
        layer = Layer(job.matrix, deltas, job.weights, metrics=metrics, basis=fixed, inputs=job.inputs)
        W0 = W0.to(like).reshape(like.shape)
        with named_failure(job.matrix, deltas, range(len(deltas))):
            findings, sums = examine(layer, W0, rank, self.question)
        return findings, sums.to(job.device)  # those of several devices are added


@torch.no_grad()
def diagnose_models(
    participants: Participants,
    weights: Weights,
    *,
    curvatures: Curvatures | None = None,
    kind: str | None = None,
    bases: Mapping[str, Basis] | None = None,
    rules: Sequence[tuple[str, str]] = (),
    rank: int | None = 32,
    damping: float = 1e-2,
    methods: Methods | Callable[[str], Methods] | None = None,
    scales: Mapping[str, float] | None = None,
    names: Sequence[str],
    base: str = "base",
    recipe: str = "",
    run: RunOptions | None = None,
) -> Diagnosis:
    """Examine every matrix of models that fit together, and add up what was found.

    Args:
        participants: the base and the models.
        weights: of the models, for every tensor; a model of weight 0 in every matrix is left out.
        curvatures: one mapping per model; None takes each task vector's own Gram matrices.
        kind: of the curvature; by default that of the first matrix.
        bases: the bases that projected curvature was measured on.
        rules: which tensors are matrices, by name pattern.
        rank: directions per task of the tagged basis; None is floor(min(m, n) / T).
        damping: added to each projected curvature of mean diagonal 1.
        methods: merges to forecast, or a function of the curvature's kind that returns them.
        scales: method -> a scale at which to give the theory of its merge, beside 1 and the forecast's.
        names: what to call the models.
        base: what to call the base.
        recipe: the recipe in YAML, if there is one.
        run: where and within which limits; by default in memory.
    """
    if participants.base is None:
        raise TensorError("a diagnosis needs the base model that the others were fine-tuned from; pass base.")
    assigned = assign_rules(participants, rules).checked()
    depth = depths(list(assigned.rules))
    shares = {name: weights(name, depth[name]) for name in assigned.matrices}
    models = [t for t in range(len(participants.models)) if any(weight[t] for weight in shares.values())]
    participants = replace(participants, models=[participants.models[t] for t in models])
    curvatures = None if curvatures is None else [curvatures[t] for t in models]
    jobs = matrix_jobs(participants, assigned, rank) if models else []
    if not jobs:
        raise TensorError("there is no matrix to diagnose: every tensor is averaged, copied or too small.")
    kind = kind or _kind(curvatures, jobs)
    chosen = forecasts(methods(kind) if callable(methods) else methods, kind)
    question = Question(rank, damping, chosen)
    jobs = [
        replace(job, weights=[shares[job.name][t] for t in models], memory=estimate(question), smaller=smaller)
        for job in jobs
        for estimate in [partial(_memory, job, curvatures, participants)]
        for smaller in [partial(smaller_settings, question, estimate)]
    ]
    run = run or in_memory(jobs[0].device, len(jobs))
    engine = run.start(jobs)
    findings: dict[str, tuple[LayerFindings, Sums]] = {}
    with Progress(run.progress) as bar:
        stage = bar.begin("diagnosing", sum(job.reads for job in jobs))
        for job, result in engine.map(DiagnosisWalk(participants, jobs, curvatures, bases, question)):
            findings[job.matrix] = result
            stage.advance(job.reads, job.matrix)
    diagnosis = assemble(findings, jobs[0].weights, [names[t] for t in models], kind, question, scales or {})
    return advise(replace(diagnosis, base=base, recipe=recipe))


def _kind(curvatures: Curvatures | None, jobs: Sequence[Job]) -> str:
    """Return the kind of curvature that the first matrix has; task-gram where there is none."""
    for one in curvatures or ():
        for job in jobs:
            if job.matrix in one:
                return str(getattr(one[job.matrix], "kind", "task-gram"))
    return "task-gram"


def _memory(job: Job, curvatures: Curvatures | None, participants: Participants, question: Question) -> int:
    """Return the bytes that examining one matrix takes: those of the widest merge, and of what the theory holds.

    The basis is built and curvature projected on it whatever is forecast. The theory holds every task's curvature and
    task vector on the atoms and, where curvature was measured, on all pairs of them, beside the singular vectors.
    """
    curvature = curvature_size(curvatures, job.matrix)
    theory = {"epimer": {}} if curvature.bytes else {"epimer_free": {"basis": "tagged", "calibrate": None}}
    forecast = [*theory.items(), *question.methods.items()]
    rows = [(describe_method(name), parameters) for name, parameters in forecast]
    parts = len(participants.template.headers[job.name]) if job.stacked else 1
    to_read, tasks = bytes_to_read(participants, job.name) // parts, len(participants.models)
    inputs, needs = TensorInputs(tasks, job.precision, to_read, curvature=curvature), []
    for row, parameters in rows:
        options = row.resolve({"rank": question.rank, **parameters} if "rank" in row.defaults else parameters)
        needs.append(memory_of(row, "matrix", header(job.shape, job.precision), inputs, options))
    shape, size = job.shape, job.precision.itemsize
    directions = tasks * clamp_rank(shape, tasks, question.rank)
    held = DOUBLE * tasks * directions**2 * (4 if curvature.bytes else 2) + size * directions * sum(shape)
    return max(needs) + held + 6 * size * job.template.numel() + curvature.bytes


def forecasts(methods: Methods | None, kind: str) -> dict[str, dict[str, Any]]:
    """Return the merges to forecast with their parameters; refuse what cannot be merged one matrix at a time."""
    wanted = methods if methods is not None else default_forecasts(kind)
    chosen: dict[str, dict[str, Any]] = {}
    for name in wanted:
        row = describe_method(name)
        if row.prepare is not None or row.needs_function:
            raise ParameterError(f"{name} looks at the whole model, so its loss cannot be forecast layer by layer.")
        if row.uses_base or row.ignores_base:
            raise ParameterError(f"{name} does not go by task vectors alone, so its loss cannot be forecast from them.")
        row.check_kind(kind)
        parameters = dict(methods[name]) if isinstance(methods, Mapping) else {}
        if "iterations" in row.defaults:
            parameters.setdefault("iterations", STEPS)
        chosen[name] = parameters
    return chosen


def assemble(
    findings: Mapping[str, tuple[LayerFindings, Sums]],
    weights: Sequence[float],
    names: Sequence[str],
    kind: str,
    question: Question,
    scales: Mapping[str, float],
) -> Diagnosis:
    """Add up what was found of every matrix."""
    layers = {name: layer for name, (layer, _) in findings.items()}
    first, *rest = (sums for _, sums in findings.values())
    sums = sum(rest, first)
    energies = [[norm**2 for norm in layer.norms] for layer in layers.values()]
    energy = sums.inner.diagonal()
    ranks = [
        {"k": float(k), "eta": eta, "eta_unit_trace": trace, "eta_fraction": eta / flat if flat > 0 else 0.0}
        for k, (eta, trace, flat) in ((k, floats(values)) for k, values in sorted(sums.eta.items()))
    ]
    forecast = {method: _forecast(sums, method, weights) for method in sums.steps}

    def at_scales(method: str) -> list[float]:
        asked = scales.get(method, 1.0) if describe_method(method).linear_in_scale else 1.0
        return list(dict.fromkeys([1.0, asked, forecast[method].scale]))

    return Diagnosis(
        models=tuple(names),
        layers=layers,
        total=total([layer.theory for layer in layers.values()], energies, weights),
        norms=floats(energy.clamp_min(0).sqrt()),
        base_norm=math.sqrt(sums.base),
        energy={str(k): floats(share(kept, energy).clamp(max=1)) for k, kept in sorted(sums.kept.items())},
        conflict=conflict_of(sums),
        forecast=forecast,
        eta_by_rank=tuple(ranks),
        curvature=kind,
        rank=question.rank,
        damping=question.damping,
        version=epimer.__version__,
        merges={method: tuple(sums.theory(method, scale) for scale in at_scales(method)) for method in sums.steps},
    )


def _forecast(sums: Sums, method: str, weights: Sequence[float]) -> Forecast:
    lam = torch.tensor(list(weights), dtype=torch.float64) / sum(weights)
    shares = sums.lost(method)
    own = [scale for name, scale in sums.rescaled if name == method]
    losses = {scale: float(sums.lost(method, scale) @ lam) for scale in ([1.0, *own] if own else SCALES)}
    best = min(losses, key=lambda scale: losses[scale])
    if losses[1.0] - losses[best] < 1e-9:  # rounding alone
        best = 1.0
    return Forecast(floats(shares), float(shares @ lam), float(shares.max()), best, losses[best])


# --- the models of a recipe ---


def diagnose_recipe(
    recipe: Recipe,
    opened: OpenedModels,
    *,
    rank: int | None = None,
    methods: Sequence[str] | None = None,
    damping: float = 1e-2,
    run: RunOptions,
) -> Diagnosis:
    """Diagnose opened models as a recipe has them; see `epimer.diagnose`."""
    if opened.problems:
        raise opened.problems[0]
    participants, tasks = opened.participants, len(recipe.models)

    def weights(name: str, depth: float) -> list[float]:
        return check_weights(recipe.settings(name, depth).weights, tasks, "a diagnosis")

    def wanted(kind: str) -> dict[str, dict[str, Any]]:
        chosen: dict[str, dict[str, Any]] = {
            name: {} for name in (_usual_forecasts(recipe, kind) if methods is None else methods)
        }
        if recipe.merge_method in chosen and not recipe.auto:
            plain = {key: value for key, value in recipe.parameters.items() if not isinstance(value, tuple)}
            chosen[recipe.merge_method] = {k: v for k, v in plain.items() if k not in ("weight", "scale", "rank")}
        return chosen

    scale = recipe.parameters.get("scale")
    bases = None if opened.basis is None else _Atoms(opened.basis)
    return diagnose_models(
        participants,
        weights,
        curvatures=opened.curvatures,
        kind="task-gram" if opened.kind is None else opened.kind,
        bases=bases,
        rules=recipe.rules,
        rank=_rank(recipe, rank),
        damping=damping,
        methods=wanted,
        scales={recipe.merge_method: float(scale)} if isinstance(scale, int | float) else {},
        names=task_names([entry.model for entry in recipe.models]),
        base=Path(recipe.base_model or "base").name,
        recipe=public_recipe(recipe, participants, opened.tokenizer),
        run=run,
    )


class _Atoms(Mapping[str, Tagged]):
    """The tagged atoms of stored bases, read when they are asked for; a tensor basis holds those it was built from."""

    def __init__(self, bases: Mapping[str, Basis]) -> None:
        self.bases = bases

    def __getitem__(self, name: str) -> Tagged:
        return atoms_of(self.bases[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.bases)

    def __len__(self) -> int:
        return len(self.bases)


def _usual_forecasts(recipe: Recipe, kind: str) -> list[str]:
    """Return the methods to forecast for a recipe: the usual ones, and its own where that can be done."""
    usual = default_forecasts(kind)
    if recipe.merge_method == AUTO:
        return usual
    try:
        forecasts([recipe.merge_method], kind)
    except ParameterError:
        return usual
    return list(dict.fromkeys([*usual, recipe.merge_method]))


def _rank(recipe: Recipe, asked: int | None) -> int | None:
    """Return the rank to diagnose at: what was asked for, the recipe's, or 32."""
    if asked is not None:
        return int(known_parameters(AUTO)["rank"].check("a diagnosis", asked))
    known, rank = known_parameters(recipe.merge_method), recipe.parameters.get("rank")
    return 32 if rank is None or "rank" not in known else known["rank"].check(recipe.merge_method, rank)
