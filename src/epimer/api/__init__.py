"""The public functions: open, plan, run on an engine, and hand the result over, from folders or from memory."""

from epimer.api.bases import build_basis, make_basis
from epimer.api.diagnosing import diagnose, diagnose_state_dicts
from epimer.api.merging import extract_lora, merge, merge_models, merge_state_dicts, plan_merge
from epimer.api.sweeping import sweep, sweep_state_dicts
from epimer.api.verifying import verify

__all__ = [
    "build_basis",
    "diagnose",
    "diagnose_state_dicts",
    "extract_lora",
    "make_basis",
    "merge",
    "merge_models",
    "merge_state_dicts",
    "plan_merge",
    "sweep",
    "sweep_state_dicts",
    "verify",
]
