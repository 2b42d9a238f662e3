"""A model's curvature: each tensor's metric, and the provenance of the measurement."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from epimer.checkpoints.safetensors import SafetensorsFile
from epimer.curvature.distributed import ranks
from epimer.curvature.format import Provenance, StoredMetrics, model_fingerprint, save_curvature
from epimer.curvature.imported_factors import factors_of, read_factor_sums
from epimer.curvature.kept_inputs import KeptInputs, read_inputs
from epimer.curvature.kinds import KINDS, tensors_of
from epimer.curvature.optimizer_state import moments
from epimer.errors import CurvatureError, listed
from epimer.geometry.decompositions import eigh
from epimer.geometry.metric import Diagonal, Metric, Projected, Samples
from epimer.methods.rules import is_stack, member_name

SEQUENCES = ("expand", "reduce")


class Curvature(Mapping[str, Metric]):
    """Curvature of one model: a mapping from tensor names to metrics, one for each measured tensor.

    `a + b` is the measurement of both data sets, where they are disjoint; it keeps no inputs.
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        provenance: Provenance,
        *,
        where: str = "curvature",
        inputs: KeptInputs | Callable[[], KeptInputs | None] | None = None,
    ) -> None:
        self.metrics, self.provenance, self.where, self._inputs = metrics, provenance, where, inputs
        self.file: SafetensorsFile | None = None  # the file it was loaded from

    @property
    def kind(self) -> str:
        """The kind of curvature: diagonal, kronecker, ekfac, samples, hessian or ggn."""
        return self.provenance.kind

    @cached_property
    def inputs(self) -> KeptInputs | None:
        """The unlabelled inputs it was measured on, read and checked at the first access; None if not kept."""
        return self._inputs() if callable(self._inputs) else self._inputs

    @property
    def about(self) -> Provenance:
        """The provenance, under the name it had first."""
        return self.provenance

    def __getitem__(self, name: str) -> Metric:
        metric = self.metrics[self.provenance.ties.get(name, name)]
        if KINDS[self.kind].indefinite and isinstance(metric, Projected):
            return replace(metric, H=_clip(metric)[0])
        return metric

    def __contains__(self, name: object) -> bool:
        return name in self.metrics or self.provenance.ties.get(str(name)) in self.metrics

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)

    def __repr__(self) -> str:
        projected = ", projected" if self.provenance.basis else ""
        return f"Curvature({self.kind}{projected}, {len(self)} tensors, {self.provenance.samples} samples)"

    @property
    def clipped(self) -> dict[str, float]:
        """The share of each tensor's spectrum that is negative and taken as 0, where there is any (kind hessian)."""
        if not KINDS[self.kind].indefinite:
            return {}
        shares = {name: _clip(metric)[1] for name, metric in self.metrics.items() if isinstance(metric, Projected)}
        return {name: share for name, share in shares.items() if share > 0}

    @property
    def nbytes(self) -> int:
        """The size of all its tensors."""
        return sum(self.size(name) for name in self)

    def size(self, name: str) -> int:
        """Return the bytes of one tensor's curvature."""
        name = self.provenance.ties.get(name, name)
        if stored := getattr(self.metrics, "size", None):
            return stored(name)
        return sum(value.nbytes for value in tensors_of(self.metrics[name]).values())

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write a folder that recipes and `Curvature.load` read; an interrupted write leaves no folder."""
        save_curvature(self.metrics, self.provenance, Path(folder), inputs=self.inputs, overwrite=overwrite)
        if (
            self.file is not None
            and self.file.path.exists()
            and self.file.path.parent.samefile(os.path.expanduser(folder))
        ):
            written = Curvature.load(folder, self.where)  # onto itself: what is read from now on is in the new file
            self.metrics, self.file = written.metrics, written.file

    @classmethod
    def load(cls, folder: str | Path, where: str = "") -> Curvature:
        """Open a curvature folder, called `where` in messages; each tensor is read from disk when it is accessed."""
        stored = StoredMetrics(Path(os.path.expanduser(folder)), where)
        inputs = partial(read_inputs, stored.folder, stored.inputs_header, stored.where)
        curvature = cls(stored, stored.provenance, where=stored.where, inputs=inputs)
        curvature.file = stored.file
        return curvature

    @classmethod
    def from_optimizer(
        cls, path: str | Path, model: nn.Module, *, moment: str = "second", names: list[str] | None = None
    ) -> Curvature:
        """Read a diagonal from the state of Adam or AdamW, without any data.

        Args:
            path: a saved optimiser state, or a Trainer's checkpoint folder with `optimizer.pt`.
            model: the model it trained; its parameters' order gives the state their names.
            moment: second, Adam's mean of squared gradients; or first, its squared mean gradient.
            names: the parameters' names in the optimiser's order, where the order is ambiguous.
        """
        diagonals = moments(path, model, moment=moment, names=names)
        fingerprint = model_fingerprint({name: p for name, p in model.named_parameters() if name in diagonals})
        metrics: dict[str, Metric] = {}
        for name, metric in diagonals.items():
            stacked = is_stack(name, metric.F.shape)
            metrics |= (
                {member_name(name, e): Diagonal(F) for e, F in enumerate(metric.F)} if stacked else {name: metric}
            )
        return cls(metrics, Provenance("diagonal", source=f"optimizer, {moment} moment", model=fingerprint))

    @classmethod
    def from_factors(cls, folder: str | Path, model: nn.Module, *, samples: int | None = None) -> Curvature:
        """Read Kronecker factors that kronfluence or bergson measured.

        Args:
            folder: kronfluence's `factors_NAME`, or a run of bergson's with method kfac.
            model: the model they were measured on; its layers' names and shapes are compared, not its values.
            samples: how many samples they were measured on, which bergson does not store. Without it G is a mean over
                tokens, so that its scale differs from a measurement's.
        """
        sums = read_factor_sums(Path(folder).expanduser())
        metrics, left_out = factors_of(model, sums, samples)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        provenance = Provenance(
            "kronecker",
            source=f"factors of {sums.source}",
            samples=samples or sums.samples,
            tokens=max(sums.tokens.values()),
            dtype=str(next(iter(metrics.values())).A.dtype).removeprefix("torch."),  # type: ignore[union-attr]
            model=model_fingerprint({name: parameters[name] for name in metrics}),
            left_out=left_out,
        )
        return cls(metrics, provenance)

    def renamed(self, names: Mapping[str, str]) -> Curvature:
        """Return the curvature under other tensor names, old -> new; tensors without a new name are dropped."""

        def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
            return {names[name]: value for name, value in values.items() if name in names}

        old = self.provenance
        ties = {name: names[twin] for name, twin in old.ties.items() if twin in names}
        provenance = replace(old, counts=renamed(old.counts), left_out=renamed(old.left_out), ties=ties)
        return Curvature(renamed(self.metrics), provenance, inputs=self._inputs)

    def __add__(self, other: Curvature) -> Curvature:
        if not isinstance(other, Curvature):
            raise CurvatureError(f"only curvature can be added to curvature, got {type(other).__name__}.")
        return sum_of([self, other])

    def summed_over_ranks(self) -> Curvature:
        """Return the measurement of all ranks' data together, on every rank; one tensor is exchanged at a time."""
        _, count = ranks()
        if count == 1:
            return self
        gathered: list[Any] = [None] * count
        dist.all_gather_object(gathered, (self.provenance, list(self)))
        provenances = [provenance for provenance, _ in gathered]
        combined = combined_provenance(provenances)
        if any(names != list(self) for _, names in gathered):
            raise CurvatureError("the ranks measured different tensors; give every rank the same model and layers.")
        total: dict[str, Any] = {}
        for name, metric in self.metrics.items():
            dtype = next(iter(tensors_of(metric).values())).dtype
            own: Any = metric.to(torch.device("cpu"), dtype)
            dist.all_gather_object(gathered, replace(own, basis=None) if isinstance(own, Projected) else own)
            total[name] = add_metrics(name, gathered, provenances)
            if isinstance(own, Projected):
                total[name] = replace(total[name], basis=own.basis)  # every rank has it, so it is not sent
        return Curvature(total, combined)


