"""Measure curvature from per-sample gradients, with one ordinary forward and backward pass per batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epimer.checkpoints.memory import unwrapped
from epimer.curvature.basis import basis_fingerprint
from epimer.curvature.collectors import Collector
from epimer.curvature.curvature import SEQUENCES, Curvature
from epimer.curvature.exact import projected_hessians
from epimer.curvature.experts import members
from epimer.curvature.format import Provenance, model_fingerprint
from epimer.curvature.gradient_passes import Measurement
from epimer.curvature.kinds import KINDS, Kind
from epimer.curvature.model_calls import eval_mode
from epimer.curvature.passes import Passes, plan_passes
from epimer.errors import CurvatureError, ParameterError, TooLargeError, listed, nearest
from epimer.geometry.metric import Metric
from epimer.geometry.subspace import Basis
from epimer.methods.rules import stored_name
from epimer.progress import Progress
from epimer.tasks.batches import IGNORED, Batch, read_batches
from epimer.tasks.labels import POLICIES, Labels, Loss, ignoring
from epimer.tasks.model_loss import own_loss, prepared


def estimate_curvature(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Loss | None = None,
    *,
    kind: str = "kronecker",
    labels: str = "model",
    ignore_index: int = IGNORED,
    samples: int | None = 256,
    basis: Mapping[str, Basis] | Callable[[], Mapping[str, Basis]] | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    sequence: str = "expand",
    layers: Sequence[str] | None = None,
    passes: int | None = None,
    scratch: str | Path | None = None,
    progress: bool = True,
    total: int | None = None,
    announce: Callable[[int, int], None] | None = None,
) -> Curvature:
    """Measure the curvature of a model's loss, for use in any later merge.

    Args:
        model: any PyTorch model; it is run in eval mode and left as it was. Frozen parameters are measured too.
        batches: pairs (inputs, targets); inputs is a tensor, a tuple or a dict, and is passed to the model accordingly.
            Or dicts and BatchEncodings, whose `labels` are the targets and the rest the inputs. Targets may be None
            where labels are the model's own. All are kept for kind "ekfac" and for several passes.
        loss_fn: takes (outputs, targets) and returns a loss per sample, or their sum. None takes the loss that a
            Hugging Face model computes of its labels, where that is a cross-entropy, its tokens summed, or CTC.
        kind: diagonal, kronecker, ekfac, samples; or hessian, ggn, which need a basis.
        labels: model, sampled from the model's own prediction; true, the targets; expected, every class, weighted by
            the model's probability.
        ignore_index: the target that is ignored.
        samples: stop after this many; None takes all.
        basis: from `build_basis`; only the curvature in its subspace is measured and kept. A function that returns a
            basis is called only where the whole curvature would fit neither in memory nor on disk.
        dtype: of the sums; by default float32, or float64 where the model is.
        seed: of the sampled labels.
        sequence: expand (tokens count one by one) or reduce (a sample is its mean input and summed gradient).
        layers: name patterns of the tensors to measure; by default all that can be.
        passes: over the data, each of which measures some of the tensors, so that their sums fit in memory; by default
            as many as the free memory asks for. The result is the same. That of several passes lies on the CPU.
        scratch: folder for finished tensors that memory cannot hold; by default the system's for temporary files.
        progress: show a progress bar on a terminal.
        total: the number of samples, for the progress bar, where `samples` is None.
        announce: called before any sample is measured, with the number of tensors and at most the bytes that a folder
            of their curvature takes; of kind "samples" without a basis for each token.

    Returns:
        The curvature, by tensor name; `.save(folder)` writes it to disk.
    """
    _check_settings(kind, labels, sequence, samples, passes, dtype)
    if loss_fn is not None and ignore_index >= 0 and labels != "true":
        problem = f"labels={labels!r} may give a place the label {ignore_index}, which loss_fn ignores"
        raise ParameterError(f"{problem}; leave out loss_fn, use labels='true', or ignore a number below 0.")
    model, row = unwrapped(model), KINDS[kind]
    stored: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    if not stored:
        raise CurvatureError("the model has no parameters, so there is nothing to measure.")
    wide = any(p.dtype == torch.float64 for p in stored.values())
    dtype = dtype or (torch.float64 if wide else torch.float32)
    parameters = members(stored)
    build = basis if callable(basis) else None
    if build is not None:
        basis = build() if row.collector is None else None
    assert not callable(basis)
    if row.collector is None:  # second derivatives are taken of parameters, not of parts of them
        parameters = {name: p for name, p in parameters.items() if name in stored}
        basis = {name: one for name, one in (basis or {}).items() if stored_name(name) == name} or None
    chosen = _chosen(parameters, layers, basis)
    _check_basis(basis, kind, parameters)
    first = next(iter(chosen.values()))
    given = prepared(model, read_batches(batches, samples, first.device, ignore_index), own=loss_fn is None)
    loss_fn, read = _loss_and_batches(model, given, loss_fn, ignore_index)
    policy = Labels(labels, loss_fn, seed)
    with Progress(progress, unit="samples") as bar:
        if row.collector is None:
            assert basis is not None
            measured = Measured(*projected_hessians(model, read, policy, kind, basis, chosen, dtype, bar))
        else:
            planned = partial(_plan, model, row, policy, dtype, sequence, passes, scratch)
            try:
                measurement, collector, plan = planned(chosen, basis)
            except TooLargeError:
                if build is None:
                    raise
                basis = build()
                chosen = _chosen(parameters, layers, basis)
                _check_basis(basis, kind, parameters)
                measurement, collector, plan = planned(chosen, basis)
            collector.warn_of_refused()
            if announce is not None:
                sizes = _stored_bytes(row, collector, measurement.measurable)
                announce(len(sizes), sum(sizes))
            measured = _measure_in_passes(measurement, collector, row, read, plan, bar, samples or total)
    metrics = measured.metrics
    if not metrics:
        why = f" ({next(iter(measured.left_out.values()))})" if measured.left_out else ""
        remedy = "kronecker and samples know nn.Linear, nn.Conv2d and GPT-2's Conv1D, diagonal also tables and norms"
        raise CurvatureError(f"none of the chosen tensors can be measured as {kind}{why}; {remedy}.")
    counts = {name: measured.tokens[name] for name in metrics if name in measured.tokens}
    provenance = Provenance(
        kind=kind,
        samples=measured.samples,
        tokens=max(counts.values(), default=None),
        labels=labels,
        seed=seed,
        dtype=str(dtype).removeprefix("torch."),
        compute=str(first.dtype).removeprefix("torch."),
        sequence=sequence,
        model=model_fingerprint({name: stored[name] for name in map(stored_name, metrics)}),
        basis=None if basis is None else basis_fingerprint(basis),
        counts=counts,
        left_out=measured.left_out,
        ties=_ties(model, metrics),
    )
    return Curvature(metrics, provenance)


def _plan(
    model: nn.Module,
    row: Kind,
    policy: Labels,
    dtype: torch.dtype,
    sequence: str,
    passes: int | None,
    scratch: str | Path | None,
    chosen: Mapping[str, Tensor],
    basis: Mapping[str, Basis] | None,
) -> tuple[Measurement, Collector, Passes]:
    """Return what measures the chosen tensors, what sums them up, and in which passes; refuse what fits nowhere."""
    assert row.collector is not None
    shapes, device = {name: p.shape for name, p in chosen.items()}, next(iter(chosen.values())).device
    collector = row.collector(shapes, dtype, device, basis=basis, reduce=sequence == "reduce")
    measurement = Measurement(model, collector, policy)
    sizes = _bytes_of_sums(row, collector, measurement.measurable)
    return measurement, collector, plan_passes(sizes, device, passes, None if scratch is None else Path(scratch))


@dataclass(frozen=True)
class Measured:
    """Tensors' curvature, on how many samples and tokens, and which tensors could not be measured, with the reason."""

    metrics: dict[str, Metric]
    samples: int
    tokens: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def _check_settings(
    kind: str, labels: str, sequence: str, samples: int | None, passes: int | None, dtype: torch.dtype | None
) -> None:
    """Refuse settings of `estimate_curvature` that are out of range, each by its name."""
    for name, value, known in (("kind", kind, KINDS), ("labels", labels, POLICIES), ("sequence", sequence, SEQUENCES)):
        if value not in tuple(known):
            raise ParameterError(f"The {name!r} parameter must be one of {', '.join(known)}. Got {value!r} instead.")
    if passes is not None and KINDS[kind].collector is None:
        raise ParameterError(f"kind={kind!r} measures one tensor after the other; leave out passes= (--passes).")
    for name, count in (("samples", samples), ("passes", passes)):
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ParameterError(f"The {name!r} parameter must be an integer at least 1, or None. Got {count!r}.")
    if dtype not in (None, torch.float32, torch.float64):
        raise ParameterError(f"The 'dtype' parameter must be torch.float32 or torch.float64. Got {dtype}.")


