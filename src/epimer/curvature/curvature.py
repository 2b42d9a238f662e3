"""A measurement: each tensor's curvature, and what was measured on what."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import epimer
from epimer.curvature.collectors import padded
from epimer.errors import CurvatureError, listed
from epimer.geometry.metric import Kronecker, Metric, Projected, Samples

if TYPE_CHECKING:
    from torch import nn

    from epimer.checkpoints.safetensors import SafetensorsFile

KINDS = ("diagonal", "kronecker", "ekfac", "samples", "hessian", "ggn")
SEQUENCES = ("expand", "reduce")
EXACT = ("hessian", "ggn")  # kinds that are projected in any case


@dataclass(frozen=True)
class About:
    """What was measured, on what."""

    kind: str
    samples: int | None = None
    tokens: int | None = None
    """real tokens that the widest-read tensor saw; equal to samples where there is no sequence"""
    labels: str | None = None
    seed: int | None = None
    dtype: str = "float32"
    """of the sums"""
    compute: str | None = None
    """dtype of the model"""
    sequence: str = "expand"
    """how a sample's tokens enter Kronecker factors: expand or reduce"""
    source: str = "data"
    """data, or which moment of an optimiser's state"""
    model: str | None = None
    """fingerprint of the measured tensors, see `model_fingerprint`"""
    basis: str | None = None
    """fingerprint of the basis it is projected on"""
    version: str = epimer.__version__
    counts: Mapping[str, int] = field(default_factory=dict)
    """tensor -> its real tokens"""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """tensors that were not measured, and why"""
    ties: Mapping[str, str] = field(default_factory=dict)
    """other names of a tensor -> the one it is stored under"""


class Curvature(Mapping[str, Metric]):
    """Curvature of one model: tensor name -> Diagonal, Kronecker, EKFAC, Samples or Projected.

    `a + b` is the measurement of both data sets, where they are disjoint.
    """

    def __init__(self, metrics: Mapping[str, Metric], about: About, *, where: str = "curvature") -> None:
        self.metrics, self.about, self.where = metrics, about, where
        self.file: SafetensorsFile | None = None
        """where it was loaded from"""

    @property
    def kind(self) -> str:
        """What was measured: diagonal, kronecker, ekfac, samples, hessian or ggn."""
        return self.about.kind

    def __getitem__(self, name: str) -> Metric:
        metric = self.metrics[self.about.ties.get(name, name)]
        if self.kind == "hessian" and isinstance(metric, Projected):
            return replace(metric, H=_clip(metric)[0])
        return metric

    def __contains__(self, name: object) -> bool:
        return name in self.metrics or self.about.ties.get(str(name)) in self.metrics

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)

    def __repr__(self) -> str:
        projected = ", projected" if self.about.basis else ""
        return f"Curvature({self.kind}{projected}, {len(self)} tensors, {self.about.samples} samples)"

    @property
    def clipped(self) -> dict[str, float]:
        """The share of each projected Hessian's spectrum that is negative, and so taken as 0."""
        found = {}
        if self.kind == "hessian":
            found = {name: _clip(metric)[1] for name, metric in self.metrics.items() if isinstance(metric, Projected)}
        return {name: share for name, share in found.items() if share > 0}

    @property
    def nbytes(self) -> int:
        """The bytes of all its numbers."""
        return sum(self.size(name) for name in self)

    def size(self, name: str) -> int:
        """Return the bytes one tensor's curvature takes."""
        name = self.about.ties.get(name, name)
        if stored := getattr(self.metrics, "size", None):
            return stored(name)
        return sum(value.nbytes for value in tensors_of(self.metrics[name]).values())

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write a folder that recipes and `Curvature.load` read; it appears whole or not at all."""
        from epimer.curvature.format import save_curvature

        save_curvature(self, Path(folder), overwrite=overwrite)

    @classmethod
    def load(cls, folder: str | Path) -> Curvature:
        """Open a curvature folder; tensors are read when they are asked for."""
        from epimer.curvature.format import open_curvature

        return open_curvature(Path(folder).expanduser())

    @classmethod
    def from_optimizer(
        cls, path: str | Path, model: nn.Module, *, moment: str = "second", names: list[str] | None = None
    ) -> Curvature:
        """Read a diagonal from the state of Adam or AdamW, without any data.

        Args:
            path: a saved optimiser state, or a Trainer's checkpoint folder with `optimizer.pt`.
            model: the model it trained; its parameters' order gives the state their names.
            moment: second, Adam's mean of squared gradients; or first, its squared mean gradient.
            names: the parameters in the optimiser's order, where that cannot be told.
        """
        from epimer.curvature.format import model_fingerprint
        from epimer.curvature.optimizer_state import moments

        found = moments(path, model, moment=moment, names=names)
        parameters = {name: p for name, p in model.named_parameters() if name in found}
        about = About("diagonal", source=f"optimizer, {moment} moment", model=model_fingerprint(parameters))
        return cls(found, about)

    def renamed(self, names: Mapping[str, str]) -> Curvature:
        """Return what was measured under other names; what has none is left out."""

        def under(given: Mapping[str, Any]) -> dict[str, Any]:
            return {names[name]: value for name, value in given.items() if name in names}

        ties = {name: names[twin] for name, twin in self.about.ties.items() if twin in names}
        about = replace(self.about, counts=under(self.about.counts), left_out=under(self.about.left_out), ties=ties)
        return Curvature(under(self.metrics), about)

    def __add__(self, other: Curvature) -> Curvature:
        if not isinstance(other, Curvature):
            raise CurvatureError(f"only curvature can be added to curvature, got {type(other).__name__}.")
        about = joined([self.about, other.about])
        odd = set(self) ^ set(other)
        if odd:
            raise CurvatureError(f"only one of the measurements has {listed(sorted(odd))}; measure the same layers.")
        abouts = [self.about, other.about]
        return Curvature({name: mean(name, [self.metrics[name], other.metrics[name]], abouts) for name in self}, about)

    def summed_over_ranks(self) -> Curvature:
        """Return the sum of the measurements of all ranks of torch.distributed; every rank gets it."""
        from epimer.curvature.distributed import sum_over_ranks

        return sum_over_ranks(self)


def _clip(metric: Projected) -> tuple[Tensor, float]:
    """Return H without its negative part, and the share of the spectrum that was negative."""
    assert metric.H is not None
    values, vectors = torch.linalg.eigh(metric.H.double())
    total = float(values.abs().sum())
    clipped = (vectors * values.clamp_min(0)) @ vectors.T
    return clipped.to(metric.H.dtype), float(values.clamp_max(0).abs().sum()) / total if total else 0.0


def tensors_of(metric: Metric) -> dict[str, Tensor]:
    """Return a metric's tensors by the letters they are stored under."""
    every = {f.name: getattr(metric, f.name) for f in fields(metric)}  # type: ignore[arg-type]
    return {name: value for name, value in every.items() if isinstance(value, Tensor)}


