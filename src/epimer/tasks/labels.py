"""The labels that the loss is computed with: the data's (true), sampled from the model (model), or all (expected).

The second moment of gradients under labels sampled from the model is the Fisher information, which for cross-entropy
and squared error is the generalised Gauss-Newton matrix. Under the data's labels it is the empirical Fisher.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from epimer.errors import CurvatureError
from epimer.tasks.batches import IGNORED as IGNORED
from epimer.tasks.batches import Batch
from epimer.tasks.ctc import CtcLoss

POLICIES = ("true", "model", "expected")
CHUNK = 1 << 24  # probabilities formed at a time
PASSES = 1024  # most backward passes per batch that `expected` may take

Loss = Callable[[Any, Any], Tensor]


def ignoring(loss_fn: Loss, ignore_index: int) -> Loss:
    """Return a loss that takes targets of -100, from one that ignores another value."""

    def loss(outputs: Any, targets: Any) -> Tensor:
        if isinstance(targets, Tensor) and not targets.is_floating_point():
            targets = targets.masked_fill(targets == IGNORED, ignore_index)
        return loss_fn(outputs, targets)

    return loss


def find_logits(outputs: Any) -> Tensor | None:
    """Return the logits of a model's output, a tensor or its `.logits`, or None."""
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) and logits.dim() else None


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of a model's output; refuse an output without any."""
    logits = find_logits(outputs)
    if logits is None:
        problem = "labels='model' and 'expected' need logits: a tensor, or an output with .logits"
        raise CurvatureError(f"{problem}; the model returned {type(outputs).__name__}. Wrap it, or use labels='true'.")
    return logits


def per_sample(losses: Any, N: int) -> Tensor:
    """Return what loss_fn returned as N losses, or as their sum where it is a single number."""
    if not isinstance(losses, Tensor):
        raise CurvatureError(f"loss_fn must return a tensor with a loss per sample, got {type(losses).__name__}.")
    if losses.dim() and len(losses) != N:
        remedy = "return one per sample (reduction='none', a sample's tokens summed), or their sum"
        raise CurvatureError(f"loss_fn returned losses of shape {tuple(losses.shape)} for {N} samples; {remedy}.")
    return losses.flatten(1).sum(1) if losses.dim() > 1 else losses


def plain_loss(loss_fn: Loss, outputs: Any, targets: Any, N: int) -> Tensor:
    """Return the losses with the targets, or with the most likely labels where there are none."""
    return per_sample(loss_fn(outputs, logits_of(outputs).argmax(-1) if targets is None else targets), N)


