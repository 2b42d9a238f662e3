"""The exact Hessian and Gauss-Newton matrix in a basis, by one product with each of its directions.

A layer's block is H̃ = SᵀHS, the second derivative of the loss along W + S x at x = 0. This is slow: it is the
reference for the approximations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from epimer.curvature.recorder import eval_mode
from epimer.errors import CurvatureError
from epimer.geometry.metric import Metric, Projected
from epimer.geometry.subspace import Tagged, TensorProduct
from epimer.progress import Progress
from epimer.tasks.batches import Batch
from epimer.tasks.labels import Labels, check_sum, logits_of, per_sample, with_logits


def projected_hessians(
    model: nn.Module,
    batches: Iterable[Batch],
    labels: Labels,
    kind: str,
    basis: Mapping[str, Tagged | TensorProduct],
    chosen: Mapping[str, Tensor],
    dtype: torch.dtype,
    progress: Progress,
) -> tuple[dict[str, Metric], int]:
    """Return each layer's H̃ of the mean loss (kind hessian) or its Gauss-Newton part (ggn), and the sample count."""
    atoms = {name: basis[name] for name in chosen}
    sums: dict[str, Tensor] = {}
    count = 0
    with eval_mode(model), sdpa_kernel(SDPBackend.MATH):  # the one implementation with second derivatives
        for batch in batches:
            targets = _targets(model, batch, labels, first=not count)
            stage = progress.begin(f"samples {count} to {count + batch.N}", len(atoms))
            for name, subspace in atoms.items():
                assert isinstance(subspace, Tagged)
                W = chosen[name].detach()
                loss = _LossAlongBasis(model, batch, targets, labels, name, W, subspace.to(W))
                H = loss.hessian() if kind == "hessian" else loss.ggn()
                sums[name] = sums[name] + H.to(dtype) if name in sums else H.to(dtype)
                stage.advance(1, name)
            count += batch.N
            labels.seen = count
    for name, H in sums.items():
        if not torch.isfinite(H).all():
            raise CurvatureError(f"the curvature of {name!r} came out as NaN or Inf; run the model in float32.")
    return {name: Projected(H=0.5 * (H + H.T) / count, basis=atoms[name]) for name, H in sums.items()}, count


class _LossAlongBasis:
    """The loss of one batch along the directions of one layer's basis."""

    def __init__(
        self, model: nn.Module, batch: Batch, targets: Any, labels: Labels, name: str, W: Tensor, atoms: Tagged
    ) -> None:
        self.model, self.batch, self.targets, self.loss_fn = model, batch, targets, labels.loss_fn
        self.name, self.W, self.atoms = name, W, atoms
        self.p = atoms.U.shape[1] if atoms.mix is None else atoms.mix.shape[1]
        self.zero = torch.zeros(self.p, dtype=W.dtype, device=W.device)

    def outputs(self, x: Tensor) -> Any:
        """Run the model at W + S x."""
        coefficients = x if self.atoms.mix is None else self.atoms.mix.to(x) @ x
        step = ((self.atoms.U * coefficients) @ self.atoms.V.T).reshape(self.W.shape)
        moved = _WithParameters(self.model, {self.name: self.W + step})
        return self.batch.run(moved)  # type: ignore[arg-type]

    def loss(self, x: Tensor) -> Tensor:
        """Return the summed loss at W + S x."""
        return per_sample(self.loss_fn(self.outputs(x), self.targets), self.batch.N).sum()

    def directions(self) -> Iterator[Tensor]:
        """Yield the unit vectors of the basis coordinates."""
        yield from torch.eye(self.p, dtype=self.zero.dtype, device=self.zero.device)

    def hessian(self) -> Tensor:
        """Return the second derivatives of the loss, by one Hessian-vector product per direction."""
        gradient = torch.func.grad(self.loss)
        return torch.stack([_derivative(gradient, self.zero, e) for e in self.directions()])

    def ggn(self) -> Tensor:
        """Return JᵀHJ, with J the Jacobian of the logits and H the Hessian of the loss in them."""
        with torch.no_grad():
            outputs = self.outputs(self.zero)
            at = logits_of(outputs)
        J = torch.stack([_derivative(lambda x: logits_of(self.outputs(x)), self.zero, e) for e in self.directions()])

        def of_logits(z: Tensor) -> Tensor:
            return per_sample(self.loss_fn(with_logits(outputs, z), self.targets), self.batch.N).sum()

        gradient = torch.func.grad(of_logits)
        HJ = torch.stack([_derivative(gradient, at, u) for u in J])
        return HJ.flatten(1) @ J.flatten(1).T


class _WithParameters:
    """A model with some of its parameters replaced, callable as the model is."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        self.model, self.tensors = model, tensors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self.model, self.tensors, args, kwargs, tie_weights=True)


def _derivative(f: Callable[[Tensor], Tensor], at: Tensor, along: Tensor) -> Tensor:
    """Return the directional derivative of f at a point."""
    try:
        return torch.func.jvp(f, (at,), (along,))[1].detach()
    except (RuntimeError, NotImplementedError) as error:
        raise CurvatureError(
            f"the model has no second derivative that torch can form ({str(error).splitlines()[0][:160]}); "
            "use attn_implementation='eager', or another kind."
        ) from error


def _targets(model: nn.Module, batch: Batch, labels: Labels, *, first: bool) -> Any:
    """Return the targets of a batch under the label policy; a Hessian is of one loss, so `expected` has none."""
    if labels.policy == "expected":
        raise CurvatureError("kinds 'hessian' and 'ggn' take labels='true' or 'model', not 'expected'.")
    with torch.no_grad():
        outputs = batch.run(model)
        if first:
            check_sum(labels.loss_fn, outputs, batch.targets, batch.N)
        for _ in labels.passes(outputs, batch.targets, batch.mask, batch.N):
            pass
    return labels.targets
