"""Every record that epimer writes, one class each for who writes it and who reads it. No torch here."""

from epimer.records.diagnosis import (
    Advice,
    Conflict,
    Diagnosis,
    Forecast,
    LayerDiagnosis,
    LayerFindings,
    MergeTheory,
)
from epimer.records.experiment import Dots, Experiment, Lines, MapPoint, Maps
from epimer.records.merge import MergeRecord, Status, TensorRecord
from epimer.records.record import Record, checked
from epimer.records.scores import (
    EvaluationRecord,
    HarnessRecord,
    HarnessScore,
    MethodScore,
    OverallScore,
    Score,
    SweepRecord,
    TaskScore,
    Trial,
)
from epimer.records.verification import Check, Outcome, Verification

KINDS: dict[str, type[Record]] = {
    record.kind: record for record in (MergeRecord, Diagnosis, SweepRecord, EvaluationRecord, HarnessRecord, Experiment)
}
"""the kind that a JSON file names -> the class it is read as"""

__all__ = [
    "KINDS", "Advice", "Check", "Conflict", "Diagnosis", "Dots", "EvaluationRecord", "Experiment", "Forecast",
    "HarnessRecord", "HarnessScore", "LayerDiagnosis", "LayerFindings", "Lines", "MapPoint", "Maps", "MergeRecord",
    "MergeTheory", "MethodScore", "Outcome", "OverallScore", "Record", "Score", "Status", "SweepRecord", "TaskScore",
    "TensorRecord", "Trial", "Verification", "checked",
]  # fmt: skip
