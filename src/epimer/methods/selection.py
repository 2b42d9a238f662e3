"""Methods that select which entries move, by what the models have in common: SCE, RAM, nearswap, Arcee Fusion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from epimer.geometry.linalg import unit_of, weighted_sum
from epimer.geometry.solution import Solution
from epimer.methods.averaging import disjoint_sum
from epimer.methods.options import MethodOptions, Option
from epimer.methods.pruning import elected_or_plus, smallest
from epimer.methods.registry import Layer, Method, with_mergekit_form

ROWS = 1 << 17  # entries of which the softmax is taken at a time
QUARTILES = (0.25, 0.5, 0.75)
SPREAD = 1.5  # interquartile ranges above the median from where on a change is important


@dataclass(frozen=True, kw_only=True)
class SceOptions(MethodOptions):
    """Options of sce."""

    select_topk: Annotated[
        float, Option("share of entries kept: those in which the models vary most", low=0, high=1)
    ] = 1.0
    least_energy: Annotated[
        float, Option("sum of the mean squares below which the models count alike, whatever their own", low=0)
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class RamOptions(MethodOptions):
    """Options of ram."""

    epsilon: Annotated[float, Option("change of an entry up to which a model has not moved it", low=0)] = 1e-5


@dataclass(frozen=True, kw_only=True)
class RamPlusOptions(RamOptions):
    """Options of ramplus_tl."""

    r: Annotated[float, Option("how much stronger a model's own entries get per shared one", low=0)] = 0.1
    alpha: Annotated[float, Option("most shared entries per own one that count", low=0)] = 0.2


@dataclass(frozen=True, kw_only=True)
class NearswapOptions(MethodOptions):
    """Options of nearswap."""

    t: Annotated[float, Option("most that an entry moves", low=0)] = 1e-4


def sce(layer: Layer, options: SceOptions) -> Solution:
    """Select entries by their variance, weigh models by their energy, erase minority signs."""
    unit = unit_of(layer.deltas)  # so that squares neither vanish nor overflow
    mask = _most_varied(layer.deltas, options.select_topk, unit) if options.select_topk < 1 else 1
    deltas = [D * mask for D in layer.deltas]
    energies = [float((unit * D).square_().mean(dtype=torch.float64)) for D in deltas]
    if sum(energies) <= options.least_energy * unit * unit:
        energies = [1.0] * len(deltas)
    shares = [weight * energy for weight, energy in zip(layer.weights, energies, strict=True)]
    total = sum(shares)
    # Signs are elected by all models alike; only the mean goes by their energy.
    elected = elected_or_plus(deltas, layer.weights)
    return Solution(disjoint_sum(deltas, [s / total for s in shares], elected, normalize=True))


def _most_varied(deltas: list[Tensor], share: float, unit: float) -> Tensor:
    """Return 1 where the task vectors vary most: a share of the entries in which they vary at all; 0 elsewhere.

    They are multiplied by `unit` before they are squared.
    """
    mean = weighted_sum(deltas, [1 / len(deltas)] * len(deltas))
    variance = torch.zeros_like(mean)
    for D in deltas:
        variance += (D - mean).mul_(unit).square_()
    count = int(int(torch.count_nonzero(variance)) * share)
    return smallest(-variance, count).to(mean)


def ram(layer: Layer, options: RamOptions) -> Solution:
    """Return per entry the mean of the models that have moved it."""
    total, mass, _ = _moved(layer, options.epsilon)
    return Solution(total / torch.where(mass > 0, mass, 1))


def ramplus_tl(layer: Layer, options: RamPlusOptions) -> Solution:
    """Return what `ram` does, with a model's own entries the stronger, the more of its others it shares here."""
    total, mass, movers = _moved(layer, options.epsilon)
    alone = movers == 1
    merged = total.div_(torch.where(mass > 0, mass, 1))
    for D in layer.deltas:
        moved = D.abs() > options.epsilon
        own = moved & alone
        count = int(torch.count_nonzero(own))
        ratio = min((int(torch.count_nonzero(moved)) - count) / max(1, count), options.alpha)
        merged += (D * own).mul_(options.r * ratio)
    return Solution(merged)


