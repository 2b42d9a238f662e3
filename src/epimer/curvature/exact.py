"""The exact Hessian and Gauss-Newton matrix in a basis, by one product with each of its directions.

A layer's block is H̃ = SᵀHS, the second derivative of the loss along W + S x at x = 0. This is slow: it is the
reference for the approximations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from epimer.curvature.model_calls import eval_mode
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
    if labels.policy == "expected":  # a Hessian is of one loss
        raise CurvatureError("kinds 'hessian' and 'ggn' take labels='true' or 'model', not 'expected'.")
    second_derivatives = _hessian if kind == "hessian" else _gauss_newton
    sums: dict[str, Tensor] = {}
    count = 0
    with eval_mode(model), sdpa_kernel(SDPBackend.MATH):  # the one implementation with second derivatives
        for batch in batches:
            loss = _loss_of(model, batch, labels, first=not count)
            stage = progress.begin(f"samples {count} to {count + batch.N}", len(chosen))
            for name, parameter in chosen.items():
                atoms, W = basis[name], parameter.detach()
                assert isinstance(atoms, Tagged)
                p = atoms.U.shape[1] if atoms.mix is None else atoms.mix.shape[1]
                zero = torch.zeros(p, dtype=W.dtype, device=W.device)
                H = second_derivatives(_along_basis(model, batch, name, W, atoms.to(W)), loss, zero).to(dtype)
                sums[name] = sums[name] + H if name in sums else H
                stage.advance(1, name)
            count += batch.N
            labels.seen = count
    for name, H in sums.items():
        if not torch.isfinite(H).all():
            raise CurvatureError(f"the curvature of {name!r} came out as NaN or Inf; run the model in float32.")
    return {name: Projected(H=0.5 * (H + H.T) / count, basis=basis[name]) for name, H in sums.items()}, count


Run = Callable[[Tensor], Any]  # coordinates x -> the model's outputs at W + S x
Loss = Callable[[Any], Tensor]  # the model's outputs -> the summed loss


def _loss_of(model: nn.Module, batch: Batch, labels: Labels, *, first: bool) -> Loss:
    """Return the loss of a batch under the label policy."""
    with torch.no_grad():
        outputs = batch.run(model)
        if first:
            check_sum(labels.loss_fn, outputs, batch.targets, batch.N)
        targets = labels.sample(outputs, batch.targets, batch.mask, batch.N)

    def loss(outputs: Any) -> Tensor:
        return per_sample(labels.loss_fn(outputs, targets), batch.N).sum()

    return loss


def _along_basis(model: nn.Module, batch: Batch, name: str, W: Tensor, atoms: Tagged) -> Run:
    """Return the function that runs the model at W + S x, where S are the atoms."""

    def run(x: Tensor) -> Any:
        coefficients = x if atoms.mix is None else atoms.mix.to(x) @ x
        moved = {name: W + ((atoms.U * coefficients) @ atoms.V.T).reshape(W.shape)}

        def moved_model(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(model, moved, args, kwargs, tie_weights=True)

        return batch.run(moved_model)

    return run


def _hessian(run: Run, loss: Loss, zero: Tensor) -> Tensor:
    """Return the second derivatives of the loss at x = 0, by one Hessian-vector product per direction."""
    return _derivatives(torch.func.grad(lambda x: loss(run(x))), zero, torch.eye(len(zero)).to(zero))


def _gauss_newton(run: Run, loss: Loss, zero: Tensor) -> Tensor:
    """Return JᵀHJ at x = 0, with J the Jacobian of the logits and H the Hessian of the loss in them."""
    with torch.no_grad():
        outputs = run(zero)
    J = _derivatives(lambda x: logits_of(run(x)), zero, torch.eye(len(zero)).to(zero))
    gradient = torch.func.grad(lambda logits: loss(with_logits(outputs, logits)))
    HJ = _derivatives(gradient, logits_of(outputs), J)
    return HJ.flatten(1) @ J.flatten(1).T


def _derivatives(f: Callable[[Tensor], Tensor], at: Tensor, directions: Tensor) -> Tensor:
    """Return the derivative of f at a point along each direction."""
    try:
        return torch.stack([torch.func.jvp(f, (at,), (along,))[1].detach() for along in directions])
    except (RuntimeError, NotImplementedError) as error:
        problem = f"the model has no second derivative that torch can form ({str(error).splitlines()[0][:160]})"
        raise CurvatureError(f"{problem}; use attn_implementation='eager', or another kind.") from error
