"""The subspaces a merge is solved in: the full space, the tagged atoms u_i v_iᵀ, or all pairs u_i v_jᵀ.

Every subspace is orthonormal in the Frobenius inner product: SᵀS = I.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from epimer.geometry.decompositions import eigh, thin_svd
from epimer.geometry.linalg import (
    NEARLY_SQUARE,
    NULL,
    Polar,
    atom_coefficients,
    column_basis,
    gram,
    newton_schulz_polar,
    polar,
    squared_norm,
    stack_gram,
    sum_of_atoms,
)
from epimer.geometry.metric import Metric
from epimer.geometry.operator import Dense, SubspaceOperator
from epimer.geometry.svd import SVD_TOLERANCE, Svd, top_svd, top_svds

BASIS_TOLERANCE = 2 * SVD_TOLERANCE  # error of a whitened basis
CROWDED_TOLERANCE = 1e-4  # of the SVDs of a nearly square stack, which has a weak direction by chance alone
SHARPEST = 1e-5  # error below which a sharper search is not worth it: SVDs are taken exactly
DISTINCT, COPIES = 0.98, 0.998  # cosine up to which task vectors count as distinct, and from which on as copies
PENALTY = 0.5  # of the directions in which two copies differ, as a singular value of their stack
FAINT_ATOMS = 0.1  # of 1 / tasks: atoms whose Gram matrix has eigenvalues below this are softened


def clamp_rank(shape: Sequence[int], tasks: int, rank: int | None) -> int:
    """Return the directions per task: `rank`, but at most floor(min(m, n) / T), so that U and V can be orthonormal."""
    ceiling = min(shape) // tasks
    return ceiling if rank is None else min(rank, ceiling)


class Subspace(ABC):
    """A linear subspace of one layer's weights, with orthonormal coordinates."""

    @abstractmethod
    def project(self, D: Tensor) -> Tensor:
        """Return the coordinates Sᵀ vec(D), in float64."""

    def project_task(self, D: Tensor, metric: Metric) -> Tensor:
        """Return the coordinates of a task vector, from its metric where that has computed them already."""
        return self.project(D)

    @abstractmethod
    def lift(self, x: Tensor) -> Tensor:
        """Return the layer-shaped S x."""

    @abstractmethod
    def restrict(self, metric: Metric, tolerance: float = 0.0) -> SubspaceOperator:
        """Return SᵀHS; `tolerance` allows a shortcut where one exists (a diagonal on tagged atoms)."""

    @property
    def coordinates_per_dimension(self) -> float:
        """Number of coordinates / trace(SᵀS): 1 for an orthonormal basis, more if it has softened directions."""
        return 1.0


