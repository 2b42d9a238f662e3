"""Diagnose models before they are merged: state dicts in memory, or the checkpoints of a recipe, layer by layer."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import epimer
from epimer.diagnosis.advice import advise
from epimer.diagnosis.layer import Question, Sums, conflict_of, examine, floats, share
from epimer.engine.basis import read_all
from epimer.engine.merge import Options, check_memory, check_plan
from epimer.errors import CurvatureError, ParameterError, TensorError, short
from epimer.geometry.metric import Metric, TaskGram
from epimer.geometry.subspace import Tagged, atoms_of, clamp_rank
from epimer.geometry.theory import total
from epimer.methods.curvatures import Curvatures, check_curvatures, layer_basis, layer_metrics
from epimer.methods.inputs import StateDict, check_inputs, check_weights, matrix_shape, task_vectors
from epimer.methods.registry import default_forecasts, describe_method
from epimer.plan.jobs import Job, Plan, make_plan
from epimer.progress import Progress
from epimer.recipe.model import Recipe, open_recipe
from epimer.records import Diagnosis, Forecast, LayerFindings

KINDS = ("ekfac", "diagonal", "kronecker", "samples", "projected")
SCALES = [round(0.05 * i, 2) for i in range(1, 81)]
STEPS = 8  # of conjugate gradients, which give the same forecast as a solve to the end
Examined = dict[str, tuple[LayerFindings, Sums]]


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
    methods: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    names: Sequence[str] | None = None,
) -> Diagnosis:
    """Say, per matrix and in total, how tasks conflict, what curvature would gain and what merges would lose.

    Args:
        base: the ancestor.
        models: the fine-tuned models.
        curvature: as in `merge_state_dicts`; None takes each task vector's own Gram matrices.
        rank: directions per task of the tagged basis; None is floor(min(m, n) / T).
        weights: one per model.
        basis: the bases that projected curvature was measured on.
        damping: added to each projected curvature of mean diagonal 1.
        rules: which tensors are matrices, by name pattern.
        methods: merges to forecast, by name, or a mapping from names to parameters; None takes average, tsv,
            epimer_free and those that use this curvature.
        names: what to call the models.
    """
    row = describe_method("epimer")
    p = row.resolve({"rank": rank, "damping": damping, "rules": rules})
    if basis is not None and not isinstance(basis, Mapping):
        raise ParameterError(f"basis must be a mapping from tensor names to bases or None. Got {short(basis)} instead.")
    inputs = check_inputs(base, models, row, p.rules)
    lam = check_weights(weights, len(models), row)
    curvatures = None if curvature is None else check_curvatures(curvature, len(models), row)
    jobs = [
        (name, W0, tensors, *_checked(name, W0, tensors, curvatures, basis))
        for name, W0, tensors in inputs.merged()
        if inputs.rules[name] == "matrix" and clamp_rank(matrix_shape(tensors[0]), len(models), p.rank)
    ]
    kind = next((metrics[0].kind for *_, metrics, _ in jobs if metrics), "task-gram")
    ask = Question(p.rank, p.damping, forecasts(methods, kind))
    found: Examined = {}
    for name, W0, tensors, metrics, fixed in jobs:
        assert W0 is not None
        found[name] = _examined(name, W0, task_vectors(W0, tensors, matrix=True), metrics, fixed, lam, ask)
    called = tuple(names) if names is not None else tuple(f"model {t}" for t in range(len(models)))
    return assemble(found, lam, called, kind, ask)


@torch.no_grad()
def diagnose(
    recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe,
    *,
    rank: int | None = None,
    methods: Sequence[str] | None = None,
    damping: float = 1e-2,
    progress: bool = True,
    any_curvature: bool = False,
    workers: int | None = None,
    folder: Path | None = None,
) -> Diagnosis:
    """Diagnose the models of a recipe before they are merged; every model is read once, layer by layer.

    Args:
        recipe: a YAML file, or its content as a mapping; where its models have curvature, that is used.
        rank: directions per task; by default what the recipe says, or 32.
        methods: merges to forecast, by name; by default average, tsv, epimer_free, those that use this curvature, and
            the recipe's own.
        damping: added to each projected curvature of mean diagonal 1.
        progress: show a bar on a terminal.
        any_curvature: use curvature even where it was measured on another model.
        workers: matrices looked at at the same time; by default one per core.
        folder: where relative paths of a recipe that is no file are looked for too.
    """
    given, folder = open_recipe(recipe, folder)
    if given.base_model is None:
        raise ParameterError("a diagnosis is of task vectors, so the recipe needs a base_model.")
    rank = _rank(given, rank)
    own = {"rank": rank} if given.basis is None else {}
    neutral = given.plain(own, weights=True, auto=(), eval=None)
    plan = make_plan(neutral, folder=folder, progress=progress, any_curvature=any_curvature)
    check_plan(plan)
    check_memory(plan, Options())
    kind = "task-gram" if plan.curvatures is None else plan.curvatures[0].kind
    wanted = forecasts(methods if methods is not None else _wanted(given, kind), kind)
    if given.merge_method in wanted and not given.auto:
        plain = {key: value for key, value in given.parameters.items() if not isinstance(value, tuple)}
        wanted[given.merge_method] |= {k: v for k, v in plain.items() if k not in ("weight", "scale", "rank")}
    ask = Question(rank, damping, wanted)
    jobs = [
        job
        for job in plan.jobs
        if job.rule == "matrix" and job.name not in plan.ties
        and clamp_rank(matrix_shape(job.template), len(plan.models), ask.rank)
    ]  # fmt: skip
    found: Examined = {}
    with Progress(progress) as bar, ThreadPoolExecutor(workers or os.cpu_count() or 1, initializer=_single) as pool:
        stage = bar.begin("diagnosing", sum(job.reads for job in jobs))
        parts = [(job, pool.submit(_job, plan, job, ask)) for job in jobs]
        try:
            for job, part in parts:
                found[job.name] = part.result()
                stage.advance(job.reads, job.name)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    weights = next((job.setting.weights for job in jobs if job.setting is not None), [])
    shown = replace(plan, recipe=given).public_recipe()
    return assemble(found, weights, _names(given), kind, ask, base=Path(given.base_model).name, recipe=shown)


def forecasts(methods: Sequence[str] | Mapping[str, Mapping[str, Any]] | None, kind: str) -> dict[str, dict[str, Any]]:
    """Return the merges to forecast with their parameters; refuse what cannot be merged one matrix at a time."""
    wanted = methods if methods is not None else default_forecasts(kind)
    found: dict[str, dict[str, Any]] = {}
    for name in wanted:
        row = describe_method(name)
        if row.prepare is not None or row.needs_function:
            raise ParameterError(f"{name} looks at the whole model, so its loss cannot be forecast layer by layer.")
        row.check_kind(kind)
        given = dict(methods[name]) if isinstance(methods, Mapping) else {}
        if "iterations" in row.defaults:
            given.setdefault("iterations", STEPS)
        found[name] = given
    return found


def assemble(
    found: Examined,
    weights: Sequence[float],
    names: Sequence[str],
    kind: str,
    ask: Question,
    *,
    base: str = "base",
    recipe: str = "",
) -> Diagnosis:
    """Add up what was found of every matrix."""
    if not found:
        raise TensorError("there is no matrix to diagnose: every tensor is averaged, copied or too small.")
    layers = {name: layer for name, (layer, _) in found.items()}
    sums = sum((one for _, one in list(found.values())[1:]), next(iter(found.values()))[1])
    energies = [[norm**2 for norm in layer.norms] for layer in layers.values()]
    whole = total([layer.theory for layer in layers.values()], energies, weights)
    energy = sums.inner.diagonal()
    forecast = {method: _forecast(sums, method, weights) for method in sums.steps}
    ranks = [
        {"k": float(k), "eta": eta, "eta_unit_trace": trace, "eta_fraction": eta / flat if flat > 0 else 0.0}
        for k, (eta, trace, flat) in ((k, floats(values)) for k, values in sorted(sums.eta.items()))
    ]
    diagnosis = Diagnosis(
        models=tuple(names),
        layers=layers,
        total=whole,
        norms=floats(energy.clamp_min(0).sqrt()),
        base_norm=math.sqrt(sums.base),
        energy={str(k): floats(share(kept, energy).clamp(max=1)) for k, kept in sorted(sums.kept.items())},
        conflict=conflict_of(sums),
        forecast=forecast,
        eta_by_rank=tuple(ranks),
        curvature=kind,
        rank=ask.rank,
        damping=ask.damping,
        base=base,
        recipe=recipe,
        version=epimer.__version__,
    )
    return advise(diagnosis)


def _forecast(sums: Sums, method: str, weights: Sequence[float]) -> Forecast:
    lam = torch.tensor(list(weights), dtype=torch.float64) / sum(weights)
    shares = sums.lost(method)
    best = min(SCALES, key=lambda scale: float(sums.lost(method, scale) @ lam))
    return Forecast(
        floats(shares), float(shares @ lam), float(shares.max()), best, float(sums.lost(method, best) @ lam)
    )


def _examined(
    name: str, W0: Tensor, deltas: list[Tensor], metrics: Iterable[Metric], fixed: Tagged | None,
    weights: Sequence[float], ask: Question,
) -> tuple[LayerFindings, Sums]:  # fmt: skip
    used = [metric.to(deltas[0].device, deltas[0].dtype) for metric in metrics] or [TaskGram(D) for D in deltas]
    rank = clamp_rank(deltas[0].shape, len(deltas), ask.rank) if fixed is None else fixed.rank
    return examine(name, W0, deltas, used, weights, rank, ask, None if fixed is None else fixed.to(deltas[0]))


def _checked(
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


def _rank(recipe: Recipe, asked: int | None) -> int | None:
    """Return the rank to diagnose at: what was asked for, the recipe's, its method's, or 32."""
    if asked is not None:
        return int(describe_method("epimer").resolve({"rank": asked}).rank)
    row = describe_method(recipe.merge_method)
    given = recipe.parameters.get("rank")
    return row.resolve({"rank": given}).rank if "rank" in row.defaults and given is not None else 32


def _wanted(recipe: Recipe, kind: str) -> list[str]:
    """Return the methods to forecast for a recipe: the usual ones, and its own where that can be done."""
    usual = default_forecasts(kind)
    try:
        forecasts([recipe.merge_method], kind)
    except ParameterError:
        return usual
    return list(dict.fromkeys([*usual, recipe.merge_method]))


def _names(recipe: Recipe) -> list[str]:
    """Return what to call the models: the last part of where they are, numbered where that is not enough."""
    short = [Path(entry.model).name or entry.model for entry in recipe.models]
    return [name if short.count(name) == 1 else f"{name} ({t})" for t, name in enumerate(short)]


def _single() -> None:
    torch.set_num_threads(1)


@torch.no_grad()
def _job(plan: Plan, job: Job, ask: Question) -> tuple[LayerFindings, Sums]:
    assert job.setting is not None
    W0, *models = read_all(plan, job)
    basis = None if plan.basis is None else {job.name: atoms_of(plan.basis[job.name])}
    metrics, fixed = _checked(job.name, W0, models, plan.curvatures, basis)
    deltas = task_vectors(W0, models, matrix=True)
    return _examined(job.name, W0, deltas, metrics, fixed, job.setting.weights, ask)
