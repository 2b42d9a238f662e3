"""Sums over samples, one layer at a time: what a measurement keeps of the gradients that pass by.

Every collector sums and divides at the end, so measurements of disjoint data add up. Accumulators are in float32 or
float64, whatever the model computes in.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from epimer.curvature.per_sample_gradients import Outer, Rows, Use, Whole, per_token
from epimer.geometry.metric import EKFAC, Diagonal, Kronecker, Metric, Projected, Samples
from epimer.geometry.subspace import Tagged, TensorProduct

ROOM = 1 << 20  # entries of a block of per-sample gradients: what a cache holds
GPU_ROOM = 1 << 26  # the same where it takes more to keep all units busy
TILE, GPU_TILE = 512, 1024  # side of the blocks in which a symmetric product is formed
WIDEST = 16384  # longest side of a Kronecker factor; beyond it (vocabularies) there is none


class Collector(ABC):
    """Accumulates one kind of curvature."""

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        self.shapes, self.dtype, self.device = shapes, dtype, device
        self.tokens: dict[str, int] = dict.fromkeys(shapes, 0)
        self.refused: dict[str, str] = {}
        """names that this kind of curvature cannot describe, and why"""
        self.samples = 0
        self.repeated = False
        """the pass differs from the last one in its labels only, so inputs have been counted"""

    @abstractmethod
    def add(self, name: str, uses: Sequence[Use]) -> None:
        """Take in one parameter's uses in one batch."""

    @abstractmethod
    def finish(self) -> dict[str, Metric]:
        """Return the means."""

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _total(self, store: dict[Any, Tensor], key: object, *shape: int) -> Tensor:
        """Return the running total under a key, which begins at zero."""
        if key not in store:
            store[key] = self._zeros(*shape)
        return store[key]

    def _together(self, name: str, uses: Sequence[Use]) -> Outer | None:
        """Return all uses as one outer product; None, once and for all, where one of them is not."""
        outers = [use for use in uses if isinstance(use, Outer)]
        if len(outers) < len(uses):
            self.refused[name] = "it is also used as a table, which has no two-sided curvature"
        if name in self.refused or not outers:
            return None
        left = torch.cat([use.left for use in outers], dim=1) if len(outers) > 1 else outers[0].left
        right = torch.cat([use.right for use in outers], dim=1) if len(outers) > 1 else outers[0].right
        return Outer(left, right, outers[0].inputs)

    def _count(self, name: str, uses: Sequence[Use]) -> Tensor | None:
        """Count a batch's real tokens; return which they are in all uses beside each other, None where all are."""
        shapes = [per_token(use).shape[:2] for use in uses]
        masks = [use.mask for use in uses]
        pairs = list(zip(shapes, masks, strict=True))
        self.tokens[name] += sum(shape.numel() if mask is None else int(mask.sum()) for shape, mask in pairs)
        if all(mask is None for mask in masks):
            return None
        ones = [torch.ones(shape, dtype=torch.bool, device=self.device) for shape in shapes]
        return torch.cat([every if mask is None else mask for every, mask in zip(ones, masks, strict=True)], dim=1)


class DiagonalCollector(Collector):
    """E[(∇L)²], a sample's tokens summed before squaring."""

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shapes, dtype, device)
        self.F: dict[str, Tensor] = {}

    def add(self, name: str, uses: Sequence[Use]) -> None:
        F = self._total(self.F, name, *self.shapes[name])
        if not self.repeated:
            self._count(name, uses[:1])
        if all(isinstance(use, Outer) for use in uses):
            both = self._together(name, uses)
            assert both is not None
            add_squares(F.view(len(F), -1), both.left, both.right)
        elif all(isinstance(use, Whole) for use in uses):
            parts = torch.cat([use.parts for use in uses if isinstance(use, Whole)], dim=1)
            F += parts.to(self.dtype).sum(1).square().sum(0)
        elif len(uses) == 1 and isinstance(uses[0], Rows):
            add_squared_rows(F, uses[0])
        else:
            for gradient in _sample_gradients(F, uses):
                F.addcmul_(gradient, gradient)

    def finish(self) -> dict[str, Metric]:
        found = {name: self.F.pop(name, None) for name in self.shapes}
        zeros = {name: self._zeros(*self.shapes[name]) for name, F in found.items() if F is None}
        return {name: Diagonal(zeros[name] if F is None else F / self.samples) for name, F in found.items()}


