"""What a merge or a diagnosis found, as plain dataclasses that turn into JSON. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


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
    CLAMPED = "clamped", "too small to give every task a direction, averaged"
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


@dataclass(frozen=True)
class MergeRecord:
    """How a merge was done: the method, its parameters and every tensor's rule."""

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
    """seconds of the pre-pass, of the merge and in all; of this run only"""
    peak_memory: int | None = None
    """most bytes the process had in memory so far"""

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON-ready values."""
        return asdict(self)

    def lasting(self) -> dict[str, Any]:
        """Return what is true of the result whoever made it: no timings, no memory."""
        kept = {k: v for k, v in self.to_dict().items() if k not in ("timings", "peak_memory")}
        for tensor in kept["tensors"].values():
            del tensor["seconds"]
        return kept

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> MergeRecord:
        """Return the record that `to_dict` or `lasting` wrote down."""
        tensors = {
            name: TensorRecord(**{**tensor, "shape": tuple(tensor["shape"]), "status": Status(tensor["status"])})
            for name, tensor in given["tensors"].items()
        }
        models = tuple((name, fingerprint) for name, fingerprint in given["models"])
        return cls(**{**given, "weights": tuple(given["weights"]), "tensors": tensors, "models": models})


@dataclass(frozen=True)
class LayerDiagnosis:
    """The theory of one layer, or of the whole model: sums over layers, worst condition.

    H_t is the raw curvature (loss units); H̃_t the one the solve uses: projected, mean diagonal 1, damped.
    """

    eta: float
    """cᵀH̄⁻¹c = F(x̄) - F(x*) under H̃: what curvature gains over the flat mean"""
    eta_unit_trace: float
    """the same with each projected curvature scaled to trace 1, as the paper words it"""
    flat_objective: float
    """F(x̄) under H̃"""
    v_s: float
    """subspace Fréchet variance at x*, under H"""
    v_s_solve: float
    """the same under H̃: F(x*)"""
    r_s: float | None
    """residual energy lost by the projection, under H; None where only projected curvature is known"""
    bound: float | None
    """½(√V_S + √R_S)²: bounds the λ-weighted loss increase to second order"""
    energy_kept: float
    """share of Σ λ_t ‖D_t‖² that lies in the basis"""
    energy_kept_by_task: tuple[float, ...]
    condition: float
    """condition number of H̄ as solved"""
    damped: int
    """eigenvalues of the undamped H̄ below the damping"""
    rank: int | None
    """directions kept per task; None for a total"""

    @property
    def eta_fraction(self) -> float:
        """η as a share of F(x̄): 0 means that curvature cannot help, 1 that it removes all conflict."""
        return self.eta / self.flat_objective if self.flat_objective > 0 else 0.0


Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Conflict:
    """How task vectors stand to each other, task by task; all but `interference` are symmetric."""

    cosine: Matrix
    """⟨D_s, D_t⟩ / ‖D_s‖‖D_t‖"""
    sign: Matrix
    """share of the entries in which both moved, and in the same direction"""
    left: Matrix
    """‖U_sᵀU_t‖² / k of the leading left singular vectors: 0 apart, 1 the same subspace"""
    right: Matrix
    """the same of the right ones"""
    interference: Matrix
    """row s, column t: D_sᵀH_tD_s / D_tᵀH_tD_t, what adding task s does to task t, in units of task t's own step"""


@dataclass(frozen=True)
class LayerFindings:
    """What was found of one matrix."""

    shape: tuple[int, ...]
    theory: LayerDiagnosis
    norms: tuple[float, ...]
    """‖D_t‖"""
    base_norm: float
    energy: dict[str, tuple[float, ...]]
    """rank k -> share of each task vector's energy in the span of all pairs u_i v_jᵀ of the basis of rank k"""
    forecast: dict[str, tuple[float, ...]]
    """method -> share of each task's gain that its merge is forecast to lose in this layer"""
    conflict: Conflict | None = None


@dataclass(frozen=True)
class Forecast:
    """What the quadratic model says of a merge: ‖x - D_t‖² / ‖D_t‖² in the norms of each task's curvature.

    0: as good as the task's own model; 1: as bad as the base; meant as a ranking, not as a loss (docs/diagnosis.md).
    """

    tasks: tuple[float, ...]
    mean: float
    worst: float
    scale: float
    """the multiple of the merged delta for which the mean is lowest"""
    mean_at_scale: float


@dataclass(frozen=True)
class Advice:
    """One sentence of a recommendation."""

    kind: str
    """take (what to do), mind (what may go wrong) or note"""
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """What can be known before a merge, per matrix and in total."""

    models: tuple[str, ...]
    layers: dict[str, LayerFindings]
    total: LayerDiagnosis
    norms: tuple[float, ...]
    base_norm: float
    energy: dict[str, tuple[float, ...]]
    """rank k -> share of each task vector's energy in the span of all pairs u_i v_jᵀ of the bases of rank k"""
    conflict: Conflict
    forecast: dict[str, Forecast]
    eta_by_rank: tuple[dict[str, float], ...]
    """per rank k: η under three normalisations"""
    curvature: str
    """the kind that was used; task-gram where none was given"""
    rank: int | None
    damping: float
    base: str = "base"
    recipe: str = ""
    version: str = ""
    advice: tuple[Advice, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain JSON-ready values."""
        found = asdict(self)
        found["total"]["eta_fraction"] = self.total.eta_fraction
        for name, layer in found["layers"].items():
            layer["theory"]["eta_fraction"] = self.layers[name].theory.eta_fraction
        return {"kind": "diagnosis", "format": 1, **found}