def check_sum(loss_fn: Loss, outputs: Any, targets: Any, N: int) -> None:
    """Refuse a single loss that is not the sum over the batch's samples, by comparing it with those of its halves."""
    with torch.no_grad():
        full = _loss_of(loss_fn, outputs, targets, N, slice(0, N))
        if full is None or full.dim():
            return
        parts = (_loss_of(loss_fn, outputs, targets, N, part) for part in (slice(0, N // 2), slice(N // 2, N)))
        first, second = (float(loss) for loss in parts if loss is not None)
    total, summed = float(full), first + second
    if math.isfinite(total) and math.isfinite(summed) and abs(total - summed) > 0.02 * abs(summed) + 1e-12:
        _refuse_sum(total, first, second)


def every_second(loss_fn: Loss, outputs: Any, targets: Any, N: int) -> list[Tensor]:
    """Return the summed losses of the samples 0, 2, 4 … and 1, 3, 5 …; none where outputs cannot be split by sample."""
    losses = [_loss_of(loss_fn, outputs, targets, N, slice(start, N, 2)) for start in (0, 1)]
    return [loss.sum() for loss in losses if loss is not None]


def _loss_of(loss_fn: Loss, outputs: Any, targets: Any, N: int, part: slice) -> Tensor | None:
    """Return the loss of some of a batch's samples, or None where outputs or targets cannot be split by sample."""
    logits = find_logits(outputs)
    if N == 1 or logits is None or len(logits) != N or not (targets is None or isinstance(targets, Tensor)):
        return None
    some = logits[part] if torch.is_grad_enabled() else logits[part].detach()
    return plain_loss(loss_fn, with_logits(outputs, some), None if targets is None else targets[part], len(some))


def _refuse_sum(total: float, first: float, second: float) -> None:
    """Raise an error for a loss that is not the sum over samples, from the loss of a batch and of its halves."""
    mean = min(first, second) * 0.98 <= total <= max(first, second) * 1.02
    problem = f"loss_fn returned {total:.4g} for a batch whose halves give {first:.4g} and {second:.4g}"
    reason = "the batch mean" if mean else "not the sum over samples"
    remedy = "return a loss per sample (reduction='none'), or their sum (reduction='sum')"
    raise CurvatureError(f"{problem}: that is {reason}; {remedy}.")


class SampleError(CurvatureError):
    """A sample that cannot be measured; `sample` is its index."""

    def __init__(self, message: str, sample: int) -> None:
        super().__init__(message)
        self.sample = sample


class Labels:
    """Chooses the labels of each batch, and returns the losses whose gradients are measured."""

    def __init__(self, policy: str, loss_fn: Loss, seed: int) -> None:
        self.policy, self.loss_fn, self.seed = policy, loss_fn, seed
        self.generator = torch.Generator()
        self.restart()
        self.shift: int | None = None  # by how many positions a target lies after the logits it is compared with
        self.separable: bool | None = None  # whether the loss is a sum over positions, each of its own label and logits

    def restart(self) -> None:
        """Begin the data again: the same samples then get the same labels."""
        self.generator.manual_seed(self.seed)
        self.seen = 0  # number of samples before this batch

    def passes(self, outputs: Any, targets: Any, mask: Tensor | None, N: int) -> Iterator[Tensor]:
        """Yield the losses of one backward pass after the other; the second moments of their gradients are summed."""
        if self.policy == "true":
            yield self._losses(outputs, self.sample(outputs, targets, mask, N), N)
        elif isinstance(self.loss_fn, CtcLoss):
            if self.policy == "expected":
                raise CurvatureError("labels='expected' has no end of transcripts for a CTC loss; use labels='model'.")
            yield self._losses(outputs, self.sample(outputs, targets, mask, N), N)
        elif isinstance(targets, Tensor) and targets.is_floating_point():
            yield from self._gaussian(outputs, logits_of(outputs).detach(), targets, N)
        else:
            yield from self._categorical(outputs, targets, mask, N)

    def sample(self, outputs: Any, targets: Any, mask: Tensor | None, N: int) -> Any:
        """Return the targets of a plain loss: the data's, or labels sampled from the model's own prediction.

        The mean Hessian of that loss over such labels is the Gauss-Newton matrix.
        """
        if self.policy == "true":
            if targets is None:
                raise CurvatureError("labels='true' needs targets, but a batch has none; use labels='model'.")
            return targets
        if isinstance(self.loss_fn, CtcLoss):
            return self.loss_fn.sample(logits_of(outputs).detach(), self.generator)
        if isinstance(targets, Tensor) and targets.is_floating_point():
            return self._around(outputs, logits_of(outputs).detach(), targets)[0]
        aligned, targets, live = self._positions(outputs, targets, mask, N)
        targets[live] = self._sample(aligned[live], live)[0]
        return targets

    def _losses(self, outputs: Any, targets: Any, N: int) -> Tensor:
        try:
            return per_sample(self.loss_fn(outputs, targets), N)
        except (IndexError, RuntimeError):
            self.check_range(find_logits(outputs), targets)
            raise

    def _positions(self, outputs: Any, targets: Any, mask: Tensor | None, N: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits that belong to each target, a copy of the targets, and which of them are not ignored."""
        logits = logits_of(outputs).detach()
        if targets is None:
            targets = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
            if mask is not None and mask.shape == targets.shape:
                targets[~mask] = IGNORED
        if not isinstance(targets, Tensor):
            raise CurvatureError(f"labels={self.policy!r} needs targets as a tensor, got {type(targets).__name__}.")
        return self._aligned(outputs, logits, targets, N), targets.clone(), targets != IGNORED

    def _categorical(self, outputs: Any, targets: Any, mask: Tensor | None, N: int) -> Iterator[Tensor]:
        aligned, targets, live = self._positions(outputs, targets, mask, N)
        if self.policy == "model":
            yield self._sampled(outputs, aligned, targets, live, N)
            return
        probabilities = aligned.double().softmax(-1)
        self._check_finite(probabilities.sum(-1)[live], live)
        classes = probabilities.shape[-1]
        places = live.flatten(1).any(0).nonzero().flatten().tolist() if targets.dim() > 1 else [None]
        if classes * len(places) > PASSES:
            passes = f"{classes * len(places)} backward passes per batch ({classes} classes at {len(places)} places)"
            raise CurvatureError(f"labels='expected' would take {passes}; use labels='model'.")
        if len(places) > 1:
            self._check_additive(outputs, targets, places, N)
        for place in places:
            for label in range(classes):
                yield self._weighted(outputs, targets, live, probabilities, place, label, N)

    def _sampled(self, outputs: Any, aligned: Tensor, targets: Tensor, live: Tensor, N: int) -> Tensor:
        """Return the losses under one label sampled for each position.

        Where each position's loss is its own, labels are sampled by importance, y from q ∝ p_y ‖e_y - p‖. A sample's
        loss is multiplied by √(p_y / q_y); of several positions each one's gradient is, and by a random sign, so that
        the mean of products of two positions' gradients is zero, as it is under p.
        """
        roots = torch.ones(targets.shape, dtype=torch.float64, device=targets.device)
        if targets.dim() == 1:
            targets[live], roots[live] = self._sample(aligned[live], live, by_importance=True)
            losses = self._losses(outputs, targets, N)
            if losses.dim():
                return losses * roots.to(losses)
        elif self._separable(outputs, targets, live, aligned.shape[-1]):
            targets[live], roots[live] = self._sample(aligned[live], live, by_importance=True)
            signs = 2 * torch.randint(2, targets.shape, generator=self.generator) - 1
            logits = logits_of(outputs)
            weights = self._at_logits(roots * signs.to(roots), logits)
            scaled: Tensor = _ScaledGradient.apply(logits, weights)  # type: ignore[no-untyped-call]
            return self._losses(with_logits(outputs, scaled), targets, N)
        targets[live] = self._sample(aligned[live], live)[0]
        return self._losses(outputs, targets, N)

    def _separable(self, outputs: Any, targets: Tensor, live: Tensor, classes: int) -> bool:
        """Whether a label changes the loss's gradient at its own logits only; found out once, on two samples."""
        if self.separable is None:
            probe = logits_of(outputs).detach()[:2].clone().requires_grad_()
            labels, live = torch.where(live, 0, targets)[:2], live[:2]
            changed = live & (torch.arange(live[0].numel(), device=live.device) % 2 == 0).view_as(live[0])
            gradients = []
            with torch.enable_grad():
                for chosen in (labels, torch.where(changed, classes - 1, labels)):
                    loss = self.loss_fn(with_logits(outputs, probe), chosen).sum()
                    gradients.append(torch.autograd.grad(loss, probe)[0])
            elsewhere = 1 - self._at_logits(changed.double(), probe, other=0.0)
            difference = (gradients[0] - gradients[1]).abs() * elsewhere.to(probe)
            self.separable = float(difference.max()) <= 1e-3 * float(gradients[0].abs().max())
        return self.separable

    def _at_logits(self, values: Tensor, logits: Tensor, other: float = 1.0) -> Tensor:
        """Return values of targets at the logits they are compared with, to be multiplied with them."""
        if _classes_second(logits, values):
            return values[:, None]
        index = torch.arange(values.shape[1], device=values.device) - (self.shift or 0)
        inside = (index >= 0) & (index < logits.shape[1])
        placed = torch.full(logits.shape[:2], other, dtype=values.dtype, device=values.device)
        placed[:, index[inside]] = values[:, inside]
        return placed[..., None]

    def _sample(self, logits: Tensor, live: Tensor, *, by_importance: bool = False) -> tuple[Tensor, Tensor]:
        """Sample a label for each row of logits, from p or from q ∝ p_y ‖e_y - p‖; return them and √(p_y / q_y).

        The mean over q of (p_y / q_y) g_y g_yᵀ equals the mean over p of g_y g_yᵀ, and has less variance: a confident
        model's likely label has almost no gradient, and its unlikely ones, which have, are seldom sampled from p.
        Labels are the same on every device, up to rounding, and are sampled a chunk of rows at a time.
        """
        wide = logits.dtype if logits.dtype == torch.float64 else torch.float32
        u = torch.rand(len(logits), 1, generator=self.generator, dtype=torch.float64).to(logits.device, wide)
        labels, roots, totals = [u.new_empty(0, dtype=torch.long)], [u.new_empty(0, dtype=torch.float64)], []
        step = max(1, CHUNK // max(1, logits.shape[-1]))
        for start in range(0, len(logits), step):
            p, u_n = logits[start : start + step].to(wide).softmax(-1), u[start : start + step]
            norms = _gradient_norms(p) if by_importance else torch.ones_like(p)
            norms = torch.where((p * norms).sum(-1, keepdim=True) > 0, norms, 1.0)  # no label has a gradient
            sums = (p * norms).cumsum(-1)
            label = torch.searchsorted(sums, u_n * sums[:, -1:], right=True).clamp_max(p.shape[-1] - 1)
            labels.append(label.flatten())
            roots.append((sums[:, -1:] / norms.gather(1, label)).double().sqrt().flatten())
            totals.append(sums[:, -1])
        if totals:
            self._check_finite(torch.cat(totals), live)
        return torch.cat(labels), torch.cat(roots)

    def _check_finite(self, totals: Tensor, live: Tensor) -> None:
        """Refuse probabilities that are NaN or Inf, and name the sample."""
        if bad := (~torch.isfinite(totals)).nonzero().flatten().tolist():
            sample = self.seen + int(live.nonzero()[bad[0], 0])
            raise SampleError(f"the logits of sample {sample} are NaN or Inf; look at it, and at the model.", sample)

    def check_range(self, logits: Tensor | None, targets: Any) -> None:
        """Refuse a target outside the classes, and name the sample."""
        if logits is None or not isinstance(targets, Tensor) or targets.is_floating_point() or logits.dim() < 2:
            return
        if targets.shape not in (logits.shape[:-1], logits.shape[:1] + logits.shape[2:]):
            return
        classes = logits.shape[-1] if targets.shape == logits.shape[:-1] else logits.shape[1]
        bad = ((targets >= classes) | ((targets < 0) & (targets != IGNORED))).nonzero()
        if len(bad):
            sample, value = self.seen + int(bad[0, 0]), int(targets[tuple(bad[0])])
            expected = f"0 to {classes - 1}, or -100"
            raise SampleError(f"the target of sample {sample} is {value}, expected {expected}.", sample)

    def interact(self, model: nn.Module, two: Batch, outputs: Any) -> bool:
        """Whether two samples' losses alone do not add up to that of both; refuse a loss that is not their sum."""
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs = [(two, outputs), *((part, part.run(model)) for part in (two.part(0, 1), two.part(1, 2)))]
            losses = [plain_loss(self.loss_fn, out, part.targets, part.N).double() for part, out in runs]
        both, first, second = (float(loss.sum()) for loss in losses)
        if not all(map(math.isfinite, (both, first, second))) or abs(both - first - second) <= 0.02 * abs(both) + 1e-6:
            return False
        if not losses[0].dim():
            with torch.no_grad():  # of the outputs of both, it adds up where the model alone mixes samples
                parts = [float(loss) for loss in every_second(self.loss_fn, outputs, two.targets, two.N)]
            if not parts or abs(both - sum(parts)) > 0.02 * abs(both) + 1e-6:
                _refuse_sum(both, first, second)
        return True

    def _weighted(
        self, outputs: Any, targets: Tensor, live: Tensor, p: Tensor, place: int | None, label: int, N: int
    ) -> Tensor:
        """Return each sample's loss for one label at one position, times the root of the label's probability."""
        chosen, weight = torch.where(live, label, targets), p[..., label] * live
        if place is not None:
            chosen, weight = _only(chosen, place), weight.flatten(1)[:, place]
        losses = self._losses(outputs, chosen, N)
        if not losses.dim():
            raise CurvatureError("labels='expected' needs a loss per sample; let loss_fn return N losses, not a sum.")
        root = weight.sqrt().to(losses)
        return torch.where(root > 0, losses, 0) * root

    def _check_additive(self, outputs: Any, targets: Tensor, places: list[Any], N: int) -> None:
        """Refuse a loss that is not the sum over a sample's positions."""
        with torch.no_grad():
            full = per_sample(self.loss_fn(outputs, targets), N)
            total = torch.zeros_like(full)
            for place in places:
                total += torch.nan_to_num(per_sample(self.loss_fn(outputs, _only(targets, place)), N))
        if not torch.allclose(total, full, rtol=1e-2, atol=1e-4):
            problem = "labels='expected' needs a loss that sums over a sample's places (-100 left out)"
            raise CurvatureError(f"{problem}; sum instead of averaging, or use labels='model'.")

    def _aligned(self, outputs: Any, logits: Tensor, targets: Tensor, N: int) -> Tensor:
        """Return the logits that belong to each target, classes last."""
        if _classes_second(logits, targets):
            return logits.movedim(1, -1)
        if targets.dim() == 1 and logits.dim() == 2 and len(targets) == len(logits):
            return logits
        if targets.dim() != 2 or logits.dim() != 3 or len(targets) != len(logits):
            pair = f"the logits {tuple(logits.shape)} belong to targets {tuple(targets.shape)}"
            remedy = "give a target for every place, or use labels='true'"
            raise CurvatureError(f"labels={self.policy!r} cannot tell which of {pair}; {remedy}.")
        if self.shift is None:
            self.shift = self._find_shift(outputs, logits, targets)
        index = torch.arange(targets.shape[1], device=logits.device) - self.shift
        return logits[:, index.clamp(0, logits.shape[1] - 1)]

    def _find_shift(self, outputs: Any, logits: Tensor, targets: Tensor) -> int:
        """Return how many positions before a target its logits are, from the gradient of a single target's loss."""
        live = (targets != IGNORED).sum(0)
        live[0] = 0 if len(live) > 1 else live[0]
        place = int(live.argmax())
        probe = logits.clone().requires_grad_()
        with torch.enable_grad():
            loss = self.loss_fn(with_logits(outputs, probe), _only(targets, place))
            (gradient,) = torch.autograd.grad(torch.nan_to_num(loss).sum(), probe, allow_unused=True)
        touched = [] if gradient is None else gradient.abs().sum((0, 2)).nonzero().flatten().tolist()
        if len(touched) != 1 or place - touched[0] not in (0, 1):
            cause = f"target {place} depends on places {touched[:5]} of the logits"
            problem = f"labels={self.policy!r} cannot tell which logits a target is compared with: {cause}"
            raise CurvatureError(f"{problem}; use labels='true', or a loss that keeps -100 ignored.")
        return place - touched[0]

    def _gaussian(self, outputs: Any, mean: Tensor, targets: Tensor, N: int) -> Iterator[Tensor]:
        """Yield the losses of a squared error, under labels from a normal distribution around the model's output."""
        sampled, width = self._around(outputs, mean, targets)
        if self.policy == "model":
            yield self._losses(outputs, sampled, N)
            return
        if mean[0].numel() > PASSES:
            raise CurvatureError(f"labels='expected' would take {mean[0].numel()} backward passes; use labels='model'.")
        for place in range(mean[0].numel()):
            step = torch.zeros_like(mean).flatten(1)
            step[:, place] = width
            yield self._losses(outputs, mean + step.view_as(mean), N)

    def _around(self, outputs: Any, mean: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        """Return labels sampled from a normal distribution around the model's output, and its standard deviation."""
        if targets.shape != mean.shape:
            shapes = tuple(targets.shape), tuple(mean.shape)
            raise CurvatureError(f"targets of shape {shapes[0]} do not fit outputs of shape {shapes[1]}.")
        noise = torch.randn(mean.shape, generator=self.generator, dtype=torch.float64).to(mean)
        width = self._width(outputs, mean, noise)
        return mean + width * noise, width

    def _width(self, outputs: Any, mean: Tensor, noise: Tensor) -> float:
        """Return the standard deviation of the labels, 1/√(second derivative of the loss); refuse other losses."""

        def gradient(targets: Tensor) -> Tensor:
            probe = mean.clone().requires_grad_()
            with torch.enable_grad():
                loss = self.loss_fn(with_logits(outputs, probe), targets)
                return torch.autograd.grad(loss.sum(), probe)[0]

        near, far = gradient(mean - noise), gradient(mean - 2 * noise)
        second = float((near * noise).sum() / noise.square().sum())
        residuals = [(g - times * second * noise, g) for g, times in ((near, 1), (far, 2))]
        if second <= 0 or any(float(residual.norm()) > 1e-2 * float(g.norm()) for residual, g in residuals):
            problem = f"labels={self.policy!r} knows cross-entropy (integer targets) and squared error"
            raise CurvatureError(f"{problem}; for any other loss use labels='true'.")
        return float(second**-0.5)


def _classes_second(logits: Tensor, targets: Tensor) -> bool:
    """Whether the classes are the second dimension of the logits, as in a picture's, and not the last."""
    return targets.dim() > 1 and targets.shape == logits.shape[:1] + logits.shape[2:] != logits.shape[:-1]


class _ScaledGradient(torch.autograd.Function):
    """The identity, with its gradient multiplied by weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        return g * weights.to(g), None


def _gradient_norms(p: Tensor) -> Tensor:
    """Return ‖e_y - p‖ for each class y; that of the likeliest class without the cancellation in 1 - p_y."""
    top = p.argmax(-1, keepdim=True)
    rest = p.scatter(-1, top, 0)
    squares = rest.square().sum(-1, keepdim=True)
    norms = (1 - p).square() + p.gather(-1, top).square() + squares - p.square()
    return norms.scatter(-1, top, rest.sum(-1, keepdim=True).square() + squares).sqrt()


def _only(targets: Tensor, place: int) -> Tensor:
    """Return targets that are ignored at every position but one."""
    only = torch.full_like(targets, IGNORED).flatten(1)
    only[:, place] = targets.flatten(1)[:, place]
    return only.view_as(targets)


def with_logits(outputs: Any, logits: Tensor) -> Any:
    """Return a copy of a model's output with other logits."""
    if isinstance(outputs, Tensor):
        return logits
    if hasattr(outputs, "_replace"):
        return outputs._replace(logits=logits)
    changed = copy.copy(outputs)
    if isinstance(changed, MutableMapping):
        changed["logits"] = logits
    else:
        changed.logits = logits
    return changed
