"""Measure curvature from per-sample gradients, with one ordinary forward and backward pass per batch."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epimer.checkpoints.memory import unwrapped
from epimer.curvature.basis import basis_fingerprint
from epimer.curvature.collectors import NOT_TWO_SIDED, Collector
from epimer.curvature.curvature import SEQUENCES, Curvature
from epimer.curvature.exact import projected_hessians
from epimer.curvature.experts import members
from epimer.curvature.format import Provenance, model_fingerprint
from epimer.curvature.kinds import KINDS, tensors_of
from epimer.curvature.passes import plan_passes
from epimer.curvature.per_sample_gradients import SampleGradients, agree
from epimer.curvature.recorder import UNKNOWN, Recorder, attempt, eval_mode
from epimer.errors import (
    CurvatureError,
    EpimerError,
    EpimerWarning,
    LeftOutWarning,
    ParameterError,
    listed,
    nearest,
    warn,
)
from epimer.geometry.metric import Metric
from epimer.geometry.subspace import Basis
from epimer.methods.rules import is_matrix, stored_name
from epimer.progress import Progress, Stage
from epimer.tasks.batches import IGNORED, Batch, read_batches
from epimer.tasks.labels import (
    POLICIES,
    Labels,
    Loss,
    SampleError,
    check_sum,
    every_second,
    find_logits,
    ignoring,
    plain_loss,
)
from epimer.tasks.model_loss import own_loss, with_decoder_inputs

FEW = 4  # samples on which the layouts are checked
LOSS_SCALE = 1024.0  # where gradients are in float16 and small ones would underflow


def estimate_curvature(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Loss | None = None,
    *,
    kind: str = "kronecker",
    labels: str = "model",
    ignore_index: int = IGNORED,
    samples: int | None = 256,
    basis: Mapping[str, Basis] | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    sequence: str = "expand",
    layers: Sequence[str] | None = None,
    passes: int | None = None,
    scratch: str | Path | None = None,
    progress: bool = True,
    total: int | None = None,
) -> Curvature:
    """Measure the curvature of a model's loss, for use in any later merge.

    Args:
        model: any PyTorch model; it is run in eval mode and left as it was. Frozen parameters are measured too.
        batches: pairs (inputs, targets); inputs is a tensor, a tuple or a dict, and is passed to the model accordingly.
            Or dicts and BatchEncodings, whose `labels` are the targets and the rest the inputs. Targets may be None
            where labels are the model's own. All are kept for kind "ekfac" and for several passes.
        loss_fn: takes (outputs, targets) and returns a loss per sample, or their sum. None takes the loss that a
            Hugging Face model computes of its labels, where that is a cross-entropy; a sample's tokens are summed.
        kind: diagonal, kronecker, ekfac, samples; or hessian, ggn, which need a basis.
        labels: model, sampled from the model's own prediction; true, the targets; expected, every class, weighted by
            the model's probability.
        ignore_index: the target that is ignored.
        samples: stop after this many; None takes all.
        basis: from `build_basis`; only the curvature in its subspace is measured and kept.
        dtype: of the sums; by default float32, or float64 where the model is.
        seed: of the sampled labels.
        sequence: expand (tokens count one by one) or reduce (a sample is its mean input and summed gradient).
        layers: name patterns of the tensors to measure; by default all that can be.
        passes: over the data, each of which measures some of the tensors, so that their sums fit in memory; by default
            as many as the free memory asks for. The result is the same. That of several passes lies on the CPU.
        scratch: folder for finished tensors that memory cannot hold; by default the system's for temporary files.
        progress: show a progress bar on a terminal.
        total: the number of samples, for the progress bar, where `samples` is None.

    Returns:
        The curvature, by tensor name; `.save(folder)` writes it to disk.
    """
    for name, value, known in (("kind", kind, KINDS), ("labels", labels, POLICIES), ("sequence", sequence, SEQUENCES)):
        if value not in tuple(known):
            raise ParameterError(f"The {name!r} parameter must be one of {', '.join(known)}. Got {value!r} instead.")
    if samples is not None and (not isinstance(samples, int) or samples < 1):
        raise ParameterError(f"The 'samples' parameter must be an integer at least 1, or None. Got {samples!r}.")
    if passes is not None and KINDS[kind].collector is None:
        raise ParameterError(f"kind={kind!r} measures one tensor after the other; leave out passes= (--passes).")
    if passes is not None and (not isinstance(passes, int) or passes < 1):
        raise ParameterError(f"The 'passes' parameter must be an integer at least 1, or None. Got {passes!r}.")
    if dtype not in (None, torch.float32, torch.float64):
        raise ParameterError(f"The 'dtype' parameter must be torch.float32 or torch.float64. Got {dtype}.")
    if loss_fn is not None and ignore_index >= 0 and labels != "true":
        problem = f"labels={labels!r} may give a place the label {ignore_index}, which loss_fn ignores"
        raise ParameterError(f"{problem}; leave out loss_fn, use labels='true', or ignore a number below 0.")
    model = unwrapped(model)
    stored: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    if not stored:
        raise CurvatureError("the model has no parameters, so there is nothing to measure.")
    wide = any(p.dtype == torch.float64 for p in stored.values())
    dtype = dtype or (torch.float64 if wide else torch.float32)
    parameters = members(stored)
    if KINDS[kind].collector is None:  # second derivatives are taken of parameters, not of parts of them
        parameters = {name: p for name, p in parameters.items() if name in stored}
        basis = {name: one for name, one in (basis or {}).items() if stored_name(name) == name} or None
    chosen = _chosen(parameters, layers, basis)
    _check_basis(basis, kind, parameters)
    row, device = KINDS[kind], next(iter(chosen.values())).device
    given = (with_decoder_inputs(model, batch) for batch in read_batches(batches, samples, device, ignore_index))
    read: Iterable[Batch] = given
    if loss_fn is None:
        first = next(given)
        read = chain((first,), given)
        with eval_mode(model):
            loss_fn = own_loss(model, first)
    elif ignore_index != IGNORED:
        loss_fn = ignoring(loss_fn, ignore_index)
    label_policy = Labels(labels, loss_fn, seed)
    metrics: dict[str, Metric] = {}
    with Progress(progress, unit="samples") as bar:
        if row.collector is None:
            assert basis is not None
            metrics, count = projected_hessians(model, read, label_policy, kind, basis, chosen, dtype, bar)
            tokens, left_out = dict[str, int](), dict[str, str]()
        else:
            shapes = {name: p.shape for name, p in chosen.items()}
            collector = row.collector(shapes, dtype, device, basis=basis, reduce=sequence == "reduce")
            measurement = _Measurement(model, collector, label_policy)
            sizes = {name: dtype.itemsize * collector.numbers(name) for name in measurement.measurable}
            if row.refine is not None:  # factors, their eigenvectors and what is summed along them
                sizes = {name: 2 * size + dtype.itemsize * shapes[name].numel() for name, size in sizes.items()}
            plan = plan_passes(sizes, device, passes, None if scratch is None else Path(scratch))
            read = read if row.refine is None and len(plan) == 1 else list(read)
            for number, names in enumerate(plan, 1):
                of = f", pass {number} of {len(plan)}" if len(plan) > 1 else ""
                stage = bar.begin(f"measuring{of}", samples or total)
                measured = measurement.run(read, collector, names, stage)
                if row.refine is not None and measured:
                    second = row.refine(measured, dtype, device)
                    stage = bar.begin(f"correcting{of}", samples or total)
                    measured = measurement.run(read, second, second.shapes, stage)
                while measured:  # one by one, so that no more than one is there twice
                    name = next(iter(measured))
                    metrics[name] = plan.keep(measured.pop(name))
            count, tokens, left_out = collector.samples, collector.tokens, measurement.left_out
            metrics = {name: metric for name, metric in metrics.items() if name not in left_out}
            measurement.warn_of_unreached(metrics)
            measurement.warn_of_left_out()
            kept = set(map(stored_name, metrics))  # a tensor none of whose parts is kept is left out as a whole
            left_out = {name if (n := stored_name(name)) in kept else n: why for name, why in left_out.items()}
    if not metrics:
        why = f" ({next(iter(left_out.values()))})" if left_out else ""
        remedy = "kronecker and samples know nn.Linear, nn.Conv2d and GPT-2's Conv1D, diagonal also tables and norms"
        raise CurvatureError(f"none of the chosen tensors can be measured as {kind}{why}; {remedy}.")
    counts = {name: tokens[name] for name in metrics if name in tokens}
    provenance = Provenance(
        kind=kind,
        samples=count,
        tokens=max(counts.values(), default=None),
        labels=labels,
        seed=seed,
        dtype=str(dtype).removeprefix("torch."),
        compute=str(next(iter(chosen.values())).dtype).removeprefix("torch."),
        sequence=sequence,
        model=model_fingerprint({name: stored[name] for name in map(stored_name, metrics)}),
        basis=None if basis is None else basis_fingerprint(basis),
        counts=counts,
        left_out=left_out,
        ties=_ties(model, metrics),
    )
    return Curvature(metrics, provenance)


class _Measurement:
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
        self.incomplete: set[str] = set()  # parameters that mix samples, of which a batch is missing
        self.seen = 0
        unknown = [stored_name(name) for name in self.recorder.unsupported if stored_name(name) != name]
        if unknown := list(dict.fromkeys(unknown)):
            remedy = "give '*.experts.*' the rule 'average', or take a method that needs no curvature"
            problem = f"the curvature of {listed(unknown)} is left out: experts of a kind that is not known"
            warnings.warn(f"{problem}. Methods that need it refuse them; {remedy}.", EpimerWarning, stacklevel=3)

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
        if name in self.names:
            self.collector.add(name, gradients)

    def run(
        self, batches: Iterable[Batch], collector: Collector, names: Collection[str], stage: Stage
    ) -> dict[str, Metric]:
        """Return what a collector measures of the parameters in `names`, on all batches."""
        recorder = self.recorder
        self.collector, self.names, self.seen = collector, set(names), 0
        self.labels.restart()
        with recorder.attached():
            for batch in batches:
                if not self.learned and (batch.N > 1 or not self.seen):
                    self.learned = batch.N > 1
                    self._learn(recorder, batch)
                self._add(recorder, replace(batch, squares=self.squares), collector, stage)
        left_out = self.left_out
        metrics = collector.finish(name for name in names if name not in left_out)
        _check_finite(metrics)
        return metrics

    def warn_of_unreached(self, names: Iterable[str]) -> None:
        """Name the parameters that no gradient reached."""
        unreached = [name for name in names if name not in self.reached]
        if unrouted := [name for name in unreached if stored_name(name) != name]:
            reason = "no token was routed to them, so their curvature is 0; measure on more samples"
            warnings.warn(f"{len(unrouted)} matrices of experts, {listed(unrouted)}: {reason}.", EpimerWarning, 3)
        if unreached := [name for name in unreached if stored_name(name) == name]:
            reason = "the loss does not depend on them, so their curvature is 0"
            warnings.warn(f"no gradient reached {listed(unreached)}: {reason}.", EpimerWarning, stacklevel=3)

    def warn_of_left_out(self) -> None:
        """Name the parameters of layers that could not be measured; other bare parameters than matrices are not."""
        reasons, shapes = dict[str, list[str]](), self.collector.shapes
        for name, why in self.recorder.unsupported.items():
            matters = is_matrix(name, shapes[name]) if why == UNKNOWN else name not in self.not_matrices
            if matters and name not in self.refused and stored_name(name) == name:  # others are warned of before
                reasons.setdefault(why, []).append(name)
        if reasons:
            parts = "; ".join(f"{listed(names)} ({why})" for why, names in reasons.items())
            warn(LeftOutWarning(f"left out, without curvature: {parts}."))

    def _add(self, recorder: Recorder, batch: Batch, collector: Collector, stage: Stage) -> None:
        """Add one batch to a collector, sample by sample where a layer mixes those of a batch."""
        if batch.N > 1 and self.one_by_one:
            for n in range(batch.N):
                self._add(recorder, batch.part(n, n + 1), collector, stage)
        elif self._measure(recorder, batch, collector):
            self.seen += batch.N
            self.labels.seen = collector.samples = self.seen
            stage.advance(batch.N, "")
        else:
            self._add(recorder, batch, collector, stage)

    def _take_one_by_one(self, recorder: Recorder) -> bool:
        """Go on with batches of one where a layer to be measured was found to mix samples; return whether so."""
        found = [name for name in recorder.mixed if name not in self.incomplete]
        mixed = [name for name in found if name not in self.refused and name not in self.not_matrices]
        if not mixed or not self.divisible or self.one_by_one:
            return False
        self.one_by_one = True
        for name in found:
            del recorder.unsupported[name]
        problem = f"{listed(mixed)} mix the samples of a batch (routing, or padding that is cut)"
        warn(EpimerWarning(f"{problem}, so the model is measured with batches of one sample."))
        return True

    def _measure(self, recorder: Recorder, batch: Batch, collector: Collector) -> bool:
        """Add one batch to a collector, with one backward pass for each set of labels.

        Return False, with nothing added, where a layer mixes its samples and they are to be measured one by one.
        """
        with recorder.recording(batch.N), torch.enable_grad():
            outputs = batch.run(self.model)
            if self._take_one_by_one(recorder):
                return False
            if not self.seen:
                check_sum(self.labels.loss_fn, outputs, batch.targets, batch.N)
            collector.repeated = False
            passes = self.labels.passes(outputs, batch.targets, recorder.masks.outermost, batch.N)
            for losses, following in pairwise(chain(passes, (None,))):
                assert losses is not None
                self._check_losses(losses)
                recorder.backward(losses.sum(), again=following is not None, loss_scale=self.loss_scale)
                collector.repeated = True
            self.incomplete.update(recorder.mixed)
        return True

    def _check_losses(self, losses: Tensor) -> None:
        """Name the first sample whose loss is NaN or Inf."""
        values = losses.detach().flatten()
        if bad := (~torch.isfinite(values)).nonzero().flatten().tolist():
            sample, value = self.seen + bad[0], float(values[bad[0]])
            where = f"sample {sample}" if losses.dim() else f"a batch that starts at sample {self.seen}"
            remedy = "look at that sample, or run the model in float32 or bfloat16"
            raise SampleError(f"the loss of {where} is {value}; {remedy}.", sample)

    def _learn(self, recorder: Recorder, batch: Batch) -> None:
        """Learn on the first two samples where layers keep their samples, and check that gradients add up."""
        for variant in (batch, replace(batch, squares=True)):
            two = variant.part(0, 2)
            outputs = attempt(partial(self._probe, recorder, two))
            if not isinstance(outputs, Exception) and (batch.N == 1 or self._double(recorder, variant)):
                break
        else:  # a model that takes batches of one size only, or inputs whose first dimension is not the samples
            failure = attempt(partial(self._probe, recorder, batch))
            if isinstance(failure, EpimerError):
                raise failure
            self._check_layouts(recorder, batch)
            return
        if batch.N > 1:
            logits = find_logits(outputs)
            self.labels.check_independent(self.model, two, outputs)
            for label in dict.fromkeys(recorder.shared_outputs):
                expanded = find_logits(self._with_expanded(recorder, label, two))
                if logits is not None and expanded is not None and agree(logits, expanded):
                    recorder.expanded.add(label)
            self._check_layouts(recorder, variant.part(0, FEW))
            self.divisible, self.squares = True, variant.squares
            self._take_one_by_one(recorder)

    def _probe(self, recorder: Recorder, batch: Batch) -> Any:
        """Keep every layer's output on a few samples, and check that its gradients add up; return the outputs."""
        with recorder.probing(batch.N):
            outputs = batch.run(self.model)
            logits = find_logits(outputs)
            if logits is not None and len(logits) != batch.N:
                raise RuntimeError("the samples do not lie along the inputs' first dimension")
            recorder.check_gradients(plain_loss(self.labels.loss_fn, outputs, batch.targets, batch.N).sum())
        return outputs

    def _double(self, recorder: Recorder, batch: Batch) -> bool:
        """Learn where layers keep their samples, by running the first two samples twice; return whether that ran."""

        def run() -> Any:
            with recorder.doubling(2):
                return batch.part(0, 2, repeats=2).run(self.model)

        return not isinstance(attempt(run), Exception)

    def _with_expanded(self, recorder: Recorder, label: str, batch: Batch) -> Any:
        """Return the model's outputs with one layer's output expanded to every sample, or the exception it raised."""

        def run() -> Any:
            with recorder.expanding_output(label, batch.N):
                return batch.run(self.model)

        return attempt(run)

    def _check_layouts(self, recorder: Recorder, batch: Batch) -> None:
        """Check that the gradients of every second sample's loss are zero at the other samples, and the reverse."""
        with recorder.recording(batch.N), torch.enable_grad():
            outputs = batch.run(self.model)
            try:
                halves = every_second(self.labels.loss_fn, outputs, batch.targets, batch.N)
            except (IndexError, RuntimeError):
                self.labels.check_range(find_logits(outputs), batch.targets)
                raise
            recorder.check_layouts(halves)


