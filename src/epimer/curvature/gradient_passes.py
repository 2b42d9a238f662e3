"""Passes over the data that show a collector per-sample gradients, checked on a few samples before the first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from epimer.curvature.collectors import NOT_TWO_SIDED, Collector
from epimer.curvature.kinds import tensors_of
from epimer.curvature.model_calls import attempt
from epimer.curvature.per_sample_gradients import SampleGradients, agree
from epimer.curvature.recorder import PARAMETRISED, UNKNOWN, Recorder
from epimer.errors import CurvatureError, EpimerError, EpimerWarning, LeftOutWarning, listed, warn
from epimer.geometry.metric import Metric
from epimer.machine import out_of_memory
from epimer.methods.rules import is_matrix, stored_name
from epimer.progress import Stage
from epimer.tasks.batches import Batch
from epimer.tasks.labels import Labels, SampleError, check_sum, every_second, find_logits, plain_loss

FEW = 4  # samples on which the layouts are checked
TOGETHER = "a sample's output depends on the other samples of its batch"
LOSS_SCALE = 1024.0  # where gradients are in float16 and small ones would underflow


class Measurement:
    """Passes over the data that show a collector some parameters' per-sample gradients."""

    def __init__(self, model: nn.Module, collector: Collector, labels: Labels) -> None:
        self.model, self.labels, self.collector = model, labels, collector
        self.recorder = Recorder(model, collector.shapes, self._emit)
        half = any(p.dtype == torch.float16 for p in model.parameters())
        self.loss_scale = LOSS_SCALE if half else 1.0
        matrices = self.recorder.matrices if collector.matrices_only else collector.shapes
        self.not_matrices = [name for name in collector.shapes if name not in matrices]
        self.refused = collector.refused
        self.names: Collection[str] = ()  # what this pass measures
        self.reached: set[str] = set()
        self.learned = False
        self.divisible = False  # whether a batch can be taken apart into its samples
        self.squares = False  # whether inputs of shape [N, N] belong to all of them
        self.one_by_one = False  # whether batches are taken apart, as a layer mixes their samples
        self.last: tuple[int, Tensor | None] = (0, None)  # samples of the first batch, and the last one's logits alone
        self.incomplete: set[str] = set()  # parameters that mix samples, of which a batch is missing
        self.most: int | None = None  # samples of a batch that memory holds, where it did not hold more
        self.added = False  # whether the batch in work is in the sums already, in part
        self.seen = 0
        unknown = [stored_name(name) for name in self.recorder.unsupported if stored_name(name) != name]
        if unknown := list(dict.fromkeys(unknown)):
            remedy = "give '*.experts.*' the rule 'average', or take a method that needs no curvature"
            problem = f"the curvature of {listed(unknown)} is left out: experts of a kind that is not known"
            warn(EpimerWarning(f"{problem}. Methods that need it refuse them; {remedy}."))

    @property
    def left_out(self) -> dict[str, str]:
        """The parameters that cannot be measured, and why."""
        unsupported = self.recorder.unsupported
        return dict.fromkeys((*unsupported, *self.not_matrices), NOT_TWO_SIDED) | unsupported | self.refused

    @property
    def measurable(self) -> list[str]:
        """The parameters that can be measured, as far as is known."""
        left_out = self.left_out
        return [name for name in self.collector.shapes if name not in left_out]

    def _emit(self, name: str, gradients: list[SampleGradients]) -> None:
        self.reached.add(name)
        self.added = True
        if name in self.names:
            self.collector.add(name, gradients)

    def run(
        self, batches: Iterable[Batch], collector: Collector, names: Collection[str], stage: Stage
    ) -> dict[str, Metric]:
        """Return what a collector measures of the parameters in `names`, on all batches."""
        self.collector, self.names, self.seen = collector, set(names), 0
        self.labels.restart()
        with self.recorder.attached():
            for batch in batches:
                if not self.learned and (batch.N > 1 or not self.seen):
                    self.learned = batch.N > 1
                    with _memory_for(batch.N):
                        self._learn(batch)
                self._add(replace(batch, squares=self.squares), stage)
        left_out = self.left_out
        metrics = collector.finish(name for name in names if name not in left_out)
        _check_finite(metrics)
        return metrics

    def warn_of_unreached(self, names: Iterable[str]) -> None:
        """Name the parameters that no gradient reached."""
        unreached = [name for name in names if name not in self.reached]
        if unrouted := [name for name in unreached if stored_name(name) != name]:
            reason = "no token was routed to them, so their curvature is 0; measure on more samples"
            warn(EpimerWarning(f"{len(unrouted)} matrices of experts, {listed(unrouted)}: {reason}."))
        if unreached := [name for name in unreached if stored_name(name) == name]:
            reason = "the loss does not depend on them, so their curvature is 0"
            warn(EpimerWarning(f"no gradient reached {listed(unreached)}: {reason}."))

    def warn_of_left_out(self) -> None:
        """Name the parameters of layers that could not be measured; other bare parameters than matrices are not."""
        reasons: dict[str, list[str]] = {}
        for name, why in self.recorder.unsupported.items():
            if name in self.refused or stored_name(name) != name:  # these are warned of before measuring
                continue
            shape = self.recorder.parameters[name].shape
            of_matrix = is_matrix(name, shape) if why == UNKNOWN else why == PARAMETRISED and len(shape) > 1
            if of_matrix or (why != UNKNOWN and name not in self.not_matrices):
                reasons.setdefault(why, []).append(name)
        if reasons:
            parts = "; ".join(f"{listed(names)} ({why})" for why, names in reasons.items())
            warn(LeftOutWarning(f"left out, without curvature: {parts}."))

    def _add(self, batch: Batch, stage: Stage) -> None:
        """Add one batch to a collector; in parts, where a layer mixes samples or memory does not hold all of them."""
        most = 1 if self.one_by_one else self.most or batch.N
        if most < batch.N:
            for start in range(0, batch.N, most):
                self._add(batch.part(start, start + most), stage)
        elif self._measure_within_memory(batch):
            self.seen += batch.N
            self.labels.seen = self.collector.samples = self.seen
            stage.advance(batch.N, "")
        else:
            self._add(batch, stage)

    def _measure_within_memory(self, batch: Batch) -> bool:
        """Do as `_measure`, and go on with batches of half the size where that takes more memory than there is."""
        self.added = False
        try:
            with _memory_for(batch.N):
                return self._measure(batch)
        except TooLittleMemoryError:
            if batch.N == 1 or self.added or not self.divisible:
                raise
        self.most = batch.N // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        problem = f"there is too little memory for a batch of {batch.N} samples"
        warn(EpimerWarning(f"{problem}, so the model is measured with batches of {self.most}."))
        return False

    def _take_one_by_one(self) -> bool:
        """Go on with batches of one where a layer to be measured was found to mix samples; return whether so."""
        found = [name for name in self.recorder.mixed if name not in self.incomplete]
        mixed = [name for name in found if name not in self.refused and name not in self.not_matrices]
        if not mixed or not self.divisible or self.one_by_one:
            return False
        for name in found:
            del self.recorder.unsupported[name]
        self._go_on_one_by_one(f"{listed(mixed)} mix the samples of a batch (routing, or padding that is cut)")
        return True

    def _go_on_one_by_one(self, problem: str) -> None:
        self.one_by_one = True
        warn(EpimerWarning(f"{problem}, so the model is measured with batches of one sample."))

    def _last_differs(self, batch: Batch, outputs: Any) -> bool:
        """Whether the last sample of the first batch has other logits there than alone; go on one by one then.

        Routing with a limited capacity leaves out the last tokens of a batch, and none of two samples.
        """
        (N, alone), self.last = self.last, (0, None)
        logits = find_logits(outputs)
        if N != batch.N or self.one_by_one or alone is None or logits is None or alone.shape != logits[-1:].shape:
            return False
        if agree(logits[-1:], alone):
            return False
        self._go_on_one_by_one(TOGETHER)
        return True

    def _measure(self, batch: Batch) -> bool:
        """Add one batch to a collector, with one backward pass for each set of labels.

        Return False, with nothing added, where a layer mixes its samples and they are to be measured one by one.
        """
        with self.recorder.recording(batch.N), torch.enable_grad():
            outputs = batch.run(self.model)
            if self._take_one_by_one() or self._last_differs(batch, outputs):
                return False
            if not self.seen:
                check_sum(self.labels.loss_fn, outputs, batch.targets, batch.N)
            self.collector.repeated = False
            passes = self.labels.passes(outputs, batch.targets, self.recorder.masks.outermost, batch.N)
            for losses, following in pairwise(chain(passes, (None,))):
                assert losses is not None
                self._check_losses(losses)
                self.recorder.backward(losses.sum(), again=following is not None, loss_scale=self.loss_scale)
                self.collector.repeated = True
            self.collector.end_batch()
            self.incomplete.update(self.recorder.mixed)
        return True

    def _check_losses(self, losses: Tensor) -> None:
        """Name the first sample whose loss is NaN or Inf."""
        values = losses.detach().flatten()
        if bad := (~torch.isfinite(values)).nonzero().flatten().tolist():
            sample, value = self.seen + bad[0], float(values[bad[0]])
            where = f"sample {sample}" if losses.dim() else f"a batch that starts at sample {self.seen}"
            remedy = "look at that sample, or run the model in float32 or bfloat16"
            raise SampleError(f"the loss of {where} is {value}; {remedy}.", sample)

    def _learn(self, batch: Batch) -> None:
        """Learn on the first two samples where layers keep their samples, and check that gradients add up."""
        for variant in (batch, replace(batch, squares=True)):
            two = variant.part(0, 2)
            outputs = attempt(partial(self._probe, two))
            if not isinstance(outputs, Exception) and (batch.N == 1 or self._double(variant)):
                break
        else:  # a model that takes batches of one size only, or inputs whose first dimension is not the samples
            failure = attempt(partial(self._probe, batch))
            if isinstance(failure, EpimerError):
                raise failure
            self._check_layouts(batch)
            return
        if batch.N > 1:
            logits = find_logits(outputs)
            self.divisible, self.squares = True, variant.squares
            self.last = batch.N, find_logits(attempt(partial(variant.part(batch.N - 1, batch.N).run, self.model)))
            if self.labels.interact(self.model, two, outputs):
                self._go_on_one_by_one(TOGETHER)
                return
            for label in dict.fromkeys(self.recorder.shared_outputs):
                expanded = find_logits(self._with_expanded(label, two))
                if logits is not None and expanded is not None and agree(logits, expanded):
                    self.recorder.expanded.add(label)
            self._check_layouts(variant.part(0, FEW))
            self._take_one_by_one()

    def _probe(self, batch: Batch) -> Any:
        """Keep every layer's output on a few samples, and check that its gradients add up; return the outputs."""
        with self.recorder.probing(batch.N):
            outputs = batch.run(self.model)
            logits = find_logits(outputs)
            if logits is not None and len(logits) != batch.N:
                raise RuntimeError("the samples do not lie along the inputs' first dimension")
            self.recorder.check_gradients(plain_loss(self.labels.loss_fn, outputs, batch.targets, batch.N).sum())
        return outputs

    def _double(self, batch: Batch) -> bool:
        """Learn where layers keep their samples, by running the first two samples twice; return whether that ran."""

        def run() -> Any:
            with self.recorder.doubling(2):
                return batch.part(0, 2, repeats=2).run(self.model)

        return not isinstance(attempt(run), Exception)

    def _with_expanded(self, label: str, batch: Batch) -> Any:
        """Return the model's outputs with one layer's output expanded to every sample, or the exception it raised."""

        def run() -> Any:
            with self.recorder.expanding_output(label, batch.N):
                return batch.run(self.model)

        return attempt(run)

    def _check_layouts(self, batch: Batch) -> None:
        """Check that the gradients of every second sample's loss are zero at the other samples, and the reverse."""
        with self.recorder.recording(batch.N), torch.enable_grad():
            outputs = batch.run(self.model)
            try:
                halves = every_second(self.labels.loss_fn, outputs, batch.targets, batch.N)
            except (IndexError, RuntimeError):
                self.labels.check_range(find_logits(outputs), batch.targets)
                raise
            self.recorder.check_layouts(halves)


class TooLittleMemoryError(CurvatureError):
    """A batch takes more memory than there is."""


@contextmanager
def _memory_for(samples: int) -> Iterator[None]:
    """Say what to do where a batch takes more memory than there is."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        remedy = "take a smaller --batch-size or --max-length" if samples > 1 else "take a shorter --max-length"
        problem = f"there is too little memory for a batch of {samples} samples"
        raise TooLittleMemoryError(f"{problem}; {remedy}, or more --passes.") from error.with_traceback(None)


def _check_finite(metrics: Mapping[str, Metric]) -> None:
    """Refuse sums that overflowed; all are checked in one tensor, to synchronise a GPU once."""
    sums = [(name, value.sum()) for name, metric in metrics.items() for value in tensors_of(metric).values()]
    finite = torch.isfinite(torch.stack([total for _, total in sums])).tolist() if sums else []
    for (name, _), ok in zip(sums, finite, strict=True):
        if not ok:
            problem = f"the curvature of {name!r} came out as NaN or Inf: gradients overflowed"
            raise CurvatureError(f"{problem}; run the model in float32 or bfloat16.")
