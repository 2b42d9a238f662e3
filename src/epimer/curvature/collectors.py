"""Sums of per-sample gradients over the data, one collector for each kind of curvature.

Every collector sums over samples and divides at the end, so that measurements of disjoint data add up. Accumulators are
in float32 or float64, whatever the model computes in.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from epimer.curvature.per_sample_gradients import OuterProducts, SampleGradients, TableRows, TokenSums
from epimer.curvature.triangles import triangle_size
from epimer.errors import CurvatureError, EpimerWarning, NumericalError, listed, warn
from epimer.geometry.decompositions import eigh
from epimer.geometry.diagonal import TaggedDiagonal
from epimer.geometry.metric import EKFAC, Diagonal, Kronecker, Metric, Projected, Samples
from epimer.geometry.subspace import Basis
from epimer.methods.rules import is_matrix
from epimer.plain_text import format_size

CHUNK = 1 << 20  # entries of a block of per-sample gradients: what a CPU's cache holds
GPU_CHUNK = 1 << 26
TILE, GPU_TILE = 512, 1024  # side of the blocks in which a symmetric product is formed
WIDEST = 16384  # longest side of a Kronecker factor; a vocabulary's would be too large
NOT_TWO_SIDED = "a table, a vector or a grouped convolution has no two-sided curvature"
ALSO_A_TABLE = "it is also used as a table, which has no two-sided curvature"


class Collector(ABC):
    """Accumulates one kind of curvature; a subclass says what it keeps of a parameter's per-sample gradients."""

    matrices_only: ClassVar[bool] = True  # whether only parameters that multiply tokens as a matrix can be measured

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        *,
        basis: Mapping[str, Basis] | None = None,
        reduce: bool = False,
    ) -> None:
        """Measure in `basis`, if any; `reduce` takes a sample's mean input and summed gradient, not its tokens."""
        self.shapes = {name: shape for name, shape in shapes.items() if len(shape) > 1 or not self.matrices_only}
        self.dtype, self.device, self.reduce = dtype, device, reduce
        self.basis: dict[str, Any] | None = None if basis is None else {name: basis[name] for name in self.shapes}
        like = torch.empty(0, dtype=dtype, device=device)
        self.projection = {name: subspace.to(like) for name, subspace in (self.basis or {}).items()}
        self.totals: dict[Hashable, Tensor] = {}  # sums over the samples so far, by keys of the subclass
        self.tokens: dict[str, int] = dict.fromkeys(self.shapes, 0)
        self.refused: dict[str, str] = {}  # parameters that this kind of curvature cannot describe, and why
        self.samples = 0
        self.unfinished: list[Callable[[], None]] = []  # what `count` could not do yet in this batch
        self.repeated = False  # whether only the labels differ from the previous pass, so that inputs are counted

    @abstractmethod
    def add(self, name: str, gradients: Sequence[SampleGradients]) -> None:
        """Add one batch: a parameter's per-sample gradients are the sum over `gradients`, one for each use."""

    @abstractmethod
    def metric(self, name: str, shape: torch.Size) -> Metric:
        """Return one parameter's curvature, the mean over all samples."""

    def numbers(self, name: str) -> int:
        """Return how many numbers are summed for one parameter."""
        return self.shapes[name].numel()

    def stored_numbers(self, name: str) -> int:
        """Return at most how many numbers are stored of one parameter; of samples without a basis for each token."""
        return self.numbers(name) if self.basis is None else int(self.basis[name].U.shape[1] ** 2)

    def warn_of_refused(self) -> None:  # noqa: B027  most kinds refuse nothing
        """Name the matrices that are too wide, of those that a merge needs, before any data is read."""

    def finish(self, names: Iterable[str]) -> dict[str, Metric]:
        """Return the curvature of those parameters that could be measured, and free their sums."""
        return {name: self.metric(name, self.shapes[name]) for name in names if name not in self.refused}

    def total(self, key: Hashable, *shape: int) -> Tensor:
        """Return the sum under a key, to add to; it starts at zero."""
        if key not in self.totals:
            self.totals[key] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self.totals[key]

    def take(self, key: Hashable, *shape: int) -> Tensor:
        """Return the final sum under a key, and free it."""
        total = self.total(key, *shape)
        del self.totals[key]
        return total

    def concatenated(self, name: str, gradients: Sequence[SampleGradients]) -> OuterProducts | None:
        """Return all uses as outer products over their tokens together; None where some use is of another kind."""
        outers = [use for use in gradients if isinstance(use, OuterProducts)]
        if len(outers) < len(gradients):
            also = outers and any(isinstance(use, TableRows) for use in gradients)
            self.refused[name] = ALSO_A_TABLE if also else NOT_TWO_SIDED
        if name in self.refused or not outers:
            return None
        if len(outers) == 1:
            return outers[0]
        left, right = torch.cat([use.left for use in outers], dim=1), torch.cat([use.right for use in outers], dim=1)
        return OuterProducts(left, right, outers[0].inputs)

    def count(
        self, name: str, gradients: Sequence[SampleGradients], then: Callable[[Tensor | None], None] = lambda mask: None
    ) -> None:
        """Count the tokens that are not padding, and call `then` with their mask over all uses, None if none is.

        This happens at the end of the batch if the mask is not known before.
        """
        pairs = [(use.output_gradients.shape[:2], use.mask) for use in gradients]

        def finish() -> None:
            known = [(shape, mask() if callable(mask) else mask) for shape, mask in pairs]
            self.tokens[name] += sum(shape.numel() if mask is None else int(mask.sum()) for shape, mask in known)
            if all(mask is None for _, mask in known):
                return then(None)
            every = [torch.ones(s, dtype=torch.bool, device=self.device) if m is None else m for s, m in known]
            return then(torch.cat(every, dim=1))

        if any(callable(mask) for _, mask in pairs):
            self.unfinished.append(finish)
        else:
            finish()

    def end_batch(self) -> None:
        """Count the tokens whose masks were not known before the batch's last backward pass."""
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            while self.unfinished:
                self.unfinished.pop(0)()


