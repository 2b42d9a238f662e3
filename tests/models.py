"""Small models of one ancestor, with every kind of tensor a checkpoint may hold, and curvature for them."""

from __future__ import annotations

import torch
from torch import Tensor

import epimer

MATRICES = {"block.0.weight": (24, 20), "block.1.weight": (18, 30)}
OTHERS = {
    "embed_tokens.weight": (11, 6),
    "block.0.bias": (24,),
    "conv.weight": (4, 3, 2, 2),
    "temperature": (),
    "empty": (0, 3),
    "lm_head.weight": (5, 20),
}


def make_base(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Return an ancestor with matrices, vectors, a convolution, a scalar, an empty and an integer tensor."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in (MATRICES | OTHERS).items()}
    state["steps"] = torch.tensor([3, 1, 4])
    return state


def make_models(base: dict[str, Tensor], count: int = 3, *, rank: int | None = None, seed: int = 1) -> list[dict]:
    """Return fine-tuned models; with `rank`, their matrices moved in that many directions only."""
    generator = torch.Generator().manual_seed(seed)
    models = []
    for t in range(count):
        model = {}
        for name, W in base.items():
            if not W.is_floating_point():
                model[name] = W + t
                continue
            delta = 0.1 * (1 + t) * torch.randn(W.shape, generator=generator)
            if rank is not None and name in MATRICES:
                delta = delta[:, :rank] @ delta[:rank, :]
            model[name] = (W.double() + delta.double()).to(W.dtype)
        models.append(model)
    return models


def make_curvature(base: dict[str, Tensor], kind: str | None, count: int = 3, seed: int = 2) -> list[dict] | None:
    """Return one mapping per model: a diagonal for every float tensor, the other kinds for the matrices."""
    if kind not in ("diagonal", "kronecker", "samples"):
        return None
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    mappings = []
    for _ in range(count):
        mapping = {}
        for name, W in base.items():
            if kind == "diagonal" and W.is_floating_point():
                mapping[name] = epimer.Diagonal(draw(*W.shape).square() * draw(*W.shape).exp())
            elif name in MATRICES:
                m, n = W.shape
                g, x = draw(40, 2, m) * draw(m).exp(), draw(40, 2, n) * draw(n).exp()
                if kind == "kronecker":
                    G, A = g.flatten(0, 1), x.flatten(0, 1)
                    mapping[name] = epimer.Kronecker(G=G.T @ G / len(G), A=A.T @ A / len(A))
                elif kind == "samples":
                    mapping[name] = epimer.Samples(g=g, x=x)
        mappings.append(mapping)
    return mappings


def needs(name: str, base: dict[str, Tensor], count: int = 3) -> dict:
    """Return the arguments a method cannot do without."""
    method = epimer.describe_method(name)
    given: dict = {}
    if method.needs_curvature:
        given["curvature"] = make_curvature(base, method.curvature, count)
    if name == "greedy_soup":
        given["evaluate"] = lambda state: -float(state["block.0.weight"].double().square().sum())
    return given
