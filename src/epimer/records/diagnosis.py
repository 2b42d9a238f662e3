"""What is known of a merge before it is done, per matrix and in total: what `epimer diagnose` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from epimer.errors import DataError
from epimer.records.record import Record

TWO_SIDED = ("kronecker", "ekfac")
"""kinds of measured curvature under which forecasts rank methods"""


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


@dataclass(frozen=True)
class MergeTheory:
    """The theory at one merged delta x, of one layer or of the whole model, under the raw curvature H (loss units)."""

    scale: float
    """the multiple of the method's merge that x is"""
    quadratic: float
    """Σ λ_t (x - D_t)ᵀ H_t (x - D_t) in the full space; of task-gram, its leading directions"""
    v_s: float
    """Σ λ_t (x - x_t)ᵀ H_t (x - x_t) with x_t the part of D_t in the subspace that the merge lies in"""
    r_s: float
    """residual energy of that subspace; 0 for a merge in the full space"""
    bound: float
    """½(√V_S + √R_S)²: at least half the quadratic, and just that where R_S = 0"""

    @property
    def increase(self) -> float:
        """The λ-weighted loss increase to second order: half the quadratic."""
        return 0.5 * self.quadratic


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
    """The diagnosis of one matrix."""

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
    merges: dict[str, MergeTheory] = field(default_factory=dict)
    """method -> the theory at its merge, at scale 1"""


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
    """take (what to do), warning (what may go wrong) or note; older records call a warning mind"""
    text: str


@dataclass(frozen=True)
class Diagnosis(Record):
    """What can be known before a merge, per matrix and in total."""

    kind: ClassVar[str] = "diagnosis"

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
    merges: dict[str, tuple[MergeTheory, ...]] = field(default_factory=dict)
    """method -> the theory at its merge: at scale 1, at the recipe's scale, and at the forecast's"""

    @property
    def ranks_methods(self) -> bool:
        """Whether forecasts of different methods may be compared: only under two-sided curvature measured on data.

        Otherwise they compare the tasks and scales of one method (docs/diagnosis.md has the measurements).
        """
        return self.curvature in TWO_SIDED

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "the record") -> Self:
        """Return the diagnosis that `to_dict` wrote; lists that do not fit the number of models are refused."""
        record = super().from_dict(data, where)
        for name, values in record._per_model().items():
            if len(values) != len(record.models):
                raise DataError(f"{where}: {name} has {len(values)} values, and there are {len(record.models)} models.")
        return record

    def _per_model(self) -> dict[str, Sized]:
        """Return by name the lists that have a value for every model."""
        lists: dict[str, Sized] = {"norms": self.norms, "total.energy_kept_by_task": self.total.energy_kept_by_task}
        lists |= {f"energy.{k}": values for k, values in self.energy.items()}
        lists |= {f"forecast.{method}.tasks": forecast.tasks for method, forecast in self.forecast.items()}
        for name, rows in vars(self.conflict).items():
            lists |= {f"conflict.{name}": rows, **{f"conflict.{name}[{i}]": row for i, row in enumerate(rows)}}
        for name, layer in self.layers.items():
            lists[f"layers.{name}.norms"] = layer.norms
            lists |= {f"layers.{name}.forecast.{method}": values for method, values in layer.forecast.items()}
        return lists

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain JSON-ready values, with η's share of F(x̄) written out."""
        data = super().to_dict()
        data["total"]["eta_fraction"] = self.total.eta_fraction
        for name, layer in data["layers"].items():
            layer["theory"]["eta_fraction"] = self.layers[name].theory.eta_fraction
        return data
