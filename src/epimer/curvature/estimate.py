"""Measure curvature: one ordinary forward and backward pass per batch, watched layer by layer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from epimer.curvature.basis import basis_fingerprint
from epimer.curvature.collectors import (
    Collector,
    CorrectedCollector,
    DiagonalCollector,
    KroneckerCollector,
    SamplesCollector,
)
from epimer.curvature.curvature import EXACT, KINDS, SEQUENCES, About, Curvature, tensors_of
from epimer.curvature.exact import projected_hessians
from epimer.curvature.format import model_fingerprint
from epimer.curvature.per_sample_gradients import alike
from epimer.curvature.recorder import Tape, quietly
from epimer.errors import CurvatureError, EpimerError, EpimerWarning, ParameterError, listed, nearest
from epimer.geometry.diagonal import TaggedDiagonal
from epimer.geometry.metric import Diagonal, Kronecker, Metric, Projected
from epimer.geometry.subspace import Tagged, TensorProduct
from epimer.progress import Progress, Stage
from epimer.tasks.batches import Batch, read_batches
from epimer.tasks.labels import (
    POLICIES,
    Labels,
    Loss,
    SampleError,
    check_sum,
    every_second,
    find_logits,
    plain_loss,
    refuse_sum,
)

NOT_TWO_SIDED = "a table, a vector or a grouped convolution has no two-sided curvature"
FEW = 4  # samples that the model is learned about on
GAIN = 1024.0  # of the loss, where gradients are in float16 and small ones would vanish


def estimate_curvature(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Loss,
    *,
    kind: str = "kronecker",
    labels: str = "model",
    samples: int | None = 256,
    basis: Mapping[str, Tagged | TensorProduct] | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    sequence: str = "expand",
    layers: Sequence[str] | None = None,
    progress: bool = True,
    total: int | None = None,
) -> Curvature:
    """Measure the curvature of a model's loss, for use in any later merge.

    Args:
        model: any PyTorch model; it is run in eval mode and left as it was. Frozen parameters are measured too.
        batches: pairs (inputs, targets); inputs is a tensor, a tuple or a dict, and is passed on accordingly.
            kind "ekfac" goes through them twice. Targets may be None where labels are the model's own.
        loss_fn: takes (outputs, targets) and returns a loss per sample, or their sum.
        kind: diagonal, kronecker, ekfac, samples; or hessian, ggn, which need a basis.
        labels: model, sampled from the model's own prediction; true, the given targets; expected, all of them, each
            weighed by the model's probability. Targets of -100 stay ignored.
        samples: stop after this many; None takes all.
        basis: from `build_basis`; only what lies in it is measured and kept.
        dtype: of the sums; float32, or float64 where the model is.
        seed: of the sampled labels.
        sequence: expand (tokens count one by one) or reduce (a sample is its mean input and summed gradient).
        layers: name patterns of the tensors to measure; by default all that can be.
        progress: show a bar on a terminal.
        total: how many samples there are, for the bar, where `samples` does not say.

    Returns:
        The curvature, by tensor name; `.save(folder)` keeps it.
    """
    for name, value, known in (
        ("kind", kind, KINDS),
        ("labels", labels, POLICIES),
        ("sequence", sequence, SEQUENCES),
    ):
        if value not in known:
            raise ParameterError(f"The {name!r} parameter must be one of {', '.join(known)}. Got {value!r} instead.")
    if samples is not None and (not isinstance(samples, int) or samples < 1):
        raise ParameterError(f"The 'samples' parameter must be an integer at least 1, or None. Got {samples!r}.")
    if dtype not in (None, torch.float32, torch.float64):
        raise ParameterError(f"The 'dtype' parameter must be torch.float32 or torch.float64. Got {dtype}.")
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    if not parameters:
        raise CurvatureError("the model has no parameters, so there is nothing to measure.")
    wide = any(p.dtype == torch.float64 for p in parameters.values())
    dtype = dtype or (torch.float64 if wide else torch.float32)
    chosen = _chosen(parameters, layers, basis)
    _check_basis(basis, kind, parameters)
    measurement = _Measurement(model, chosen, Labels(labels, loss_fn, seed), dtype)
    read: Iterable[Batch] = read_batches(batches, samples, measurement.device)
    with Progress(progress, unit="samples") as bar:
        if kind in EXACT:
            assert basis is not None
            metrics, count = projected_hessians(model, read, measurement.labels, kind, basis, chosen, dtype, bar)
            tokens, left_out = dict[str, int](), dict[str, str]()
        else:
            read = list(read) if kind == "ekfac" else read
            collector = _collector(kind, measurement, sequence, basis)
            metrics = measurement.run(read, collector, bar.begin("measuring", samples or total))
            count, tokens = collector.samples, collector.tokens
            left_out = {**measurement.left_out, **collector.refused}
            metrics = {name: metric for name, metric in metrics.items() if name not in left_out}
            if kind == "diagonal" and basis is not None:
                metrics = {name: _project(metric, basis[name]) for name, metric in metrics.items()}
            if basis is not None:  # the caller's own, in its own precision
                metrics = {
                    name: replace(m, basis=basis[name]) for name, m in metrics.items() if isinstance(m, Projected)
                }
            if kind == "ekfac":
                factors = {name: metric for name, metric in metrics.items() if isinstance(metric, Kronecker)}
                second = CorrectedCollector(factors, dtype, measurement.device)
                measurement.labels = Labels(labels, loss_fn, seed)
                metrics = measurement.run(read, second, bar.begin("correcting", samples or total))
    if not metrics:
        why = f" ({next(iter(left_out.values()))})" if left_out else ""
        raise CurvatureError(
            f"none of the chosen tensors can be measured as {kind}{why}; "
            "kronecker and samples know nn.Linear, nn.Conv2d and GPT-2's Conv1D, diagonal also tables and norms."
        )
    counts = {name: tokens[name] for name in metrics if name in tokens}
    about = About(
        kind=kind,
        samples=count,
        tokens=max(counts.values(), default=None),
        labels=labels,
        seed=seed,
        dtype=str(dtype).removeprefix("torch."),
        compute=str(next(iter(chosen.values())).dtype).removeprefix("torch."),
        sequence=sequence,
        model=model_fingerprint({name: parameters[name] for name in metrics}),
        basis=None if basis is None else basis_fingerprint(basis),
        counts=counts,
        left_out=left_out,
        ties=_ties(model, metrics),
    )
    return Curvature(metrics, about)


class _Measurement:
    """A model with hooks on it, and what has been learned about its loss."""

    def __init__(self, model: nn.Module, chosen: dict[str, Tensor], labels: Labels, dtype: torch.dtype) -> None:
        self.model, self.labels, self.dtype = model, labels, dtype
        self.shapes = {name: p.shape for name, p in chosen.items()}
        self.device = next(iter(chosen.values())).device
        self.half = any(p.dtype == torch.float16 for p in chosen.values())
        self.left_out: dict[str, str] = {}
        self.seen = 0

    def run(self, batches: Iterable[Batch], collector: Collector, stage: Stage) -> dict[str, Metric]:
        """Show every batch to a collector; return what it found."""
        reached: set[str] = set()

        def emit(name: str, uses: Any) -> None:
            reached.add(name)
            collector.add(name, uses)

        tape = Tape(self.model, collector.shapes, emit)
        if not tape.sources:
            self.left_out = tape.unread
            return {}
        known = False
        self.seen = self.labels.seen = 0
        with tape.watching():
            for batch in batches:
                if not known and (batch.N > 1 or not self.seen):
                    known = batch.N > 1
                    self._learn(tape, batch)
                self._measure(tape, batch, collector)
                self.seen += batch.N
                self.labels.seen = collector.samples = self.seen
                stage.advance(batch.N, "")
        metrics = collector.finish()
        self.left_out = dict(tape.unread)
        for name in metrics:
            if not isinstance(collector, DiagonalCollector) and name not in tape.matrices:
                self.left_out.setdefault(name, NOT_TWO_SIDED)
        kept = {name: metric for name, metric in metrics.items() if name not in self.left_out}
        _check_finite(kept)
        unreached = [name for name in kept if name not in reached]
        if unreached:
            warnings.warn(
                f"no gradient reached {listed(unreached)}: the loss does not depend on them, so their curvature is 0.",
                EpimerWarning,
                stacklevel=4,
            )
        return kept

    def _measure(self, tape: Tape, batch: Batch, collector: Collector) -> None:
        with tape.recording(batch.N), torch.enable_grad():
            outputs = batch.run(self.model)
            if not self.seen:
                check_sum(self.labels.loss_fn, outputs, batch.targets, batch.N)
            collector.repeated = False
            passes = self.labels.passes(outputs, batch.targets, tape.mask, batch.N)
            losses = next(passes, None)
            while losses is not None:
                self._check_losses(losses)
                following = next(passes, None)
                tape.backward(losses.sum(), again=following is not None, gain=GAIN if self.half else 1.0)
                collector.repeated, losses = True, following

    def _check_losses(self, losses: Tensor) -> None:
        bad = (~torch.isfinite(losses.detach().flatten())).nonzero().flatten().tolist()
        if bad:
            where = f"sample {self.seen + bad[0]}" if losses.dim() else f"a batch that starts at sample {self.seen}"
            value = float(losses.detach().flatten()[bad[0]])
            raise SampleError(
                f"the loss of {where} is {value}; look at that sample, or run the model in float32 or bfloat16.",
                self.seen + bad[0],
            )

    def _learn(self, tape: Tape, batch: Batch) -> None:
        """Find out on the first few samples where layers keep their samples, and whether gradients add up."""
        k = 2 if batch.N > 2 else 1
        for form in (batch, replace(batch, squares=True)):
            few = form.part(0, k)
            failure = quietly(lambda few=few: self._probed(tape, few))  # type: ignore[misc]
            if failure is None:
                break
        else:  # a model that takes batches of one size only, or inputs that do not begin with the samples
            tape.probed.clear()
            failure = quietly(lambda: self._probed(tape, batch))
            tape.probed.clear()
            if isinstance(failure, EpimerError):
                raise failure
            self._check_layouts(tape, batch)
            return
        if batch.N > 1:
            two = form.part(0, 2)
            outputs = self._tried(tape, "", two)
            before, alone = find_logits(outputs), list(tape.singles)
            self._check_sum(two, outputs)
            tape.expanding = {
                label
                for label in alone
                if before is not None
                and (after := find_logits(self._tried(tape, label, two))) is not None
                and alike(before, after)
            }
            self._check_layouts(tape, form.part(0, FEW))

    def _check_layouts(self, tape: Tape, batch: Batch) -> None:
        with tape.recording(batch.N), torch.enable_grad():
            outputs = batch.run(self.model)
            try:
                half = every_second(self.labels.loss_fn, outputs, batch.targets, batch.N)
            except (IndexError, RuntimeError):
                self.labels.check_range(find_logits(outputs), batch.targets)
                raise
            if half is not None:
                tape.check_layouts(half)

    def _check_sum(self, two: Batch, outputs: Any) -> None:
        """Refuse a loss of two samples that is not the sum of theirs: a batch mean, or samples that see each other."""
        losses = []
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for part in (two, two.part(0, 1), two.part(1, 2)):
                found = outputs if part is two else part.run(self.model)
                losses.append(plain_loss(self.labels.loss_fn, found, part.targets, part.N).double())
        both, first, second = (float(loss.sum()) for loss in losses)
        if not all(map(math.isfinite, (both, first, second))) or abs(both - first - second) <= 0.02 * abs(both) + 1e-6:
            return
        if losses[0].dim():
            raise CurvatureError(
                "a sample's output depends on the other samples of its batch, so it has no curvature of its own; "
                "measure with batches of one sample."
            )
        refuse_sum(both, first, second)

    def _probed(self, tape: Tape, batch: Batch) -> None:
        with tape.probing(batch.N):
            outputs = batch.run(self.model)
            logits = find_logits(outputs)
            if logits is not None and len(logits) != batch.N:
                raise RuntimeError("the samples do not lie along the inputs' first dimension")
            tape.verify(plain_loss(self.labels.loss_fn, outputs, batch.targets, batch.N).sum())

    def _tried(self, tape: Tape, label: str, batch: Batch) -> Any:
        """Return the outputs where a layer's output, one for all samples, is repeated for each; or what went wrong."""

        def run() -> Any:
            with tape.trying(label, batch.N):
                return batch.run(self.model)

        return quietly(run)


