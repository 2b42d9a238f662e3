"""Each task's curvature: a symmetric positive semi-definite operator D -> HD on the weights of one layer.

A metric knows its own product (`apply`) and its restriction SᵀHS to two kinds of subspace: all pairs u_i v_jᵀ
(`on_tensor_product`) and the atoms u_i v_iᵀ (`on_tagged`). All restrictions are exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from epimer.geometry.checks import check_wide_factor, is_symmetric, negative_entries, not_finite, not_psd
from epimer.geometry.diagonal import TaggedDiagonal, TensorProductDiagonal, project_diagonal
from epimer.geometry.kinds import SERVES
from epimer.geometry.kronecker import Factor, Formed, KroneckerSum
from epimer.geometry.linalg import mean_of, null_share, sandwich
from epimer.geometry.operator import Dense, Elementwise, OuterSum, SubspaceOperator

if TYPE_CHECKING:
    from epimer.geometry.subspace import Tagged


class Metric(ABC):
    """One task's curvature on one layer."""

    kind: str
    serves: ClassVar[tuple[str, ...]] = ()
    """kinds of curvature that a method must accept to accept this one too"""
    symmetric: ClassVar[tuple[str, ...]] = ()
    """fields that are symmetric matrices, of which a file holds one triangle"""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        SERVES[cls.kind] = cls.serves

    @abstractmethod
    def apply(self, D_mn: Tensor) -> Tensor:
        """Return HD."""

    def energy(self, D_mn: Tensor) -> float:
        """Return DᵀHD."""
        return max(0.0, self.products(D_mn)[0])

    def products(self, D_mn: Tensor, *others: Tensor) -> list[float]:
        """Return DᵀHD, and DᵀHX for every other X."""
        image = self.apply(D_mn)
        return [float((X * image).double().sum()) for X in (D_mn, *others)]

    def known_projection(self, D_mn: Tensor, U: Tensor, V: Tensor) -> Tensor | None:
        """Return UᵀDV if it was computed on the way to the restriction on these U and V, else None."""
        return None

    def energy_outside(self, D_mn: Tensor, c: Tensor, atoms: Tagged) -> float:
        """Return the energy of D - U diag(c) Vᵀ, what the atoms leave of D."""
        return self.energy(D_mn - atoms.lift_atoms(c))

    @abstractmethod
    def on_tensor_product(self, U: Tensor | None, V: Tensor | None) -> SubspaceOperator:
        """Return X -> Uᵀ H(U X Vᵀ) V; None for U and V is the identity, so the full space."""

    @abstractmethod
    def on_tagged(self, atoms: Tagged, tolerance: float) -> SubspaceOperator:
        """Return SᵀHS on the span of atoms; `tolerance` allows an approximate start of its solves."""

    @abstractmethod
    def to(self, device: torch.device, dtype: torch.dtype) -> Metric:
        """Return the metric with its tensors on `device` in `dtype`."""

    def problem(self, shape: Sequence[int]) -> str | None:
        """Return what is wrong with this metric for a layer of `shape`, or None."""
        return None

    def misfit(self) -> str | None:
        """Return which of its tensors do not fit together, by their shapes alone, or None."""
        return None


def _on_atoms(H_pp: Tensor, atoms: Tagged) -> Dense:
    """Return p x p curvature of atoms, computed in their precision, in orthonormal coordinates."""
    return Dense(atoms.orthonormal(H_pp.double()), null_share(atoms.U.dtype))


def _symmetric(M: Tensor) -> Tensor:
    return 0.5 * (M + M.T)


@dataclass(frozen=True)
class Identity(Metric):
    """H = I: a flat landscape."""

    kind = "identity"

    def apply(self, D_mn: Tensor) -> Tensor:
        return D_mn

    def on_tensor_product(self, U: Tensor | None, V: Tensor | None) -> SubspaceOperator:
        return Elementwise(torch.ones((), device=None if U is None else U.device))

    def on_tagged(self, atoms: Tagged, tolerance: float) -> SubspaceOperator:
        return Elementwise(torch.ones((), device=atoms.U.device))

    def to(self, device: torch.device, dtype: torch.dtype) -> Identity:
        return self


