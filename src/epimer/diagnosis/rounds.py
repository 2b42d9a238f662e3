"""What inputs without labels can do for a merge: choose its scale, measure curvature again at it, refine it.

Every choice goes by the divergence from each task's own fine-tuned model (`by_agreement`). Three quarters of the inputs
fit: some of them choose scales, curvature at a merge is measured on all of them, and steps are computed from them. The
last quarter, the validation inputs, judges rounds and steps and is used for nothing else. Curvature that was measured
before, at the models, may have seen the validation inputs too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from epimer.curvature.curvature import Curvature
from epimer.curvature.estimate import estimate_curvature
from epimer.diagnosis.sweep import SCALES, climb
from epimer.errors import CurvatureError
from epimer.evaluation.divergence import Predictions, counted_logits
from epimer.evaluation.judges import Evaluate, by_agreement
from epimer.evaluation.suite import State, Suite, SuiteTask
from epimer.geometry.kronecker import KroneckerSum
from epimer.geometry.metric import Kronecker, Metric
from epimer.progress import Stopwatch
from epimer.tasks.batches import Batch

FIT, VALIDATION = "val", "test"
"""the splits of `Suite.inputs_only`: what scales and steps come from, and what rounds and steps are judged by"""
CHOOSING = 64  # inputs per task, at most, that choose a scale: every scale takes a pass of every network over them
BATCH = 16  # samples in a batch when curvature and gradients are measured
DAMPING = 10.0  # mean diagonals of curvature added to it in a natural-gradient step
ITERATIONS = 30  # of conjugate gradients in such a step
LENGTHS = tuple(10 ** (exponent / 2) for exponent in range(-10, 1))
"""of a natural-gradient step that are tried, 1 being the whole of it"""

Curvatures = Sequence[Mapping[str, Metric]]
MergeWith = Callable[[Any], Callable[[float], State]]
"""curvature of every model -> scale -> the merge"""


@dataclass(frozen=True)
class Improved:
    """A merge as inputs without labels would have it."""

    scale: float
    curvatures: Any
    """those that the merge was made with: the given ones, or the last that were measured at a merge"""
    merged: State
    refined: dict[str, Tensor] | None = None
    """the merge after its natural-gradient steps, if there were any"""
    inputs: dict[str, int] = field(default_factory=dict)
    """inputs per task by their use, see `MergeRecord.inputs`"""
    measuring: float = 0.0
    """seconds in which curvature was measured"""
    notes: list[str] = field(default_factory=list)


def improve(
    suite: Suite,
    merge_with: MergeWith,
    curvatures: Any,
    weights: Sequence[float],
    *,
    scale: float | None,
    rounds: int = 0,
    steps: int = 0,
    seed: int = 0,
    refinable: Collection[str] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Improved:
    """Choose a merge's scale, measure its curvature again `rounds` times, and refine it by `steps` steps at most.

    Args:
        suite: the tasks, on inputs only (`Suite.inputs_only`).
        merge_with: merges under given curvature, at any scale.
        curvatures: one per model, measured at the models themselves.
        weights: λ_t, for the steps.
        scale: None chooses it, anew in every round.
        rounds: how often curvature is measured at the merge and the models are merged again under it; given up if
            validation inputs say that it does not help.
        steps: natural-gradient steps, see `refine`.
        seed: of the labels that curvature is measured with.
        refinable: the tensors that steps may change; None: all that have curvature.
        progress: called with a line after everything that takes long.
    """
    judge, scale_judge = by_agreement(suite), judge_of_scales(suite)
    watch = Stopwatch()

    def made(curvatures: Any) -> tuple[float, State, float]:
        at = merge_with(curvatures)
        best = climb_by_inputs(lambda a: scale_judge(at(a), FIT).order, SCALES) if scale is None else scale
        merged = dict(at(best))
        progress(f"scale {best:g}")
        return best, merged, judge(merged, VALIDATION).order if rounds else 0.0

    def measured_at(merged: State) -> list[Curvature]:
        with watch:
            return measure_curvature(suite, [merged] * len(suite.tasks), seed=seed, split=FIT)

    chosen, merged, order = made(curvatures)
    notes, at_merge = [], None  # curvature at the merge, where a round that was given up measured it
    for number in range(1, rounds + 1):
        measured = measured_at(merged)
        again = made(measured)
        change = f"divergence on validation inputs {1 - order:.4f} -> {1 - again[2]:.4f}"
        if again[2] <= order:
            notes.append(f"round {number} of measuring at the merge was given up: {change}.")
            at_merge = measured
            break
        curvatures, (chosen, merged, order) = measured, again
        notes.append(f"round {number} of measuring at the merge: {change}.")
    refined = None
    if steps:
        names = merged.keys() if refinable is None else refinable
        at_merge = at_merge or measured_at(merged)
        local = [{name: metric for name, metric in each.items() if name in names} for each in at_merge]
        refined, divergences = refine(suite, merged, local, weights, steps, progress)
        taken = len(divergences) - 1
        change = f"KL on validation inputs {divergences[0]:.4f} -> {divergences[-1]:.4f}"
        count = f"{taken} natural-gradient step{'s' if taken > 1 else ''}"
        notes.append(f"{count}: {change}." if taken else "no natural-gradient step helped.")
    uses = {
        "scale": (scale is None, scale_inputs(suite)),
        "curvature": (rounds or steps, samples_of(suite, FIT)),
        "steps": (steps, samples_of(suite, FIT)),
        "validation": (rounds or steps, samples_of(suite, VALIDATION)),
    }
    inputs = {name: count for name, (used, count) in uses.items() if used}
    return Improved(chosen, curvatures, merged, refined, inputs, watch.seconds, notes)


def judge_of_scales(suite: Suite) -> Evaluate:
    """Return what compares the scales of a merge on a suite of inputs."""
    return by_agreement(suite.truncated(**{FIT: CHOOSING}))


def climb_by_inputs(value: Callable[[float], float], grid: Sequence[float]) -> float:
    """Return the best scale of a grid by inputs: divergence is smooth in it, so one that is worse ends a climb."""
    return climb(cache(value), grid, ahead=1)


def samples_of(suite: Suite, split: str = "train") -> int:
    """Return the inputs in a split of each task, the most where tasks differ."""
    return max(len(task.splits[split]) for task in suite.tasks)


def scale_inputs(suite: Suite) -> int:
    """Return how many inputs per task compare scales."""
    return min(CHOOSING, samples_of(suite, FIT))


def measure_curvature(
    suite: Suite, states: Sequence[State], kind: str = "kronecker", seed: int = 0, split: str = "train"
) -> list[Curvature]:
    """Return the curvature of every task at its state dict, under the labels that this state dict itself predicts."""
    curvatures = []
    for task, state in zip(suite.tasks, states, strict=True):
        network = suite.network(state, task)
        names = _merged_parameters(suite, task, network)
        batches = task.splits[split].batches(BATCH)
        curvature = estimate_curvature(
            network, batches, task.loss, kind=kind, samples=None, seed=seed, layers=list(names), progress=False
        )
        curvatures.append(curvature.renamed(names))
    return curvatures


def _merged_parameters(suite: Suite, task: SuiteTask, network: nn.Module) -> dict[str, str]:
    """Return parameter of a task's network -> its name in state dicts, for those that are merged."""
    names = suite.names(task) if suite.names is not None else {name: name for name, _ in network.named_parameters()}
    return {name: stored for name, stored in names.items() if stored in suite.base}