def _check_finite(metrics: Mapping[str, Metric]) -> None:
    """Refuse sums that overflowed; all are looked at before any is asked for, which a GPU prefers."""
    found = {name: [value.sum() for value in tensors_of(metric).values()] for name, metric in metrics.items()}
    if not found or torch.isfinite(torch.stack([total for totals in found.values() for total in totals])).all():
        return
    for name, totals in found.items():
        if not torch.isfinite(torch.stack(totals)).all():
            raise CurvatureError(
                f"the curvature of {name!r} came out as NaN or Inf: gradients overflowed; "
                "run the model in float32 or bfloat16."
            )


def _collector(
    kind: str, of: _Measurement, sequence: str, basis: Mapping[str, Tagged | TensorProduct] | None
) -> Collector:
    if kind == "diagonal":
        return DiagonalCollector(of.shapes, of.dtype, of.device)
    matrices = {name: shape for name, shape in of.shapes.items() if len(shape) > 1}
    if basis is not None:
        basis = {name: basis[name].to(torch.empty(0, dtype=of.dtype, device=of.device)) for name in matrices}
    if kind == "samples":
        return SamplesCollector(matrices, of.dtype, of.device, basis=basis)  # type: ignore[arg-type]
    return KroneckerCollector(matrices, of.dtype, of.device, reduce=sequence == "reduce", basis=basis)


