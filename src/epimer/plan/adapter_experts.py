"""Which parameters of a network hold the experts that an adapter changes, and what PEFT calls their factors.

PEFT (`target_parameters`) wraps the module of the experts once for each of its parameters, in their order: the factors
of the last one are the module's own, those of the one before its `base_layer`'s, and so on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from epimer.checkpoints.adapter_files import adapters_of
from epimer.checkpoints.expert_factors import ExpertPart
from epimer.plan.jobs import Plan
from epimer.tasks.module_names import Network, find_network


@dataclass(frozen=True)
class ExpertStack:
    """A parameter that holds all experts of a layer."""

    parameter: str
    """its name in the network"""
    module: str
    """the module that its factors belong to, as PEFT has it"""
    parts: dict[str, ExpertPart]
    """tensor of the base -> which part of it"""


def expert_stacks(plan: Plan, changed: Collection[str], network: Network | None) -> list[ExpertStack] | None:
    """Return the parameters that hold changed experts; None where nothing tells in which order PEFT wraps them.

    Adapters tell where the tensors that they change belong, the network of other ones.
    """
    places: dict[str, tuple[str, ExpertPart]] = {} if network is None else dict(network.experts)
    depths = list[dict[str, int]]()  # of each adapter, parameter -> how often its module is wrapped after it
    for model in plan.participants.models:
        stored = {model.stored.get(job.name, job.name): job.name for job in plan.jobs}
        for adapter in adapters_of(model.checkpoint):
            depths.append({})
            for name, update in adapter.updates.items():
                if update.expert is not None and name in stored:
                    places[stored[name]] = update.parameter, update.expert
                    depths[-1][update.parameter] = update.module.count(".base_layer")
    parameters = list(dict.fromkeys(places[name][0] for name in changed if name in places))
    stacks = list[ExpertStack]()
    for outer in dict.fromkeys(name.rpartition(".")[0] for name in parameters):
        wrapped = _in_order([name for name in parameters if name.rpartition(".")[0] == outer], depths, plan, network)
        if wrapped is None:
            return None
        for depth, parameter in enumerate(reversed(wrapped)):
            parts = {name: part for name, (holder, part) in places.items() if holder == parameter}
            stacks.append(ExpertStack(parameter, outer + depth * ".base_layer", parts))
    return stacks


def _in_order(
    parameters: list[str], depths: list[dict[str, int]], plan: Plan, network: Network | None
) -> list[str] | None:
    """Return the parameters of one module in the order in which PEFT wraps it for them."""
    if len(parameters) == 1:
        return parameters
    for known in depths:
        if known.keys() >= {*parameters}:
            return sorted(parameters, key=lambda name: -known[name])
    network = network or find_network(plan.participants.donor)
    order: Mapping[str, None] = {} if network is None else dict.fromkeys(name for name, _ in network.experts.values())
    return [name for name in order if name in parameters] if order.keys() >= {*parameters} else None