def add_squares(F_mn: Tensor, left: Tensor, right: Tensor) -> None:
    """Add Σ_n (Σ_t left_nt ⊗ right_nt)² to F, a block of rows at a time in room that is used again."""
    if left.shape[2] < right.shape[2]:
        add_squares(F_mn.T, right, left)
        return
    (N, T, m), n, dtype = left.shape, right.shape[2], F_mn.dtype
    if T == 1:
        F_mn += left[:, 0].to(dtype).square().T @ right[:, 0].to(dtype).square()
        return
    left_nmt, right = left.to(dtype).transpose(1, 2), right.to(dtype)
    rows = max(1, min(m, (ROOM if F_mn.device.type == "cpu" else GPU_ROOM) // (N * n)))
    room = torch.empty(N, rows, n, dtype=dtype, device=F_mn.device)
    for start in range(0, m, rows):
        block = left_nmt[:, start : start + rows]
        s = torch.bmm(block, right, out=room if block.shape[1] == rows else None)
        F_mn[start : start + rows] += s.square_().sum(0)


def add_squared_rows(F: Tensor, use: Rows) -> None:
    """Add the squared gradient of every sample to the rows of a table that it touches."""
    sample = torch.arange(len(use.ids), device=use.ids.device)[:, None] * len(F)
    keys, place = torch.unique((use.ids + sample).flatten(), return_inverse=True)
    sums = torch.zeros(len(keys), F.shape[1], dtype=F.dtype, device=F.device)
    sums.index_add_(0, place, use.g.flatten(0, 1).to(F.dtype))
    F.index_add_(0, keys % len(F), sums.square_())


def _sample_gradients(F: Tensor, uses: Sequence[Use]) -> Iterator[Tensor]:
    """Form one sample's gradient at a time, from uses of several kinds: a table that is also the head."""
    first = uses[0]
    for n in range(
        len(first.left if isinstance(first, Outer) else first.ids if isinstance(first, Rows) else first.parts)
    ):
        total = torch.zeros_like(F)
        flat = total.view(len(F), -1)
        for use in uses:
            if isinstance(use, Outer):
                flat.addmm_(use.left[n].T.to(F.dtype), use.right[n].to(F.dtype))
            elif isinstance(use, Rows):
                total.index_add_(0, use.ids[n], use.g[n].to(F.dtype))
            else:
                total += use.parts[n].to(F.dtype).sum(0)
        yield total


class KroneckerCollector(Collector):
    """A from inputs and G from output gradients, or their projections UᵀGU and VᵀAV on a basis.

    expand: every token counts for itself, A = E_token[xxᵀ], G = E_sample[Σ_token ggᵀ].
    reduce: a sample is its mean input and its summed gradient, A = E[x̄x̄ᵀ], G = E[(Σg)(Σg)ᵀ].
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        *,
        reduce: bool = False,
        basis: Mapping[str, Tagged | TensorProduct] | None = None,
    ) -> None:
        super().__init__(shapes, dtype, device)
        self.reduce, self.basis = reduce, basis
        self.grams: dict[tuple[str, int], Tensor] = {}
        self.inputs: dict[str, int] = {}
        for name, shape in shapes.items():
            if basis is None and max(len(shape) and shape[0], shape[1:].numel()) > WIDEST:
                self.refused[name] = f"a factor of side {max(shape[0], shape[1:].numel())} is too large to keep"

    def add(self, name: str, uses: Sequence[Use]) -> None:
        both = self._together(name, uses)
        if both is None:
            return
        self.inputs[name] = both.inputs
        gradients = 1 - both.inputs
        self._add_gradients(name, gradients, (both.left, both.right)[gradients])
        if not self.repeated:
            self._add_inputs(name, both.inputs, (both.left, both.right)[both.inputs], self._count(name, uses))

    def _add_gradients(self, name: str, side: int, g: Tensor) -> None:
        self._add(name, side, g.to(self.dtype).sum(1) if self.reduce else g.flatten(0, 1))

    def _add_inputs(self, name: str, side: int, x: Tensor, mask: Tensor | None) -> None:
        if self.reduce:
            x = x.to(self.dtype)
            if mask is not None:
                x = (x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1).clamp_min(1)[:, None, None]
            self._add(name, side, x.mean(1))
        else:
            self._add(name, side, x.flatten(0, 1) if mask is None else x[mask])

    def _add(self, name: str, side: int, rows: Tensor) -> None:
        rows = rows.to(self.dtype)
        if self.basis is not None:
            basis = self.basis[name]
            rows = rows @ (basis.V if side else basis.U).to(rows)
        size = rows.shape[1]
        add_gram(self._total(self.grams, (name, side), size, size), rows)

    def finish(self) -> dict[str, Metric]:
        found: dict[str, Metric] = {}
        for name, shape in self.shapes.items():
            if name in self.refused:
                continue
            inputs = self.inputs.get(name, 1)
            count = self.samples if self.reduce else max(1, self.tokens[name])
            factors = []
            for side in (0, 1):
                gram = self.grams.pop((name, side), None)
                if gram is None:
                    size = (shape[0], shape[1:].numel())[side]
                    if self.basis is not None:
                        size = (self.basis[name].U if side == 0 else self.basis[name].V).shape[1]
                    gram = self._zeros(size, size)
                factors.append(mirrored(gram).div_(count if side == inputs else self.samples))
            G, A = factors
            if self.basis is None:
                found[name] = Kronecker(A=A, G=G, inputs=inputs)
            else:
                found[name] = Projected(A=A, G=G, inputs=inputs)
        return found


def add_gram(total: Tensor, rows: Tensor) -> None:
    """Add rowsᵀ rows to a symmetric matrix, of which only the blocks on and above the diagonal are kept."""
    size, tile = len(total), TILE if total.device.type == "cpu" else GPU_TILE
    for start in range(0, size, tile):
        stop = min(start + tile, size)
        total[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:])


def mirrored(total: Tensor) -> Tensor:
    """Return the whole symmetric matrix."""
    return total.triu().add_(total.triu(1).T)


class SamplesCollector(Collector):
    """Every sample's gradient, as its tokens' gradients and inputs; or E[s sᵀ] of their coordinates on tagged atoms."""

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        *,
        basis: Mapping[str, Tagged] | None = None,
    ) -> None:
        super().__init__(shapes, dtype, device)
        self.basis = basis
        self.H: dict[str, Tensor] = {}
        self.kept: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def add(self, name: str, uses: Sequence[Use]) -> None:
        both = self._together(name, uses)
        if both is None:
            return
        if not self.repeated:
            self._count(name, uses)
        left, right = both.left.to(self.dtype), both.right.to(self.dtype)
        if self.basis is None:
            self.kept.setdefault(name, []).append((left.to("cpu", copy=True), right.to("cpu", copy=True)))
            return
        atoms = self.basis[name]
        s_np = ((left @ atoms.U.to(left)) * (right @ atoms.V.to(left))).sum(1)
        if atoms.mix is not None:
            s_np = s_np @ atoms.mix.to(s_np)
        size = s_np.shape[1]
        add_gram(self._total(self.H, name, size, size), s_np)

    def finish(self) -> dict[str, Metric]:
        found: dict[str, Metric] = {}
        for name, shape in self.shapes.items():
            if name in self.refused:
                continue
            if self.basis is not None:
                atoms = self.basis[name]
                size = atoms.U.shape[1] if atoms.mix is None else atoms.mix.shape[1]
                H = self.H.pop(name, None)
                H = self._zeros(size, size) if H is None else mirrored(H).div_(self.samples)
                found[name] = Projected(H=H)
                continue
            kept = self.kept.pop(name, [])
            if not kept:
                widths = shape[0], shape[1:].numel()
                kept = [(self._zeros(self.samples, 1, widths[0]).cpu(), self._zeros(self.samples, 1, widths[1]).cpu())]
            left, right = (padded([pair[side] for pair in kept]) for side in (0, 1))
            # under `expected` every sample is there once per class, its gradient times the root of the probability
            found[name] = Samples(g=left * math.sqrt(len(left) / self.samples), x=right)
        return found


def padded(parts: Sequence[Tensor]) -> Tensor:
    """Return N x tokens x width tensors below each other, short ones filled up with zeros."""
    tokens = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, 0, 0, tokens - part.shape[1])) for part in parts])


class CorrectedCollector(Collector):
    """EKFAC's second pass: the exact second moments of the gradients along the factors' eigenvectors."""

    def __init__(self, factors: Mapping[str, Kronecker], dtype: torch.dtype, device: torch.device) -> None:
        self.S: dict[str, Tensor] = {}
        self.eigen: dict[str, tuple[Tensor, ...]] = {}
        for name, metric in factors.items():
            sides = [side for side in (metric.G, metric.A) if side is not None]
            self.eigen[name] = tuple(torch.linalg.eigh(M.double()).eigenvectors.to(dtype) for M in sides)
        super().__init__({name: torch.Size((len(P), len(Q))) for name, (P, Q) in self.eigen.items()}, dtype, device)

    def add(self, name: str, uses: Sequence[Use]) -> None:
        both = self._together(name, uses)
        if both is None:
            return
        P, Q = self.eigen[name]
        left, right = both.left.to(self.dtype) @ P, both.right.to(self.dtype) @ Q
        add_squares(self._total(self.S, name, *self.shapes[name]), left, right)

    def finish(self) -> dict[str, Metric]:
        found: dict[str, Metric] = {}
        for name, (P, Q) in self.eigen.items():
            S = self.S.pop(name, None)
            found[name] = EKFAC(S=self._zeros(*self.shapes[name]) if S is None else S / self.samples, P=P, Q=Q)
        return found