def joined(abouts: Sequence[About]) -> About:
    """Return what measurements of disjoint data are together; refuse those that do not belong together."""
    first = abouts[0]
    if any(about.kind == "ekfac" for about in abouts):
        raise CurvatureError(
            "EKFAC-corrected curvature cannot be added: each measurement has eigenvectors of its own; "
            "measure kind='ekfac' on all data at once, or add kind='kronecker'."
        )
    for what in ("kind", "model", "basis", "labels", "sequence"):
        found = [getattr(about, what) for about in abouts]
        if len(set(found)) > 1:
            raise CurvatureError(
                f"curvature of different {what} cannot be added: {found[0]} and "
                f"{next(value for value in found if value != found[0])}; measure both alike."
            )
    if any(about.samples is None for about in abouts):
        raise CurvatureError("an optimiser's moments cannot be added: they are not a mean over samples.")
    return replace(
        first,
        samples=sum(about.samples or 0 for about in abouts),
        tokens=None if first.tokens is None else sum(about.tokens or 0 for about in abouts),
        seed=first.seed if all(about.seed == first.seed for about in abouts) else None,
        counts={name: sum(about.counts.get(name, 0) for about in abouts) for name in first.counts},
        left_out={name: why for about in abouts for name, why in about.left_out.items()},
    )


def mean(name: str, metrics: Sequence[Any], abouts: Sequence[About]) -> Metric:
    """Return one tensor's curvature over several sets of data."""
    x = metrics[0]
    samples = [about.samples or 0 for about in abouts]
    tokens = [about.counts.get(name, 0) for about in abouts] if abouts[0].sequence == "expand" else samples

    def weighed(part: str, counts: Sequence[int]) -> Tensor:
        parts = [getattr(metric, part) for metric in metrics]
        total = torch.zeros_like(parts[0], dtype=torch.float64)
        for one, count in zip(parts, counts, strict=True):
            total.add_(one.to(total), alpha=count)
        return (total / max(1, sum(counts))).to(parts[0].dtype)

    if isinstance(x, Kronecker) or (isinstance(x, Projected) and x.H is None):
        gradients, inputs = ("G", "A") if x.inputs else ("A", "G")
        changes: dict[str, Any] = {gradients: weighed(gradients, samples), inputs: weighed(inputs, tokens)}
        return replace(x, **changes)
    if isinstance(x, Samples):
        rows = sum(len(metric.g) for metric in metrics)
        shares = [math.sqrt(n * rows / (sum(samples) * len(m.g))) for n, m in zip(samples, metrics, strict=True)]
        g = padded([metric.g * share for metric, share in zip(metrics, shares, strict=True)])
        return Samples(g=g, x=padded([metric.x for metric in metrics]))
    (part,) = tensors_of(x)
    return replace(x, **{part: weighed(part, samples)})