@dataclass(frozen=True)
class Diagonal(Metric):
    """H = diag(F), F >= 0 of the layer's shape: squared gradients, or Adam's second moments."""

    F: Tensor
    kind = "diagonal"

    def apply(self, D_mn: Tensor) -> Tensor:
        return self.F * D_mn

    def on_tensor_product(self, U: Tensor | None, V: Tensor | None) -> SubspaceOperator:
        return Elementwise(self.F) if U is None or V is None else TensorProductDiagonal(((self.F, U, V),))

    def on_tagged(self, atoms: Tagged, tolerance: float) -> SubspaceOperator:
        return TaggedDiagonal(self.F, atoms, tolerance)

    def to(self, device: torch.device, dtype: torch.dtype) -> Diagonal:
        return Diagonal(self.F.to(device, dtype))

    def problem(self, shape: Sequence[int]) -> str | None:
        if tuple(self.F.shape) != tuple(shape):
            return f"F must have the tensor's shape {tuple(shape)}, got {tuple(self.F.shape)}"
        return negative_entries("F", self.F)


@dataclass(frozen=True, kw_only=True)
class Kronecker(Metric):
    """H: D -> G D A; G (m x m) acts on dimension 0 of the stored tensor, A (n x n) on dimension 1; None is I."""

    A: Tensor | None = None
    G: Tensor | None = None
    inputs: int = 1
    """the dimension of the stored tensor that the layer's inputs belong to: 1, or 0 for GPT-2's Conv1D"""
    kind = "kronecker"
    symmetric = ("A", "G")

    def apply(self, D_mn: Tensor) -> Tensor:
        image = D_mn if self.G is None else self.G @ D_mn
        return image if self.A is None else image @ self.A

    def on_tensor_product(self, U: Tensor | None, V: Tensor | None) -> SubspaceOperator:
        null = max((null_share(M.dtype) for M in (self.A, self.G) if M is not None), default=null_share(torch.float64))
        left = _whole("G", self.G) if U is None else _sandwich("G", self.G, U)
        right = _whole("A", self.A) if V is None else _sandwich("A", self.A, V)
        return KroneckerSum(((1.0, left, right),), null, entrywise=U is None and V is None)

    def on_tagged(self, atoms: Tagged, tolerance: float) -> SubspaceOperator:
        left, right = _sandwich("G", self.G, atoms.U), _sandwich("A", self.A, atoms.V)
        left = (atoms.U.T @ atoms.U).double() if left is None else left
        return _on_atoms(left * ((atoms.V.T @ atoms.V).double() if right is None else right), atoms)

    def to(self, device: torch.device, dtype: torch.dtype) -> Kronecker:
        A, G = (None if M is None else M.to(device, dtype) for M in (self.A, self.G))
        return Kronecker(A=A, G=G, inputs=self.inputs)

    def misfit(self) -> str | None:
        return _not_square(A=self.A, G=self.G)

    def problem(self, shape: Sequence[int]) -> str | None:
        if len(shape) != 2:
            return f"Kronecker factors need a matrix, the tensor has shape {tuple(shape)}"
        if self.inputs not in (0, 1):
            return f"inputs must be 0 or 1, the dimension that the inputs belong to, got {self.inputs!r}"
        for name, factor, size in (("G", self.G, shape[0]), ("A", self.A, shape[1])):
            if factor is not None and (problem := not_psd(name, factor, size, open_if_wide=True)):
                return problem
        return None


def _not_square(**matrices: Tensor | None) -> str | None:
    """Return which of some matrices is not square, or None."""
    for name, M in matrices.items():
        if M is not None and (M.dim() != 2 or M.shape[0] != M.shape[1]):
            return f"{name} must be square, got shape {tuple(M.shape)}"
    return None


def _sandwich(name: str, M: Tensor | None, U: Tensor) -> Tensor | None:
    """Return UᵀMU in float64; None for M is the identity, and so is UᵀU where the columns of U are orthonormal."""
    if M is None:
        return None
    restricted = sandwich(M, U).double()
    check_wide_factor(name, M, restricted)
    return restricted


def _whole(name: str, M: Tensor | None) -> Factor:
    """Return a factor of the full space in its own precision; an asymmetric one is made symmetric for every use."""
    if M is None:
        return None
    check_wide_factor(name, M, M)
    symmetric = is_symmetric(M)
    return M if symmetric else Formed(lambda: 0.5 * (M + M.T), mean_of(M.diagonal().double()))