def _clip(metric: Projected) -> tuple[Tensor, float]:
    """Return H with its negative eigenvalues set to 0, and the share of the spectrum that was negative."""
    assert metric.H is not None
    values, vectors = eigh(metric.H.double())
    total = float(values.abs().sum())
    clipped = (vectors * values.clamp_min(0)) @ vectors.T
    return clipped.to(metric.H.dtype), float(values.clamp_max(0).abs().sum()) / total if total else 0.0


def sum_of(parts: Sequence[Curvature]) -> Curvature:
    """Return the measurement of several disjoint data sets together; it keeps no inputs."""
    provenances = [part.provenance for part in parts]
    provenance = combined_provenance(provenances)
    if odd := set[str]().union(*parts) - set(parts[0]).intersection(*parts[1:]):
        raise CurvatureError(f"only one of the measurements has {listed(sorted(odd))}; measure the same layers.")
    metrics = {name: add_metrics(name, [part.metrics[name] for part in parts], provenances) for name in parts[0]}
    return Curvature(metrics, provenance)


def combined_provenance(provenances: Sequence[Provenance]) -> Provenance:
    """Return the provenance of measurements of disjoint data together; refuse those that cannot be added."""
    first = provenances[0]
    if fixed := [provenance.kind for provenance in provenances if KINDS[provenance.kind].add is None]:
        problem = f"{fixed[0]} curvature cannot be added: each measurement has coordinates of its own"
        raise CurvatureError(f"{problem}; measure kind={fixed[0]!r} on all data at once, or add kind='kronecker'.")
    for key in ("kind", "model", "at", "basis", "labels", "sequence"):
        values = list(dict.fromkeys(getattr(provenance, key) for provenance in provenances))
        if len(values) > 1:
            problem = f"curvature of different {key} cannot be added: {values[0]} and {values[1]}"
            raise CurvatureError(f"{problem}; measure both alike.")
    if any(provenance.samples is None for provenance in provenances):
        raise CurvatureError("an optimiser's moments cannot be added: they are not a mean over samples.")
    return replace(
        first,
        samples=sum(provenance.samples or 0 for provenance in provenances),
        tokens=None if first.tokens is None else sum(provenance.tokens or 0 for provenance in provenances),
        seed=first.seed if all(provenance.seed == first.seed for provenance in provenances) else None,
        counts={name: sum(provenance.counts.get(name, 0) for provenance in provenances) for name in first.counts},
        left_out={name: why for provenance in provenances for name, why in provenance.left_out.items()},
    )


def add_metrics(name: str, metrics: Sequence[Metric], provenances: Sequence[Provenance]) -> Metric:
    """Return one tensor's curvature on several data sets together."""
    own = slice(2, None) if isinstance(metrics[0], Samples) else slice(None)  # of samples, not their number and tokens
    shapes = [{part: W.shape[own] for part, W in tensors_of(metric).items()} for metric in metrics]
    if any(other != shapes[0] for other in shapes):
        raise CurvatureError(f"the measurements of {name!r} have different shapes; measure the same model alike.")
    samples = [provenance.samples or 0 for provenance in provenances]
    by_token = provenances[0].sequence == "expand"
    tokens = [provenance.counts.get(name, 0) for provenance in provenances] if by_token else samples
    add = KINDS[provenances[0].kind].add
    assert add is not None
    return add(metrics, samples, tokens)
