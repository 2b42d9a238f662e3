"""Add a method from outside and merge with it: Model Stock with a least share, which goes further where models agree.

The fine-tuned models of one task lie on a shell around a centre that merges better than any of them. How far the
centre is from the base follows from the angle between the task vectors, tensor by tensor.

As a script it registers the method itself. On the command line the file is a plugin:
epimer merge recipe.yaml out --plugin own_method.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

import epimer
from epimer.testing import check_laws


@dataclass(frozen=True, kw_only=True)
class StockOptions(epimer.MethodOptions):
    """Options of stock_with_floor, beside those that every method has."""

    least: Annotated[float, epimer.Option("least share of the mean task vector that is kept", low=0, high=1)] = 0.0


def stock_with_floor(layer: epimer.Layer, options: StockOptions) -> epimer.Solution:
    """Return t Σ λ_t D_t with t = T cos θ / (1 + (T - 1) cos θ), θ being the mean angle between task vectors."""
    tasks = len(layer.deltas)
    unit = torch.nn.functional.normalize(torch.stack([D.flatten() for D in layer.deltas]), dim=1)
    cosine = float((unit @ unit.T).triu(1).sum()) / (tasks * (tasks - 1) / 2) if tasks > 1 else 1.0
    share = max(options.least, tasks * cosine / (1 + (tasks - 1) * cosine)) if cosine > 0 else options.least
    return epimer.Solution(share * sum(w * D for w, D in zip(layer.weights, layer.deltas, strict=True)))


STOCK = epimer.Method(
    name="stock_with_floor",
    summary="the mean of the models, pulled to the base where their task vectors disagree",
    equation="θ = θ0 + α t Σ λ_t D_t, t = T cos θ / (1 + (T - 1) cos θ)",
    citation="Jang et al., Model Stock: All we need is just a few fine-tuned models, ECCV 2024",
    merge=stock_with_floor,
    options=StockOptions(),
    elementwise=True,
    counts_models=True,
    laws=frozenset({"permutation", "copies", "scale_zero"}),
)


def main() -> None:
    """Check the method's laws, register it, and merge noisy copies of one change with it."""
    check_laws(STOCK)
    epimer.register_method(STOCK)
    torch.manual_seed(0)
    base = {"layer.weight": torch.randn(64, 48)}
    target = base["layer.weight"] + 0.1 * torch.randn(64, 48)
    models = [{"layer.weight": target + 0.2 * torch.randn(64, 48)} for _ in range(4)]
    print("distance from what the models have in common (the base is 1):")
    for name in ("average", "stock_with_floor"):
        merged = epimer.merge_state_dicts(base, models, name)["layer.weight"]
        print(f"  {name:<18}{float((merged - target).norm() / (base['layer.weight'] - target).norm()):6.2f}")
    print(f"\n{epimer.describe_method('stock_with_floor')}")


if __name__ == "__main__":
    main()