@torch.no_grad()
def refine(
    suite: Suite,
    state: State,
    curvatures: Curvatures,
    weights: Sequence[float],
    steps: int,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Descend Σ λ_t KL(model t ‖ merge) by damped natural-gradient steps, while validation inputs say that it helps.

    A step of a matrix is -(Σ λ_t G_t ⊗ A_t + εI)⁻¹ ∇ with `curvatures` measured at `state`, and as long as is best on
    validation inputs. Other tensors stay. Returns the refined state dict, and the KL on validation inputs before the
    first step and after each.
    """
    measured = [name for name in curvatures[0] if all(name in each for each in curvatures)]

    def solved(name: str, gradient: Tensor) -> Tensor:
        """Solve for one tensor; factors in float64 are formed for one at a time."""
        return _damped_inverse([each[name] for each in curvatures], weights)(gradient)

    objective = _Objective(suite, weights)
    current = dict(state)
    divergences = [objective.value(current, VALIDATION)]
    for step in range(1, steps + 1):
        gradients = objective.gradient(current, FIT, measured)
        direction = {name: -solved(name, gradient) for name, gradient in gradients.items()}
        best, length, worse = divergences[-1], 0.0, 0
        for tried in LENGTHS:
            value = objective.value(_moved(current, direction, tried), VALIDATION)
            if value < best:
                best, length, worse = value, tried, 0
                continue
            worse += 1
            if length and worse > 1:
                break
        if not length:
            break
        current = _moved(current, direction, length)
        divergences.append(best)
        progress(f"step {step}, KL {best:.4f}")
    return current, divergences


def _moved(state: State, direction: Mapping[str, Tensor], length: float) -> dict[str, Tensor]:
    return {name: W + (length * direction[name]).to(W) if name in direction else W for name, W in state.items()}


def _damped_inverse(metrics: Sequence[Metric], weights: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """Return X -> (Σ λ_t G_t ⊗ A_t + εI)⁻¹ X, ε being `DAMPING` mean diagonals; 0 where there is no curvature."""
    terms = []
    for metric, weight in zip(metrics, weights, strict=True):
        if not isinstance(metric, Kronecker):
            raise CurvatureError(
                f"natural-gradient steps need kronecker curvature, got {metric.kind}; measure that kind."
            )
        G, A = (None if factor is None else factor.double() for factor in (metric.G, metric.A))
        terms.append((weight, G, A))
    operator = KroneckerSum(tuple(terms), null=1e-6, max_steps=ITERATIONS)
    shift = DAMPING * operator.mean_diagonal()
    if not shift > 0:
        return torch.zeros_like
    return lambda X: operator.solve(X.double().flatten(1), shift).value.reshape(X.shape)


@dataclass
class _Objective:
    """Σ λ_t KL(model t ‖ merge), each task's KL being the mean over its own inputs' predictions."""

    suite: Suite
    weights: Sequence[float]
    _references: dict[tuple[str, str], list[Predictions]] = field(default_factory=dict)

    def _batches(self, t: int, split: str) -> list[tuple[Batch, Predictions]]:
        """Return a task's batches with the predictions of its own model, computed once."""
        task = self.suite.tasks[t]
        batches = [Batch(inputs, targets, 0) for inputs, targets in task.splits[split].batches(BATCH)]
        if (task.name, split) not in self._references:
            network = self.suite.network(self.suite.models[t], task)
            self._references[task.name, split] = [Predictions.of(counted_logits(batch, network)) for batch in batches]
        return list(zip(batches, self._references[task.name, split], strict=True))

    def value(self, state: State, split: str) -> float:
        total = 0.0
        for t, (task, weight) in enumerate(zip(self.suite.tasks, self.weights, strict=True)):
            batches, network = self._batches(t, split), self.suite.network(state, task)
            summed = sum(float(_kl(batch, reference, network)) for batch, reference in batches)
            total += weight * summed / sum(len(reference) for _, reference in batches)
        return total

    def gradient(self, state: State, split: str, wanted: Sequence[str]) -> dict[str, Tensor]:
        """Return the gradient by name, of the tensors that are wanted."""
        total: dict[str, Tensor] = {}
        for t, (task, weight) in enumerate(zip(self.suite.tasks, self.weights, strict=True)):
            batches, network = self._batches(t, split), self.suite.network(state, task)
            stored, parameters = _merged_parameters(self.suite, task, network), dict(network.named_parameters())
            names = [name for name in stored if stored[name] in wanted]
            share = weight / sum(len(reference) for _, reference in batches)
            for batch, reference in batches:
                with torch.enable_grad():
                    leaves = [parameters[name].requires_grad_(True) for name in names]
                    loss = share * _kl(batch, reference, network)
                    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
                for name, gradient in zip(names, gradients, strict=True):
                    if gradient is not None:
                        key = stored[name]
                        total[key] = gradient if key not in total else total[key] + gradient
        return total


def _kl(batch: Batch, reference: Predictions, network: nn.Module) -> Tensor:
    """Return the summed KL divergence of a batch's predictions from the references."""
    return reference.divergence(counted_logits(batch, network)).sum()