def _check_finite(metrics: Mapping[str, Metric]) -> None:
    """Refuse sums that overflowed; all are checked in one tensor, to synchronise a GPU once."""
    sums = [(name, value.sum()) for name, metric in metrics.items() for value in tensors_of(metric).values()]
    finite = torch.isfinite(torch.stack([total for _, total in sums])).tolist() if sums else []
    for (name, _), ok in zip(sums, finite, strict=True):
        if not ok:
            problem = f"the curvature of {name!r} came out as NaN or Inf: gradients overflowed"
            raise CurvatureError(f"{problem}; run the model in float32 or bfloat16.")


def matching(patterns: Sequence[str], names: Collection[str], where: str) -> list[str]:
    """Return the names that match any of the patterns; refuse a pattern that matches none."""
    tensors = dict.fromkeys(map(stored_name, names))
    for pattern in patterns:
        if pattern not in names and not any(fnmatchcase(name, pattern) for name in tensors):
            problem = f"{where} has no tensor {pattern!r}.{nearest(pattern, names)} It has {listed(names)}"
            raise CurvatureError(f"{problem}; a pattern is a glob over the whole name.")
    matched = {name: any(fnmatchcase(name, pattern) for pattern in patterns) for name in tensors}
    exact = set(patterns)
    return [name for name in names if matched[stored_name(name)] or name in exact]