class DiagonalCollector(Collector):
    """E[(∇L)²], the square of a sample's gradient: its tokens are summed first. In a basis, SᵀHS of it."""

    matrices_only = False

    def add(self, name: str, gradients: Sequence[SampleGradients]) -> None:
        F = self.total(name, *self.shapes[name])
        if not self.repeated:
            self.count(name, gradients[:1])
        if all(isinstance(use, OuterProducts) for use in gradients):
            outer = self.concatenated(name, gradients)
            assert outer is not None
            add_squares(F.view(len(F), -1), outer.left, outer.right)
        elif all(isinstance(use, TokenSums) for use in gradients):
            parts = torch.cat([use.parts for use in gradients if isinstance(use, TokenSums)], dim=1)
            F += parts.to(self.dtype).sum(1).square().sum(0)
        elif len(gradients) == 1 and isinstance(gradients[0], TableRows):
            add_squared_rows(F, gradients[0])
        else:  # a table that is also the head: one sample at a time
            for n in range(len(gradients[0].output_gradients)):
                gradient = torch.zeros_like(F)
                for use in gradients:
                    use.add_sample(gradient, n)
                F.addcmul_(gradient, gradient)

    def metric(self, name: str, shape: torch.Size) -> Metric:
        F = self.take(name, *shape) / self.samples
        if self.basis is None:
            return Diagonal(F)
        atoms = self.projection[name]
        H = TaggedDiagonal(F.reshape(len(F), -1), atoms, 0.0).H
        return Projected(H=H.to(self.dtype), basis=self.basis[name])