@dataclass(frozen=True)
class InputGram(Metric):
    """H: D -> DA, A of the layer's inputs (AD where they are dimension 0), which is formed anew for every use."""

    form: Callable[[], Tensor]
    along: Callable[[Tensor], Tensor]
    """U -> UᵀAU, for which A need not be formed"""
    mean_diagonal: float
    dtype: torch.dtype
    inputs: int
    kind = "kronecker"

    def apply(self, D_mn: Tensor) -> Tensor:
        return D_mn @ self.form() if self.inputs else self.form() @ D_mn

    def on_tensor_product(self, U: Tensor | None, V: Tensor | None) -> SubspaceOperator:
        basis = V if self.inputs else U
        factor = Formed(self.form, self.mean_diagonal) if basis is None else self.along(basis).double()
        term = (1.0, None, factor) if self.inputs else (1.0, factor, None)
        return KroneckerSum((term,), null_share(self.dtype), entrywise=basis is None)

    def on_tagged(self, atoms: Tagged, tolerance: float) -> SubspaceOperator:
        inputs, outputs = (atoms.V, atoms.U) if self.inputs else (atoms.U, atoms.V)
        return _on_atoms((outputs.T @ outputs).double() * self.along(inputs).double(), atoms)

    def to(self, device: torch.device, dtype: torch.dtype) -> InputGram:
        raise AssertionError("made of tensors that are where they are used")


@dataclass(frozen=True, kw_only=True)
class EKFAC(Metric):
    """Kronecker's eigenvectors with exact second moments along them (EKFAC): D -> P (S ∘ (Pᵀ D Q)) Qᵀ."""

    S: Tensor
    """m x n, none negative"""
    P: Tensor
    """m x m, orthogonal: the eigenvectors of G"""
    Q: Tensor
    """n x n, orthogonal: the eigenvectors of A"""
    kind = "ekfac"

    def apply(self, D_mn: Tensor) -> Tensor:
        return self.P @ (self.S * (self.P.T @ D_mn @ self.Q)) @ self.Q.T

    def on_tensor_product(self, U: Tensor | None, V: Tensor | None) -> SubspaceOperator:
        left = self.P.T if U is None else self.P.T @ U
        return TensorProductDiagonal(((self.S, left, self.Q.T if V is None else self.Q.T @ V),))

    def on_tagged(self, atoms: Tagged, tolerance: float) -> SubspaceOperator:
        U, V = self.P.T @ atoms.U, self.Q.T @ atoms.V
        return _on_atoms(project_diagonal(self.S.to(atoms.U.dtype), U, V), atoms)

    def to(self, device: torch.device, dtype: torch.dtype) -> EKFAC:
        return EKFAC(S=self.S.to(device, dtype), P=self.P.to(device, dtype), Q=self.Q.to(device, dtype))

    def misfit(self) -> str | None:
        if (problem := _not_square(P=self.P, Q=self.Q)) or self.S.shape == (len(self.P), len(self.Q)):
            return problem
        return f"S must be {len(self.P)} x {len(self.Q)}, as P and Q say, got shape {tuple(self.S.shape)}"

    def problem(self, shape: Sequence[int]) -> str | None:
        if len(shape) != 2 or tuple(self.S.shape) != tuple(shape):
            return f"S must have the shape of the tensor's matrix {tuple(shape)}, got {tuple(self.S.shape)}"
        if problem := negative_entries("S", self.S):
            return problem
        for name, E, size in (("P", self.P, shape[0]), ("Q", self.Q, shape[1])):
            if tuple(E.shape) != (size, size) or not_finite(name, E):
                return f"{name} must be a finite {size} x {size} matrix, got shape {tuple(E.shape)}"
            z = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(E.device)
            E64 = E.double()
            if float((E64 @ (E64.T @ z) - z).abs().max()) > 1e-3:
                return f"{name} must be orthogonal"
        return None