@dataclass(frozen=True)
class Full(Subspace):
    """The full space: S = I, coordinates of the layer's own shape."""

    dtype: torch.dtype = torch.float32

    def project(self, D: Tensor) -> Tensor:
        return D.double()

    def lift(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def restrict(self, metric: Metric, tolerance: float = 0.0) -> SubspaceOperator:
        return metric.on_tensor_product(None, None)


@dataclass(frozen=True)
class Tagged(Subspace):
    """The paper's basis: atoms u_i v_iᵀ, each owned by the task whose SVD gave it.

    If the stacked factors are rank-deficient (copied models, a zero task vector) or regularised (near-copies), the
    columns of U and V are not orthonormal, and `mix` (p x q) gives orthogonal directions: Σ_i mix_ij u_i v_iᵀ is
    direction j. Its length is 1, and less for a *softened* direction, one in which near-copies differ. A softened
    direction of length f contributes f² times to a merge, so that it enters continuously as copies come apart.
    """

    U: Tensor
    V: Tensor
    sigma: Tensor
    """singular value of each atom in its owner's task vector"""
    owner: Tensor
    """index of the task that owns each atom"""
    mix: Tensor | None = None
    near_copies: tuple[tuple[int, int], ...] = ()
    """pairs of tasks that were regularised because their leading parts are nearly equal"""

    @property
    def rank(self) -> int:
        """Directions per task; the most, where tasks differ."""
        return int(self.owner.bincount().max()) if self.owner.numel() else 0

    @cached_property
    def coordinates_per_dimension(self) -> float:
        if self.mix is None or not self.mix.numel():
            return 1.0
        inner_pp = gram(self.U.double()) * gram(self.V.double())
        return self.mix.shape[1] / float(((inner_pp @ self.mix) * self.mix).sum())

    @cached_property
    def squares(self) -> Tensor:
        """Σ_i (u_i v_iᵀ)², entry by entry: what a diagonal's trace on the atoms weights its entries with."""
        return self.U.square() @ self.V.square().T

    def project(self, D: Tensor) -> Tensor:
        raw = atom_coefficients(D, self.U, self.V).double()
        return raw if self.mix is None else self.mix.T @ raw

    def lift(self, x: Tensor) -> Tensor:
        return self.lift_atoms(x if self.mix is None else self.mix @ x)

    def lift_atoms(self, c: Tensor) -> Tensor:
        """Return U diag(c) Vᵀ for one coefficient per atom, before `mix`."""
        return sum_of_atoms(c, self.U, self.V)

    def to(self, like: Tensor) -> Tagged:
        """Return the basis on the device and in the precision of `like`."""
        mix = None if self.mix is None else self.mix.to(like.device)
        owner = self.owner.to(like.device)
        return Tagged(self.U.to(like), self.V.to(like), self.sigma.to(like), owner, mix, self.near_copies)

    def restrict(self, metric: Metric, tolerance: float = 0.0) -> SubspaceOperator:
        return metric.on_tagged(self, tolerance)

    def orthonormal(self, H_pp: Tensor) -> Tensor:
        """Return a matrix on the atoms' coefficients in the coordinates that `mix` makes orthonormal."""
        return H_pp if self.mix is None else self.mix.T @ H_pp @ self.mix


@dataclass(frozen=True)
class TensorProduct(Subspace):
    """The span of all pairs u_i v_jᵀ: coordinates X (p x q), lift U X Vᵀ. It contains the tagged subspace.

    The columns of U and V are orthogonal, of length 1 and less for directions in which near-copies differ (`Tagged`).
    """

    U: Tensor
    V: Tensor
    atoms: Tagged
    """the tagged basis that U and V belong to"""

    @property
    def rank(self) -> int:
        """Directions per task; the most, where tasks differ."""
        return self.atoms.rank

    def orthonormalized(self) -> TensorProduct:
        """Return the same space with directions of length 1."""
        if self.atoms.mix is None:
            return self
        U, V = (X / torch.linalg.vector_norm(X, dim=0) for X in (self.U, self.V))
        return replace(self, U=U, V=V)

    @cached_property
    def coordinates_per_dimension(self) -> float:
        if self.atoms.mix is None or not self.U.numel() or not self.V.numel():
            return 1.0
        return self.U.shape[1] * self.V.shape[1] / (squared_norm(self.U) * squared_norm(self.V))

    def project(self, D: Tensor) -> Tensor:
        return (self.U.T @ D @ self.V).double()

    def project_task(self, D: Tensor, metric: Metric) -> Tensor:
        known = metric.known_projection(D, self.U, self.V)
        return self.project(D) if known is None else known

    def lift(self, x: Tensor) -> Tensor:
        return self.U @ x.to(self.U.dtype) @ self.V.T

    def to(self, like: Tensor) -> TensorProduct:
        """Return the basis on the device and in the precision of `like`."""
        return TensorProduct(self.U.to(like), self.V.to(like), self.atoms.to(like))

    def restrict(self, metric: Metric, tolerance: float = 0.0) -> SubspaceOperator:
        return metric.on_tensor_product(self.U, self.V)


@dataclass(frozen=True)
class Span(Subspace):
    """The span of explicit orthonormal directions S (p x m x n)."""

    S: Tensor

    def project(self, D: Tensor) -> Tensor:
        return (self.S.flatten(1) @ D.flatten()).double()

    def lift(self, x: Tensor) -> Tensor:
        return torch.tensordot(x.to(self.S.dtype), self.S, dims=1)

    def restrict(self, metric: Metric, tolerance: float = 0.0) -> SubspaceOperator:
        images = [metric.apply(direction).flatten() for direction in self.S]
        flat = self.S.flatten(1)
        return Dense((flat @ torch.stack(images, dim=1) if images else flat @ flat.T).double())


def tagged(deltas: Sequence[Tensor], rank: int, *, regularize: bool = True) -> Tagged:
    """Return the tagged basis: each task's top-`rank` SVD, factors stacked, each side replaced by its polar factor.

    `regularize` treats near-copies so that the basis depends continuously on the task vectors (see `whiten`).
    """
    return tagged_with_triples(deltas, rank, regularize=regularize)[0]


def tagged_with_triples(deltas: Sequence[Tensor], rank: int, *, regularize: bool = True) -> tuple[Tagged, list[Svd]]:
    """Return the tagged basis and every task's leading singular triples, which it is built from.

    Whitening magnifies errors where the stack is near-singular (near-duplicate models, or as many directions as there
    are); then the SVDs are taken more sharply, or exactly. Where that can be told beforehand, they are sharper at once.
    """
    tolerance = _first_tolerance(deltas, rank)
    while True:
        triples, errors = top_svds(deltas, rank, tolerance)
        atoms, bearable = whiten(triples, regularize=regularize)
        if max(errors, default=0.0) <= bearable:
            return atoms, triples
        tolerance = bearable / 2 if bearable > SHARPEST else 0.0


def _first_tolerance(deltas: Sequence[Tensor], rank: int) -> float:
    crowded = rank * len(deltas) > NEARLY_SQUARE * min(deltas[0].shape)
    return CROWDED_TOLERANCE if crowded else SVD_TOLERANCE


def tagged_of_layers(layers: Sequence[Sequence[Tensor]], rank: int) -> list[Tagged | None]:
    """Return the tagged bases of several layers of one shape, found at once: a GPU is fast on many matrices only.

    Those that need sharper singular vectors are searched once more. None stands for a layer whose singular vectors are
    near-singular as a stack, or copies: it needs more care.
    """
    found: list[Tagged | None] = [None] * len(layers)
    tolerance, pending = _first_tolerance(layers[0], rank), list(range(len(layers)))
    while pending:
        bases = _tagged_within(tolerance, [layers[i] for i in pending], rank)
        sharper = {}
        for i, (atoms, error, bearable) in zip(pending, bases, strict=True):
            if error <= bearable:
                found[i] = atoms
            elif bearable > SHARPEST:
                sharper[i] = bearable
        pending, before = list(sharper), tolerance
        tolerance = min((before, *sharper.values()))
        if tolerance == before:  # what is left did not get sharper
            break
    return found


def _tagged_within(
    tolerance: float, layers: Sequence[Sequence[Tensor]], rank: int
) -> list[tuple[Tagged | None, float, float]]:
    """Return every layer's tagged basis, the error of its singular vectors, and the error that it bears.

    Copies and what is near-singular bear none.
    """
    tasks = len(layers[0])
    triples, errors = top_svds([D for deltas in layers for D in deltas], rank, tolerance)
    if any(len(triple.sigma) < rank for triple in triples):
        return [(None, math.inf, 0.0)] * len(layers)
    by_layer = [triples[start : start + tasks] for start in range(0, len(triples), tasks)]
    left, right = (
        torch.stack([torch.cat([triple[side] for triple in one], dim=1) for one in by_layer]) for side in (0, 2)
    )
    sigma = torch.stack([torch.cat([triple.sigma for triple in one]) for one in by_layer])
    owner = torch.arange(tasks, device=sigma.device).repeat_interleave(rank)
    nearest = _cosines(gram(left), gram(right), sigma, owner).amax((-2, -1)).tolist()
    (U, above), (V, below) = newton_schulz_polar(left), newton_schulz_polar(right)
    found: list[tuple[Tagged | None, float, float]] = []
    for i, near in enumerate(nearest):
        amplification = max(above[i], below[i])
        bearable = BASIS_TOLERANCE / amplification if amplification else math.inf
        error = max(errors[i * tasks : (i + 1) * tasks]) if near <= DISTINCT else math.inf
        found.append((Tagged(U[i], V[i], sigma[i], owner), error, bearable if near <= DISTINCT else 0.0))
    return found


def whiten(triples: Sequence[Svd], rank: int | None = None, *, regularize: bool = True) -> tuple[Tagged, float]:
    """Return the tagged basis of the first `rank` triples of every task, and the error of theirs that it bears.

    The polar factor X(XᵀX)^(-1/2) of a stack X gives every direction the same length, also one in which two copies of
    a model differ by next to nothing. With `regularize`, pairs of tasks whose leading parts have a cosine above
    `DISTINCT` get X(XᵀX + BᵀB)^(-1/2) instead: rows of B (`_difference_rows`) penalise the directions in which the two
    differ, increasingly up to a cosine of `COPIES`. Other tasks keep the polar factor.
    """
    triples = [Svd(U[:, :rank], sigma[:rank], V[:, :rank]) for U, sigma, V in triples]
    stacks = [torch.cat([triple[side] for triple in triples], dim=1) for side in (0, 2)]
    grams = [stack_gram(X) for X in stacks]
    sigma = torch.cat([triple.sigma for triple in triples])
    owner = torch.cat([torch.full((len(triple.sigma),), t) for t, triple in enumerate(triples)]).to(sigma.device)
    near_copies = _near_copies(_cosines(grams[0], grams[1], sigma, owner)) if regularize else {}
    left, right = (_regularized_polar(stacks.pop(0), grams.pop(0), owner, near_copies) for _ in range(2))
    mix = None
    if near_copies or not (left.full_rank and right.full_rank):
        inner = gram(left.factor.double())  # one after the other, so that only one is widened
        values, vectors = eigh(inner.mul_(gram(right.factor.double())))
        is_double = left.factor.dtype == torch.float64
        kept = values > (NULL if is_double else 1e-5) * values[-1]
        # T copies share one direction, whose eigenvalue is 1 / T; smaller ones are differences between near-copies
        softest = FAINT_ATOMS / len(triples) if regularize else 0.0
        mix = vectors[:, kept] * values[kept].clamp_min(softest).rsqrt()
    atoms = Tagged(left.factor, right.factor, sigma, owner, mix, tuple(near_copies))
    amplification = max(left.amplification, right.amplification)
    allowed = BASIS_TOLERANCE / amplification if amplification else math.inf
    return atoms, min(left.bearable, right.bearable, allowed)


def _near_copies(cosines: Tensor) -> dict[tuple[int, int], float]:
    """Return the pairs of tasks with a cosine above `DISTINCT`, each with its share of the way to `COPIES`."""
    pairs = {}
    for i, j in (cosines.triu(1) > DISTINCT).nonzero().tolist():
        pairs[i, j] = min(1.0, (float(cosines[i, j]) - DISTINCT) / (COPIES - DISTINCT))
    return pairs


def _regularized_polar(
    X_mp: Tensor, inner_pp: Tensor, owner: Tensor, near_copies: Mapping[tuple[int, int], float]
) -> Polar:
    """Return X(XᵀX + BᵀB)^(-1/2): the first m rows of the polar factor of [X; B]."""
    if not near_copies:
        return polar(X_mp, inner_pp)
    rows = [
        _difference_rows(inner_pp, (owner == i).nonzero()[:, 0], (owner == j).nonzero()[:, 0], strength)
        for (i, j), strength in near_copies.items()
    ]
    B = torch.cat(rows)
    whole = polar(torch.cat([X_mp, B.to(X_mp.dtype)]), inner_pp + (B.T @ B).to(inner_pp.dtype))
    return whole._replace(factor=whole.factor[: len(X_mp)].clone())


def _difference_rows(inner_pp: Tensor, first: Tensor, second: Tensor, strength: float) -> Tensor:
    """Return one row per direction in which two tasks nearly agree, along the difference of their columns.

    With the SVD A diag(s) Bᵀ of U_iᵀU_j, the combinations U_i a_r and U_j b_r have cosine s_r, and their difference
    along (a_r, -b_r) / √2 the squared length 1 - s_r in the stack. Row r is that vector times √π_r. Copies get the
    penalty π = `PENALTY`² s, which leaves the length f = √((1 - s) / (1 - s + π)) in the polar factor. Below a
    `strength` of 1 it leaves 1 - strength (1 - f), so that the factor does not change suddenly where strength does.
    """
    A, s, B = thin_svd(inner_pp[first][:, second].double())
    gap = (1 - s).clamp_min(1e-30)  # of copies it is 0, and divided by
    shortest = (gap / (gap + PENALTY**2 * s)).sqrt()
    length = 1 - strength * (1 - shortest)
    weight = (gap * (1 / length.square() - 1) / 2).sqrt()
    rows = torch.zeros(len(s), len(inner_pp), dtype=torch.float64, device=inner_pp.device)
    rows[:, first] = (weight * A).T
    rows[:, second] = -weight[:, None] * B
    return rows


def _cosines(left: Tensor, right: Tensor, sigma: Tensor, owner: Tensor) -> Tensor:
    """Return the cosines between the tasks' leading parts U diag(σ) Vᵀ, from UᵀU and VᵀV; 0 on the diagonal.

    Of one layer (p x p and p), or of several at once.
    """
    tasks = int(owner.max()) + 1 if len(owner) else 1
    owned = torch.nn.functional.one_hot(owner, tasks) * sigma.double().unsqueeze(-1)  # p x T
    inner = owned.mT @ (left.double() * right.double()) @ owned
    norms = inner.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    cosines = inner / (norms.unsqueeze(-1) * norms.unsqueeze(-2)).clamp_min(torch.finfo(inner.dtype).tiny)
    cosines.diagonal(dim1=-2, dim2=-1).zero_()
    return cosines


def tensor_product(atoms: Tagged) -> TensorProduct:
    """Return the span of all pairs u_i v_jᵀ of a tagged basis's singular vectors.

    Singular vectors that are not orthonormal are replaced by orthogonal ones with their singular values as lengths.
    """
    if atoms.mix is None:
        return TensorProduct(atoms.U, atoms.V, atoms)
    return TensorProduct(column_basis(atoms.U), column_basis(atoms.V), atoms)


def joint(deltas: Sequence[Tensor], rank: int) -> Span:
    """Return the paper's case 4: the top-`rank` left singular subspace of [vec D_1 … vec D_T], of rank T at most."""
    stacked = torch.stack([D.flatten() for D in deltas], dim=1)
    directions = top_svd(stacked, rank).U
    return Span(directions.T.reshape(-1, *deltas[0].shape))


Basis = Tagged | TensorProduct
"""a basis that can be built before a merge, stored, and passed to it"""


def owned_by(basis: Basis, tasks: Sequence[int]) -> Basis | None:
    """Return a basis with its owners counted among `tasks` (ascending); None where another task owns an atom."""
    atoms = atoms_of(basis)
    known = torch.tensor(list(tasks), device=atoms.owner.device)
    if not torch.isin(atoms.owner, known).all():
        return None
    atoms = replace(atoms, owner=torch.searchsorted(known, atoms.owner))
    return replace(basis, atoms=atoms) if isinstance(basis, TensorProduct) else atoms


def atoms_of(basis: Basis) -> Tagged:
    """Return the tagged atoms of a basis."""
    return basis.atoms if isinstance(basis, TensorProduct) else basis


def basis_problem(basis: Basis) -> str | None:
    """Return which tensors of a basis do not fit together, by their shapes and dtypes alone, or None."""
    atoms = atoms_of(basis)
    count = len(atoms.sigma) if atoms.sigma.dim() else 0
    sides = {"U": atoms.U, "V": atoms.V, "sigma": atoms.sigma, "mix": atoms.mix}
    if isinstance(basis, TensorProduct):
        sides |= {"left": basis.U, "right": basis.V}
    for name, M in sides.items():
        if M is not None and not M.is_floating_point():
            return f"{name} is {M.dtype}, expected floats"
        if M is not None and M.dim() != (1 if name == "sigma" else 2):
            return f"{name} has shape {tuple(M.shape)}, expected a {'vector' if name == 'sigma' else 'matrix'}"
    if atoms.owner.dtype != torch.int64 or atoms.owner.shape != (count,):
        return f"owner is {atoms.owner.dtype} of shape {tuple(atoms.owner.shape)}, expected {count} of torch.int64"
    if atoms.U.shape[1] != count or atoms.V.shape[1] != count:
        return f"U and V have shapes {tuple(atoms.U.shape)} and {tuple(atoms.V.shape)}, expected {count} columns each"
    if atoms.mix is not None and not (len(atoms.mix) == count >= atoms.mix.shape[1]):
        return f"mix has shape {tuple(atoms.mix.shape)}, expected {count} rows and no more columns"
    if (len(basis.U), len(basis.V)) != (len(atoms.U), len(atoms.V)):
        return f"left and right have {len(basis.U)} and {len(basis.V)} rows, expected {len(atoms.U)} and {len(atoms.V)}"
    return None


def owner_problem(owner: Tensor, tasks: int | None) -> str | None:
    """Return that an atom's owner is none of the tasks, by number, or None; `tasks` is None where it is not known."""
    lowest, highest = (int(owner.min()), int(owner.max())) if len(owner) else (0, -1)
    if lowest >= 0 and (tasks is None or highest < tasks):
        return None
    return f"owner reaches from {lowest} to {highest}, expected {'0 or more' if tasks is None else f'0 to {tasks - 1}'}"