def _moved(layer: Layer, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ λ_t D_t and Σ λ_t over the models that have moved an entry, and their number."""
    total, mass, movers = (torch.zeros_like(layer.deltas[0]) for _ in range(3))
    for D, weight in zip(layer.deltas, layer.weights, strict=True):
        moved = (D.abs() > epsilon).to(D)
        total += weight * moved * D
        mass += weight * moved
        movers += moved
    return total, mass, movers


def nearswap(layer: Layer, options: NearswapOptions) -> Solution:
    """Return the model's entries where it is near the base, elsewhere the base's moved by t towards them."""
    return Solution(layer.deltas[0].clamp(-options.t, options.t))


def arcee_fusion(layer: Layer, options: MethodOptions) -> Solution:
    """Keep the changes of most importance: |D| times the divergence of its row's softmax from the base's.

    Important is what is above the median by one and a half interquartile ranges.
    """
    (D,), W0 = layer.deltas, layer.base
    assert W0 is not None
    importance = D.abs() * _divergence(W0, D)
    ordered = importance.reshape(-1)
    low, median, high = (
        float(torch.kthvalue(ordered, int(share * (len(ordered) - 1)) + 1).values) for share in QUARTILES
    )
    return Solution(D * (importance >= median + SPREAD * (high - low)))


def _divergence(W0: Tensor, D: Tensor) -> Tensor:
    """Return KL(softmax(W0 + D) ‖ softmax(W0)) of every row, along the last dimension."""
    rows = W0.reshape(-1, W0.shape[-1] if W0.dim() else 1), D.reshape(-1, D.shape[-1] if D.dim() else 1)
    step, parts = max(1, ROWS // rows[0].shape[1]), []
    for base, delta in zip(*(torch.split(x, step) for x in rows), strict=True):
        q = torch.softmax(base.double(), dim=1) + 1e-8
        p = torch.softmax(base.double() + delta.double(), dim=1) + 1e-8
        parts.append((p * torch.log(p / q)).sum(dim=1))
    return torch.cat(parts).reshape((*W0.shape[:-1], 1) if W0.dim() else ()).to(D)


ENTRYWISE = frozenset({"permutation", "copies", "scale_zero"})

METHODS: tuple[Method, ...] = (
    with_mergekit_form(
        Method(
            name="sce",
            summary="select the entries in which models vary, weigh models by their energy, drop minority signs",
            equation="θ = θ0 + α Σ η_t M ∘ D_t / Σ η_t over the t with the elected sign, η_t = λ_t mean((M ∘ D_t)²)",
            citation="Wan et al., FuseChat: Knowledge Fusion of Chat Models, 2024",
            merge=sce,
            options=SceOptions(),
            elementwise=True,
            workspace=(1.0, 8.0),
            sweeps=3,
            selects=1,
            laws=ENTRYWISE,
        ),
        "models count alike where their mean squares add up to less than 1e-6, as those of most fine-tuned models do",
        options=SceOptions(least_energy=1e-6),
    ),
    Method(
        name="ram",
        summary="the mean, entry by entry, of those models that have moved it",
        equation="θ = θ0 + α Σ λ_t D_t / Σ λ_t over the t with |D_t| > ε",
        citation="Reinforced Agent Merging, arXiv 2601.13572",
        merge=ram,
        options=RamOptions(),
        elementwise=True,
        separable=True,
        workspace=(0.0, 9.0),
        laws=ENTRYWISE,
    ),
    Method(
        name="ramplus_tl",
        summary="as ram, with what one model alone has moved made stronger the more it shares with the others",
        equation="θ = θ0 + α (ram + Σ r min(ρ_t, a) D_t where t alone has moved it), ρ_t = shared / own entries",
        citation="Reinforced Agent Merging, arXiv 2601.13572, tensor by tensor as mergekit has it",
        merge=ramplus_tl,
        options=RamPlusOptions(),
        elementwise=True,
        workspace=(0.0, 8.0),
        sweeps=4,
        laws=ENTRYWISE,
    ),
    Method(
        name="nearswap",
        summary="the base, each entry moved towards one model's by t at most",
        equation="θ = θ0 + α min(1, t / |D_1|) ∘ D_1",
        citation="alchemonaut, QuartetAnemoi-70B, 2024",
        merge=nearswap,
        options=NearswapOptions(),
        models=(1, 1),
        elementwise=True,
        separable=True,
        workspace=(0.0, 6.0),
        laws=frozenset({"permutation", "scale_zero"}),
    ),
    Method(
        name="arcee_fusion",
        summary="the base with the most important changes of one model",
        equation="θ = θ0 + α M ∘ D_1, M where |D_1| KL(softmax θ_1 ‖ softmax θ0) ≥ median + 1.5 (q_3/4 - q_1/4)",
        citation="Goddard et al., Arcee's MergeKit, EMNLP 2024",
        merge=arcee_fusion,
        options=MethodOptions(),
        uses_base=True,
        models=(1, 1),
        elementwise=True,
        workspace=(0.0, 5.0),
        selects=len(QUARTILES),
        laws=frozenset({"permutation", "scale_zero"}),
    ),
)