def _loss_and_batches(
    model: nn.Module, batches: Iterator[Batch], loss_fn: Loss | None, ignore_index: int
) -> tuple[Loss, Iterable[Batch]]:
    """Return the loss, the model's own where none is given, and the batches; the model's own is seen from the first."""
    if loss_fn is not None:
        return loss_fn if ignore_index == IGNORED else ignoring(loss_fn, ignore_index), batches
    first = next(batches)
    with eval_mode(model):
        return own_loss(model, first), chain((first,), batches)


def _bytes_of_sums(row: Kind, collector: Collector, names: Iterable[str]) -> dict[str, int]:
    """Return the bytes of each tensor's sums; of a kind with a second pass also what that one adds."""
    sizes = {name: collector.dtype.itemsize * collector.numbers(name) for name in names}
    if row.refine is None:
        return sizes
    # factors, their eigenvectors, and what is summed along them
    return {name: 2 * size + collector.dtype.itemsize * collector.shapes[name].numel() for name, size in sizes.items()}


def _stored_bytes(row: Kind, collector: Collector, names: Sequence[str]) -> list[int]:
    """Return the bytes that each tensor's curvature takes in a folder."""
    if row.refine is None:
        return [collector.dtype.itemsize * collector.stored_numbers(name) for name in names]
    # eigenvectors of both factors, which are not symmetric, and what is summed along them
    return [collector.dtype.itemsize * (collector.numbers(n) + collector.shapes[n].numel()) for n in names]