@dataclass(frozen=True, kw_only=True)
class Samples(Metric):
    """H = (1/N) Σ_n s_n s_nᵀ with per-sample gradients s_n = Σ_tokens g xᵀ; g [N, tokens, m], x [N, tokens, n]."""

    g: Tensor
    x: Tensor
    kind = "samples"

    def apply(self, D_mn: Tensor) -> Tensor:
        return self.on_tensor_product(None, None).apply(D_mn.double()).to(D_mn.dtype)

    def products(self, D_mn: Tensor, *others: Tensor) -> list[float]:
        along = [torch.einsum("ntm,mk,ntk->n", self.g, X.to(self.g), self.x).double() for X in (D_mn, *others)]
        return [float(along[0] @ each) / len(self.g) for each in along]

    def on_tensor_product(self, U: Tensor | None, V: Tensor | None) -> SubspaceOperator:
        g = self.g if U is None else self.g @ U
        return OuterSum(((1.0, g, self.x if V is None else self.x @ V),))

    def on_tagged(self, atoms: Tagged, tolerance: float) -> SubspaceOperator:
        s_np = ((self.g @ atoms.U) * (self.x @ atoms.V)).sum(dim=1).double()
        return _on_atoms(s_np.T @ s_np / len(s_np), atoms)

    def to(self, device: torch.device, dtype: torch.dtype) -> Samples:
        return Samples(g=self.g.to(device, dtype), x=self.x.to(device, dtype))

    def misfit(self) -> str | None:
        g, x = tuple(self.g.shape), tuple(self.x.shape)
        fit = len(g) == len(x) == 3 and g[:2] == x[:2] and g[0] > 0
        return None if fit else f"g and x must have shapes [N, tokens, m] and [N, tokens, n], got {g} and {x}"

    def problem(self, shape: Sequence[int]) -> str | None:
        if len(shape) != 2:
            return f"samples need a matrix, the tensor has shape {tuple(shape)}"
        (m, n), g, x = shape, tuple(self.g.shape), tuple(self.x.shape)
        if not g or not g[0] or g != (*g[:2], m) or x != (*g[:2], n):
            return f"g and x must have shapes [N, tokens, {m}] and [N, tokens, {n}], got {g} and {x}"
        return not_finite("g", self.g) or not_finite("x", self.x)