def _project(metric: Metric, basis: Any) -> Projected:
    """Return a diagonal in the coordinates of tagged atoms."""
    assert isinstance(metric, Diagonal)
    assert isinstance(basis, Tagged)
    F_mn = metric.F.reshape(len(metric.F), -1)
    form = basis.to(F_mn).restrict(Diagonal(F_mn))
    assert isinstance(form, TaggedDiagonal)
    return Projected(H=form.dense().to(F_mn.dtype))


def matching(patterns: Sequence[str], names: Collection[str], where: str) -> list[str]:
    """Return the names that any pattern matches; refuse a pattern that matches none."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise CurvatureError(
                f"{where} has no tensor {pattern!r}.{nearest(pattern, names)} "
                f"It has {listed(names)}; a pattern is a glob over the whole name."
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _chosen(
    parameters: Mapping[str, Tensor], layers: Sequence[str] | None, basis: Mapping[str, object] | None
) -> dict[str, Tensor]:
    """Return the parameters to measure: those that patterns name, and that a basis has."""
    patterns = ["*"] if layers is None else [layers] if isinstance(layers, str) else list(layers)
    named = set(matching(patterns, parameters, "the model"))
    missing = [name for name in basis or () if name not in parameters]
    if missing:
        raise CurvatureError(
            f"the basis has {missing[0]!r}, which is not in the model.{nearest(missing[0], parameters)} "
            "Build the basis from models with these names."
        )
    chosen = {name: p for name, p in parameters.items() if name in named and (basis is None or name in basis)}
    if not chosen:
        raise CurvatureError(
            "none of the model's tensors is in the basis and fits layers=; there is nothing to measure."
        )
    return chosen


def _check_basis(basis: Mapping[str, Any] | None, kind: str, parameters: Mapping[str, Tensor]) -> None:
    if basis is None:
        if kind in EXACT:
            raise CurvatureError(f"kind={kind!r} needs basis=: it is measured in a basis only (epimer.build_basis).")
        return
    if kind == "ekfac":
        raise CurvatureError("kind='ekfac' cannot be projected while it is measured; use kronecker, or no basis.")
    for name, one in basis.items():
        if not isinstance(one, Tagged | TensorProduct):
            raise CurvatureError(f"basis[{name!r}] must be made by epimer.build_basis, got {type(one).__name__}.")
        shape = len(one.U), len(one.V)
        W = parameters[name]
        if shape != (len(W), W[0].numel()):
            raise CurvatureError(
                f"basis[{name!r}] is of {shape[0]} x {shape[1]} matrices, but the model's has shape {tuple(W.shape)}; "
                "build it from models of this shape."
            )
        if isinstance(one, TensorProduct) and kind != "kronecker":
            raise CurvatureError(
                f"kind={kind!r} on all pairs of a tensor basis would take {one.U.shape[1] * one.V.shape[1]} squared "
                "numbers; build a tagged basis, or measure kronecker."
            )


def _ties(model: nn.Module, metrics: Mapping[str, object]) -> dict[str, str]:
    """Return the other names of measured tensors."""
    first = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    found = {name: first[id(p)] for name, p in every if first[id(p)] != name}
    return {name: twin for name, twin in found.items() if twin in metrics}