def _measure_in_passes(
    measurement: Measurement,
    collector: Collector,
    row: Kind,
    batches: Iterable[Batch],
    passes: Passes,
    bar: Progress,
    samples: int | None,
) -> Measured:
    """Measure tensors from per-sample gradients, in passes over the data; `samples` are those of a pass, if known."""
    metrics: dict[str, Metric] = {}
    if row.refine is not None or len(passes) > 1:
        batches = list(batches)
    for number, names in enumerate(passes, 1):
        of = f", pass {number} of {len(passes)}" if len(passes) > 1 else ""
        finished = measurement.run(batches, collector, names, bar.begin(f"measuring{of}", samples))
        if row.refine is not None and finished:
            second = row.refine(finished, collector.dtype, collector.device)
            finished = measurement.run(batches, second, second.shapes, bar.begin(f"correcting{of}", samples))
        while finished:  # one by one, so that no more than one is there twice
            name = next(iter(finished))
            metrics[name] = passes.keep(finished.pop(name))
    left_out = measurement.left_out
    metrics = {name: metric for name, metric in metrics.items() if name not in left_out}
    measurement.warn_of_unreached(metrics)
    measurement.warn_of_left_out()
    kept = set(map(stored_name, metrics))  # a tensor none of whose parts is kept is left out as a whole
    left_out = {name if (n := stored_name(name)) in kept else n: why for name, why in left_out.items()}
    return Measured(metrics, collector.samples, collector.tokens, left_out)


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
