"""Merge fine-tuned models of one ancestor into one model that keeps their skills.

A merge is the Fréchet mean of the task vectors, in a subspace, under each task's curvature:
``x* = (Σ λ_t H_t)⁻¹ Σ λ_t H_t x_t``. Every method is a choice of subspace, metric and aggregator.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from epimer.api import build_basis as build_basis
    from epimer.api import diagnose as diagnose
    from epimer.api import diagnose_state_dicts as diagnose_state_dicts
    from epimer.api import extract_lora as extract_lora
    from epimer.api import make_basis as make_basis
    from epimer.api import merge as merge
    from epimer.api import merge_models as merge_models
    from epimer.api import merge_state_dicts as merge_state_dicts
    from epimer.api import sweep as sweep
    from epimer.api import sweep_state_dicts as sweep_state_dicts
    from epimer.api import verify as verify
    from epimer.curvature.curvature import Curvature as Curvature
    from epimer.curvature.estimate import estimate_curvature as estimate_curvature
    from epimer.diagnosis.landscape import landscape as landscape
    from epimer.diagnosis.suite_merge import merge_suite as merge_suite
    from epimer.errors import CheckpointError as CheckpointError
    from epimer.errors import CurvatureError as CurvatureError
    from epimer.errors import DataError as DataError
    from epimer.errors import EpimerError as EpimerError
    from epimer.errors import EpimerWarning as EpimerWarning
    from epimer.errors import OutputError as OutputError
    from epimer.errors import ParameterError as ParameterError
    from epimer.errors import RecipeError as RecipeError
    from epimer.errors import TensorError as TensorError
    from epimer.evaluation.suite import Split as Split
    from epimer.evaluation.suite import Suite as Suite
    from epimer.evaluation.suite import SuiteTask as SuiteTask
    from epimer.geometry.metric import EKFAC as EKFAC
    from epimer.geometry.metric import Corrected as Corrected
    from epimer.geometry.metric import Diagonal as Diagonal
    from epimer.geometry.metric import Kronecker as Kronecker
    from epimer.geometry.metric import Projected as Projected
    from epimer.geometry.metric import Samples as Samples
    from epimer.geometry.solution import Solution as Solution
    from epimer.methods.options import MethodOptions as MethodOptions
    from epimer.methods.options import Option as Option
    from epimer.methods.registry import Layer as Layer
    from epimer.methods.registry import Method as Method
    from epimer.methods.registry import describe_method as describe_method
    from epimer.methods.registry import list_methods as list_methods
    from epimer.methods.registry import register_method as register_method
    from epimer.methods.registry import unregister_method as unregister_method
    from epimer.records import Diagnosis as Diagnosis
    from epimer.records import MergeRecord as MergeRecord
    from epimer.records import Verification as Verification
    from epimer.tasks.running_statistics import reestimate_statistics as reestimate_statistics

# Where each public name lives; a module is imported when one of its names is first used (PEP 562),
# so `import epimer` costs nothing and does not import torch.
_HOMES = {
    "epimer.api": (
        "build_basis",
        "diagnose",
        "diagnose_state_dicts",
        "extract_lora",
        "make_basis",
        "merge",
        "merge_models",
        "merge_state_dicts",
        "sweep",
        "sweep_state_dicts",
        "verify",
    ),
    "epimer.curvature.curvature": ("Curvature",),
    "epimer.curvature.estimate": ("estimate_curvature",),
    "epimer.errors": (
        "CheckpointError",
        "CurvatureError",
        "DataError",
        "EpimerError",
        "EpimerWarning",
        "OutputError",
        "ParameterError",
        "RecipeError",
        "TensorError",
    ),
    "epimer.geometry.metric": ("Corrected", "Diagonal", "EKFAC", "Kronecker", "Projected", "Samples"),
    "epimer.diagnosis.landscape": ("landscape",),
    "epimer.diagnosis.suite_merge": ("merge_suite",),
    "epimer.evaluation.suite": ("Split", "Suite", "SuiteTask"),
    "epimer.geometry.solution": ("Solution",),
    "epimer.methods.options": ("MethodOptions", "Option"),
    "epimer.methods.registry": (
        "Layer",
        "Method",
        "describe_method",
        "list_methods",
        "register_method",
        "unregister_method",
    ),
    "epimer.records": ("Diagnosis", "MergeRecord", "Verification"),
    "epimer.tasks.running_statistics": ("reestimate_statistics",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'epimer' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