def add_squares(F_mn: Tensor, left: Tensor, right: Tensor) -> None:
    """Add Σ_n (Σ_t left_nt ⊗ right_nt)² to F, a block of rows at a time in memory that is used again."""
    if left.shape[2] < right.shape[2]:
        add_squares(F_mn.T, right, left)
        return
    (N, T, m), n, dtype = left.shape, right.shape[2], F_mn.dtype
    if T == 1:
        F_mn += left[:, 0].to(dtype).square().T @ right[:, 0].to(dtype).square()
        return
    left_nmt, right = left.to(dtype).transpose(1, 2), right.to(dtype)
    rows = max(1, min(m, (CHUNK if F_mn.device.type == "cpu" else GPU_CHUNK) // (N * n)))
    buffer = torch.empty(N, rows, n, dtype=dtype, device=F_mn.device)
    for start in range(0, m, rows):
        block = left_nmt[:, start : start + rows]
        s = torch.bmm(block, right, out=buffer if block.shape[1] == rows else None)
        F_mn[start : start + rows] += s.square_().sum(0)


def add_squared_rows(F: Tensor, rows: TableRows) -> None:
    """Add the squared gradient of every sample to the rows of a table that it uses."""
    sample = torch.arange(len(rows.ids), device=rows.ids.device)[:, None] * len(F)
    keys, place = torch.unique((rows.ids + sample).flatten(), return_inverse=True)
    sums = torch.zeros(len(keys), F.shape[1], dtype=F.dtype, device=F.device)
    sums.index_add_(0, place, rows.g.flatten(0, 1).to(F.dtype))
    F.index_add_(0, keys % len(F), sums.square_())


class KroneckerCollector(Collector):
    """A from inputs and G from output gradients, or their projections UᵀGU and VᵀAV on a basis.

    expand: every token counts for itself, A = E_token[xxᵀ], G = E_sample[Σ_token ggᵀ].
    reduce: a sample is its mean input and its summed gradient, A = E[x̄x̄ᵀ], G = E[(Σg)(Σg)ᵀ].
    """

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device, **more: Any) -> None:
        super().__init__(shapes, dtype, device, **more)
        self.inputs: dict[str, int] = {}
        for name, shape in self.shapes.items():
            if self.basis is None and (widest := max(shape[0], shape[1:].numel())) > WIDEST:
                self.refused[name] = f"a factor of side {widest} is too large to keep without --basis (basis=)"

    def warn_of_refused(self) -> None:
        if not (wide := [name for name in self.refused if is_matrix(name, self.shapes[name])]):
            return
        numbers = sum(side * side for name in wide for side in self.shapes[name])
        size = f"{format_size(numbers * self.dtype.itemsize)}; they are kept at most {WIDEST} wide"
        problem = f"{listed(wide)} will have no Kronecker factors, which would take {size}"
        remedy = "measure in a basis instead: `epimer basis RECIPE BASIS`, then --basis BASIS (basis=)"
        warn(EpimerWarning(f"{problem}. Methods that need them refuse such a matrix; {remedy}."))

    def numbers(self, name: str) -> int:
        return 0 if name in self.refused else sum(side * side for side in self._sides(name))

    def stored_numbers(self, name: str) -> int:
        return 0 if name in self.refused else sum(map(triangle_size, self._sides(name)))

    def _sides(self, name: str) -> tuple[int, int]:
        """Return the widths of G and A."""
        shape, basis = self.shapes[name], None if self.basis is None else self.basis[name]
        return (shape[0], shape[1:].numel()) if basis is None else (basis.U.shape[1], basis.V.shape[1])

    def add(self, name: str, gradients: Sequence[SampleGradients]) -> None:
        outer = self.concatenated(name, gradients)
        if outer is None:
            return
        inputs = self.inputs[name] = outer.inputs
        x, g = (outer.right, outer.left) if inputs else (outer.left, outer.right)
        self._add(name, 1 - inputs, g.to(self.dtype).sum(1) if self.reduce else g.flatten(0, 1))
        if not self.repeated:
            self.count(name, gradients, lambda mask: self._add(name, inputs, self._input_rows(x, mask)))

    def _input_rows(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the tokens that are not padding, or each sample's mean over them."""
        if not self.reduce:
            return x.flatten(0, 1) if mask is None else x[mask]
        x = x.to(self.dtype)
        if mask is not None:
            x = (x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1).clamp_min(1)[:, None, None]
        return x.mean(1)

    def _add(self, name: str, side: int, rows: Tensor) -> None:
        """Add rows to the factor of dimension `side` of the stored weight."""
        rows = rows.to(self.dtype)
        if self.basis is not None:
            rows = rows @ (self.projection[name].V if side else self.projection[name].U)
        add_gram(self.total((name, side), rows.shape[1], rows.shape[1]), rows)

    def metric(self, name: str, shape: torch.Size) -> Metric:
        inputs, basis = self.inputs.get(name, 1), None if self.basis is None else self.basis[name]
        tokens = self.samples if self.reduce else max(1, self.tokens[name])
        counts = [tokens if side == inputs else self.samples for side in (0, 1)]
        G, A = (
            symmetric(self.take((name, side), size, size)).div_(counts[side])
            for side, size in enumerate(self._sides(name))
        )
        if basis is None:
            return Kronecker(A=A, G=G, inputs=inputs)
        return Projected(A=A, G=G, inputs=inputs, basis=basis)


def add_gram(total: Tensor, rows: Tensor) -> None:
    """Add rowsᵀ rows to a symmetric matrix of which only the blocks on and above the diagonal are kept."""
    size, tile = len(total), TILE if total.device.type == "cpu" else GPU_TILE
    for start in range(0, size, tile):
        stop = min(start + tile, size)
        total[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:])


def symmetric(upper: Tensor) -> Tensor:
    """Return the symmetric matrix that agrees with `upper` on and above the diagonal."""
    return upper.triu().add_(upper.triu(1).T)


class SamplesCollector(Collector):
    """Every sample's gradient, as its tokens' gradients and inputs; in a basis, E[s sᵀ] of its coordinates s."""

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device, **more: Any) -> None:
        super().__init__(shapes, dtype, device, **more)
        self.factors: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def numbers(self, name: str) -> int:
        """Return how many numbers are summed in a basis, or kept of each token without one."""
        if self.basis is None:
            return self.shapes[name][0] + self.shapes[name][1:].numel()
        return int(self.basis[name].U.shape[1] ** 2)

    def add(self, name: str, gradients: Sequence[SampleGradients]) -> None:
        outer = self.concatenated(name, gradients)
        if outer is None:
            return
        if not self.repeated:
            self.count(name, gradients)
        left, right = outer.left.to(self.dtype), outer.right.to(self.dtype)
        if self.basis is None:
            self.factors.setdefault(name, []).append((left.to("cpu", copy=True), right.to("cpu", copy=True)))
            return
        atoms = self.projection[name]
        s_np = ((left @ atoms.U) * (right @ atoms.V)).sum(1)
        if atoms.mix is not None:
            s_np = s_np @ atoms.mix.to(s_np)
        add_gram(self.total(name, s_np.shape[1], s_np.shape[1]), s_np)

    def metric(self, name: str, shape: torch.Size) -> Metric:
        if self.basis is not None:
            atoms = self.basis[name]
            size = atoms.U.shape[1] if atoms.mix is None else atoms.mix.shape[1]
            return Projected(H=symmetric(self.take(name, size, size)).div_(self.samples), basis=atoms)
        none = torch.zeros(self.samples, 1, shape[0]), torch.zeros(self.samples, 1, shape[1:].numel())
        factors = self.factors.pop(name, [none])
        left, right = (padded([pair[side] for pair in factors]).to(self.dtype) for side in (0, 1))
        # under labels='expected' a sample occurs once per class, its gradient times the root of the probability
        return Samples(g=left * math.sqrt(len(left) / self.samples), x=right)