@dataclass(frozen=True)
class TaskGram(Metric):
    """A = DᵀD and G = DDᵀ of the task vector itself: curvature without data. Neither is formed on a subspace."""

    D: Tensor
    kind = "task-gram"
    _known: list[tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor], Tensor | None]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """the last U and V, the factors projected on them, and UᵀDV: a merge and a diagnosis use them more than once"""

    def apply(self, D_mn: Tensor) -> Tensor:
        D = self.D.double()  # a product of five task vectors leaves float32
        return D @ (D.T @ D_mn.double() @ D.T) @ D

    def products(self, D_mn: Tensor, *others: Tensor) -> list[float]:
        size = float(torch.linalg.vector_norm(self.D.double()))
        D = self.D / size if size else self.D  # a product of three task vectors would leave float32
        steps = [X.to(D.dtype).T for X in (D_mn, *others)]
        images = [(D @ step) @ D if D.shape[0] <= D.shape[1] else D @ (step @ D) for step in steps]
        return [size**4 * float((images[0] * image).sum(dtype=torch.float64)) for image in images]

    def on_tensor_product(self, U: Tensor | None, V: Tensor | None) -> SubspaceOperator:
        left, right = self.factors(U, V)
        return KroneckerSum(((1.0, left, right),), null_share(self.D.dtype))

    def on_tagged(self, atoms: Tagged, tolerance: float) -> SubspaceOperator:
        left, right = self.factors(atoms.U, atoms.V)
        return _on_atoms(left.double() * right.double(), atoms)

    def known_projection(self, D_mn: Tensor, U: Tensor, V: Tensor) -> Tensor | None:
        for left, right, _, projection in self._known:
            if D_mn is self.D and left is U and right is V:
                return projection
        return None

    def factors(self, U: Tensor | None, V: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return UᵀDDᵀU and VᵀDᵀDV, in float64; of one task vector, or of a stack of them with stacks of U and V."""
        for left, right, factors, _ in self._known:
            if left is U and right is V:
                return factors
        left_pn = self.D if U is None else U.mT @ self.D
        right_mp = self.D if V is None else self.D @ V
        projection = None if U is None or V is None else (left_pn @ V).double()
        size = torch.linalg.vector_norm(left_pn, dim=(-2, -1), keepdim=True, dtype=torch.float64)
        size = torch.where(size > 0, size, 1.0)  # by which squares stay within float32
        left_pn, right_mp = left_pn / size.to(left_pn.dtype), right_mp / size.to(right_mp.dtype)
        factors = (left_pn @ left_pn.mT).double() * size**2, (right_mp.mT @ right_mp).double() * size**2
        self._known[:] = [(U, V, factors, projection)]
        return factors

    def energy_outside(self, D_mn: Tensor, c: Tensor, atoms: Tagged) -> float:
        """Return ‖D (D - L)ᵀ D‖² for L = U diag(c) Vᵀ, from Gram matrices where D is the task vector itself.

        With K = DᵀD it is tr K³ - 2 Σ c_i u_iᵀDK²v_i + cᵀ(UᵀDDᵀU ∘ VᵀKV)c: less arithmetic where D is not square.
        """
        size = float(torch.linalg.vector_norm(self.D.double()))
        if D_mn is not self.D or size == 0 or max(D_mn.shape) < 2 * min(D_mn.shape):
            return super().energy_outside(D_mn, c, atoms)
        D, U, V = self.D / size, atoms.U, atoms.V
        if D.shape[0] < D.shape[1]:
            D, U, V = D.T, V, U
        K = D.T @ D
        K2 = K @ K
        whole = float((K2 * K).sum(dtype=torch.float64))
        crossed = ((D.T @ U) * (K2 @ V)).double().sum(0) @ c.double() / size
        left, right = self.factors(atoms.U, atoms.V)
        inside = float(c.double() @ (left * right) @ c.double()) / size**6
        outside = whole - 2 * float(crossed) + inside
        floor = 1e-4 if D.dtype == torch.float32 else 1e-12
        return size**6 * outside if outside > floor * whole else super().energy_outside(D_mn, c, atoms)

    def to(self, device: torch.device, dtype: torch.dtype) -> TaskGram:
        return TaskGram(self.D.to(device, dtype))


@dataclass(frozen=True, kw_only=True)
class Projected(Metric):
    """Curvature already in the coordinates of a basis: H (p x p), or factors G = UᵀGU and A = VᵀAV.

    What lies outside the basis is unknown, so R_S and the bound are None.
    """

    H: Tensor | None = None
    A: Tensor | None = None
    G: Tensor | None = None
    basis: object = None
    """the Subspace it was projected on; may be left to the merge's own `basis=`"""
    inputs: int = 1
    """the dimension of the stored tensor that the layer's inputs belong to"""
    kind = "projected"
    symmetric = ("H", "A", "G")

    def apply(self, D_mn: Tensor) -> Tensor:
        raise AssertionError("projected curvature has no product in the full space")

    def on_tensor_product(self, U: Tensor | None, V: Tensor | None) -> SubspaceOperator:
        assert self.H is None
        factors = Kronecker(A=self.A, G=self.G).on_tensor_product(None, None)
        assert isinstance(factors, KroneckerSum)
        return replace(factors, entrywise=False)  # projections are rounded relative to the whole curvature

    def on_tagged(self, atoms: Tagged, tolerance: float) -> SubspaceOperator:
        if self.H is not None:
            return Dense(self.H.double(), null_share(self.H.dtype))
        left = atoms.U.T @ atoms.U if self.G is None else self.G
        right = atoms.V.T @ atoms.V if self.A is None else self.A
        return _on_atoms(left.double() * right.double(), atoms)

    def to(self, device: torch.device, dtype: torch.dtype) -> Projected:
        H, A, G = (None if M is None else _symmetric(M.to(device, dtype)) for M in (self.H, self.A, self.G))
        return Projected(H=H, A=A, G=G, basis=self.basis, inputs=self.inputs)

    def misfit(self) -> str | None:
        if (self.H is None) == (self.A is None and self.G is None):
            return "give either H, or A and G"
        return _not_square(H=self.H, A=self.A, G=self.G)

    def problem(self, shape: Sequence[int]) -> str | None:
        """Check the matrices themselves; whether their sizes fit the basis is checked where it is known."""
        if misfit := self.misfit():
            return misfit
        for name, M in (("H", self.H), ("A", self.A), ("G", self.G)):
            if M is not None and (problem := not_psd(name, M, None)):
                return problem
        return None


Corrected = EKFAC  # an older name of the class, kept for those who import it
