"""Merge the models of a suite by inputs without labels: curvature, scale, rounds and refinement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from epimer.diagnosis.rounds import FIT, Improved, improve, measure_curvature, samples_of
from epimer.diagnosis.sweep import Merges, at_scales
from epimer.engine.in_memory import MergedState, merge_in_memory
from epimer.engine.options import in_memory
from epimer.engine.output import merge_record
from epimer.errors import ParameterError, short
from epimer.evaluation.suite import State, Suite
from epimer.geometry.metric import Metric
from epimer.methods.options import is_number
from epimer.methods.registry import describe_method
from epimer.plan.inputs import check_weights
from epimer.plan.jobs import Plan
from epimer.plan.merge import plan_state_dicts
from epimer.plan.participants import state_dict_participants

SAMPLES = 256  # inputs per task


@torch.no_grad()
def merge_suite(
    suite: Suite,
    method: str = "epimer_kron",
    *,
    scale: float | str = "auto",
    rounds: int = 0,
    refine: int = 0,
    samples: int = SAMPLES,
    seed: int = 0,
    weights: Sequence[float] | None = None,
    curvature: Sequence[Mapping[str, Metric]] | None = None,
    progress: Callable[[str], None] = lambda line: None,
    **parameters: Any,
) -> MergedState:
    """Merge the models of a suite by some of each task's training inputs, of which no label is read.

    Args:
        suite: base, models, and for every model its network and its data.
        method: one of `list_methods()`.
        scale: a number, or "auto": where the merge diverges least from each task's own model on some of the inputs, by
            disagreement and KL divergence.
        rounds: how often curvature is measured again at the merge, and the models merged under that; given up if a
            quarter of the inputs, which is held out of all else, says that it does not help. For methods with Kronecker
            curvature.
        refine: natural-gradient steps at most that pull the merge towards each task's own model, each judged by
            the held-out inputs.
        samples: inputs per task.
        seed: of the choice of inputs and of the labels that curvature is measured with.
        weights: one per model.
        curvature: measured before, as in `merge_state_dicts`; None measures what the method needs, with `rounds` or
            `refine` on three quarters of the inputs.
        progress: called with a line after everything that takes long.
        **parameters: the method's own.

    Returns:
        The merged state dict; its `record` tells what was chosen and by how many inputs.
    """
    row = describe_method(method)
    if scale != "auto" and not is_number(scale):
        raise ParameterError(f"The 'scale' parameter must be a number or 'auto'. Got {short(scale)} instead.")
    for name, count in (("rounds", rounds), ("refine", refine)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ParameterError(f"The {name!r} parameter must be an integer at least 0. Got {short(count)} instead.")
    if rounds and row.curvature != "kronecker":
        raise ParameterError(
            f"rounds measure kronecker curvature again, which {method} does not use; take epimer_kron."
        )
    inputs = suite.inputs_only(samples, seed)
    if curvature is None and row.needs_curvature:
        split = FIT if rounds or refine else "train"
        curvature = measure_curvature(inputs, suite.models, row.curvature or "", seed, split)
    participants = state_dict_participants(suite.base, list(suite.models))
    device = next((W.device for W in suite.base.values()), torch.device("cpu"))
    run = in_memory(device, len(participants.template.headers))
    merges = Merges(participants, row.resolve(parameters).rules, run)

    def plan(curvatures: Any, scale: float) -> Plan:
        return plan_state_dicts(participants, row, row.resolve({**parameters, "scale": scale}), weights, curvatures)

    def merge_with(curvatures: Any) -> Callable[[float], State]:
        return at_scales(row, suite.base, lambda scale: merges.merge(plan(curvatures, scale)))

    fixed = None if scale == "auto" else float(scale)
    improved = improve(
        inputs,
        merge_with,
        curvature,
        check_weights(weights, len(suite.models), "a refinement") if refine else [],
        scale=fixed,
        rounds=rounds,
        steps=refine,
        seed=seed,
        refinable=refinable(plan(curvature, 1.0)),
        progress=progress,
    )
    final = replace(plan(improved.curvatures, improved.scale), **applied(improved, samples_of(inputs)))
    tensors, records, prepared = merge_in_memory(final, run.start(final.parts))
    return MergedState(tensors, merge_record(final, prepared, records))


def refinable(plan: Plan) -> set[str]:
    """Return the tensors that a refinement may change: those that are merged, not copied."""
    return {job.name for job in plan.merged}


def applied(improved: Improved, samples: int) -> dict[str, Any]:
    """Return the fields of a plan that say and do what inputs without labels chose."""
    count = improved.inputs.get("scale")
    chosen = () if count is None else (f"scale {improved.scale:g}, by {count} inputs per task without labels",)
    corrections: dict[str, Tensor] = {}
    if improved.refined is not None:
        moved = {name: W for name, W in improved.refined.items() if W is not improved.merged[name]}
        corrections = {name: W - improved.merged[name] for name, W in moved.items()}
    fields: dict[str, Any] = {"choices": (*chosen, *improved.notes), "inputs": improved.inputs}
    return {**fields, "unlabelled": samples, "corrections": corrections}