def padded(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate [N, tokens, width] tensors along N, with zeros where they have fewer tokens."""
    tokens = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, 0, 0, tokens - part.shape[1])) for part in parts])


class EKFACCollector(Collector):
    """EKFAC's second pass: the second moments of the gradients along the eigenvectors of the Kronecker factors."""

    def __init__(self, factors: Mapping[str, Metric], dtype: torch.dtype, device: torch.device) -> None:
        self.eigenvectors: dict[str, list[Tensor]] = {}
        for name, metric in factors.items():
            assert isinstance(metric, Kronecker)
            sides = [side for side in (metric.G, metric.A) if side is not None]
            try:
                self.eigenvectors[name] = [eigh(M.double()).vectors.to(dtype) for M in sides]
            except NumericalError as error:
                raise CurvatureError(
                    f"the Kronecker factors of {name!r}: {error}; run the model in float32."
                ) from error
        shapes = {name: torch.Size((len(P), len(Q))) for name, (P, Q) in self.eigenvectors.items()}
        super().__init__(shapes, dtype, device)

    def add(self, name: str, gradients: Sequence[SampleGradients]) -> None:
        outer = self.concatenated(name, gradients)
        if outer is None:
            return
        P, Q = self.eigenvectors[name]
        left, right = outer.left.to(self.dtype) @ P, outer.right.to(self.dtype) @ Q
        add_squares(self.total(name, *self.shapes[name]), left, right)

    def metric(self, name: str, shape: torch.Size) -> Metric:
        P, Q = self.eigenvectors.pop(name)
        return EKFAC(S=self.take(name, *shape) / self.samples, P=P, Q=Q)