def _chosen(
    parameters: Mapping[str, Tensor], layers: Sequence[str] | None, basis: Mapping[str, object] | None
) -> dict[str, Tensor]:
    """Return the parameters to measure: those that match a pattern of `layers` and are in the basis, if any."""
    patterns = ["*"] if layers is None else [layers] if isinstance(layers, str) else list(layers)
    named = set(matching(patterns, parameters, "the model"))
    if missing := [name for name in basis or () if name not in parameters]:
        problem = f"the basis has {missing[0]!r}, which is not in the model.{nearest(missing[0], parameters)}"
        raise CurvatureError(f"{problem} Build the basis from models with these names.")
    chosen = {name: p for name, p in parameters.items() if name in named and (basis is None or name in basis)}
    if not chosen:
        raise CurvatureError("none of the model's tensors is in the basis and fits layers=: nothing to measure.")
    return chosen


def _check_basis(basis: Mapping[str, Any] | None, kind: str, parameters: Mapping[str, Tensor]) -> None:
    """Refuse a basis that the kind of curvature cannot be measured in, or that is not of the model's shapes."""
    if basis is None:
        if KINDS[kind].collector is None:
            raise CurvatureError(f"kind={kind!r} needs basis=: it is measured in a basis only (epimer.build_basis).")
        return
    if not KINDS[kind].bases:
        raise CurvatureError(f"kind={kind!r} cannot be projected while it is measured; use kronecker, or no basis.")
    for name, subspace in basis.items():
        if not isinstance(subspace, Basis):
            raise CurvatureError(f"basis[{name!r}] must be made by epimer.build_basis, got {type(subspace).__name__}.")
        shape, W = (len(subspace.U), len(subspace.V)), parameters[name]
        if shape != (len(W), W[0].numel()):
            matrices = f"{shape[0]} x {shape[1]} matrices, but the model's has shape {tuple(W.shape)}"
            raise CurvatureError(f"basis[{name!r}] is of {matrices}; build it from models of this shape.")
        if not isinstance(subspace, KINDS[kind].bases):
            pairs = subspace.U.shape[1] * subspace.V.shape[1]
            problem = f"kind={kind!r} on all pairs of a tensor basis would take {pairs} squared numbers"
            raise CurvatureError(f"{problem}; build a tagged basis, or measure kronecker.")


def _ties(model: nn.Module, metrics: Mapping[str, object]) -> dict[str, str]:
    """Return the other names of measured tensors -> the name they were measured under."""
    first = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name and first[id(p)] in metrics}
