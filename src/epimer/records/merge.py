"""How a merged model was made: the `epimer.json` of its folder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Self

from epimer.records.record import Record


class Status(StrEnum):
    """How a tensor's system was solved; each member tells what that means and, where it matters, what helps."""

    meaning: str
    remedy: str

    def __new__(cls, value: str, meaning: str = "", remedy: str = "") -> Status:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning, member.remedy = meaning, remedy
        return member

    EXACT = "exact", "solved in closed form"
    CONVERGED = "converged", "conjugate gradients reached the tolerance"
    DAMPED = "damped", "singular curvature, damped", "Raise damping, or measure curvature on more samples."
    STALLED = "stalled", "conjugate gradients stopped above the tolerance", "Raise iterations, or damping."
    RETRIED = (
        "retried",
        "overflowed or did not converge at first, solved in float64",
        "Look at the largest entries of the models and of their curvature.",
    )
    CLAMPED = "clamped", "too small to give every task a direction, averaged"
    NON_FINITE = (
        "non-finite",
        "a model holds NaN or Inf there, the base's tensor kept",
        "Repair that model, or leave it out.",
    )
    TIED = "tied", "shares another tensor's memory, and so its result"


@dataclass(frozen=True)
class TensorRecord:
    """How one tensor was merged."""

    rule: str
    """matrix, elementwise, average, fisher, copy or skip"""
    shape: tuple[int, ...]
    status: Status = Status.EXACT
    rank: int | None = None
    """directions kept per task, after the clamp to floor(min(m, n) / T)"""
    residual: float = 0.0
    """relative residual of the normal equations"""
    eta: float | None = None
    """F(x̄) - F(x*), where the aggregator is a mean or a sum"""
    note: str = ""
    seconds: float | None = None
    """how long it took, where it was timed"""
    unchanged: bool = False
    """whether it was merged, and the result is the base's tensor all the same"""
    error: float | None = None
    """share of the merged task vector that the rank of an adapter leaves out, ‖D - BA‖ / ‖D‖; None in a whole model"""

    @property
    def parameters(self) -> int:
        """The number of its entries; 0 where it is another tensor's."""
        return 0 if self.status == Status.TIED else math.prod(self.shape)


@dataclass(frozen=True)
class MergeRecord(Record):
    """How a merge was done: the method, its parameters and every tensor's rule."""

    kind: ClassVar[str] = "merge"
    omitted: ClassVar[frozenset[str]] = frozenset({"error", "input_files", "inputs", "lost", "places", "plugin"})

    method: str
    parameters: dict[str, Any]
    """where a value differs between tensors (see `recipe`), the first tensor's; so are the weights"""
    weights: tuple[float, ...]
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    models: tuple[tuple[str, str], ...] = ()
    """name and fingerprint of the base, if any, and of every model"""
    recipe: str = ""
    """the recipe in YAML, if there was one, without local paths"""
    request: str = ""
    """hash of what was asked for: if it is the same, so is the result"""
    files: dict[str, int] = field(default_factory=dict)
    """the output's files and their sizes"""
    version: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    """seconds of this run: `total` since the command began, and its parts: `start` of the program, `plan`, `choose` and
    merge for comparison, `measure` curvature for that, `prepass`, `merge` and `write`"""
    peak_memory: int | None = None
    """most bytes the process had in memory so far"""
    unlabelled: int | None = None
    """inputs per task, without labels, by which something was chosen or refined; None where there were none"""
    choices: tuple[str, ...] = ()
    """what was chosen for the merge and by what, in words"""
    inputs: dict[str, int] | None = None
    """inputs per task without labels, by their use: `scale` for those that chose it, `curvature` for those that it was
    measured on at the merge, `steps` for those that steps were computed from, `validation` for those that judged rounds
    and steps and had no other use but, where the models' own curvature was measured on them, that; None without any"""
    notes: tuple[str, ...] = ()
    """what the recipe says that has another meaning here, or none, in words"""
    untouched: float = 0.0
    """share of the parameters that models changed, and that were copied, skipped or merged to the base's again"""
    checksums: dict[str, str] = field(default_factory=dict)
    """the output's files, the record itself apart, and their checksums: crc32 of weights, sha256 of the others"""
    tensor_checksums: dict[str, str] = field(default_factory=dict)
    """CRC-32 of the data of every tensor under its name in the files"""
    measured: tuple[tuple[str, str], ...] = ()
    """name and fingerprint of every model's curvature and of the basis, where there are any"""
    input_files: tuple[tuple[str, str], ...] | None = None
    """name and SHA-256 of every file that was read for tensors and curvature, where that was asked for"""
    environment: dict[str, str] = field(default_factory=dict)
    """what the last digits depend on: the version of torch, the kind of device, the number of threads"""
    lost: tuple[str, ...] | None = None
    """tensors that models changed and that were merged to the base's again; None for none"""
    places: str | None = None
    """the recipe in YAML with the inputs' paths relative to the output's folder; None where `verify` goes by names"""

    date: str = ""
    """when it was merged, as 2026-01-31 12:00 UTC; of this run only"""
    dtypes: dict[str, int] = field(default_factory=dict)
    """dtype -> how many of the output's parameters have it"""
    plugin: tuple[str, str] | None = None
    """name and SHA-256 of the Python file that the method is from, if it was named with --plugin"""

    @property
    def shares(self) -> dict[str, float]:
        """The share of the parameters that each rule was applied to."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.rule] += tensor.parameters
        return {rule: count / max(1, counts.total()) for rule, count in counts.most_common()}

    def lasting(self) -> dict[str, Any]:
        """Return what does not change from run to run, for the output folder: no date, no timings, no memory."""
        kept = {k: v for k, v in self.to_dict().items() if k not in ("date", "timings", "peak_memory")}
        for tensor in kept["tensors"].values():
            del tensor["seconds"]
        return kept

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "the record") -> Self:
        """Return the record that `to_dict` or `lasting` wrote; older ones name no format."""
        return super().from_dict({"format": 1, **data}, where)
