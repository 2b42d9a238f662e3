"""Check what the user gave, once, before any work; every error names the tensor and the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epimer.errors import CurvatureError, ParameterError, TensorError, listed
from epimer.geometry.linalg import nonfinite
from epimer.geometry.metric import Diagonal, Metric, Projected
from epimer.methods.registry import Method
from epimer.methods.rules import is_matrix, matching

StateDict = Mapping[str, Tensor]
Curvatures = Sequence[Mapping[str, Metric]]

_CLASSES = {"diagonal": "epimer.Diagonal", "kronecker": "epimer.Kronecker", "samples": "epimer.Samples"}


@dataclass(frozen=True)
class Inputs:
    """State dicts that fit together, and what is to happen to each tensor."""

    base: StateDict | None
    models: Sequence[StateDict]
    rules: dict[str, str]
    """name -> matrix, elementwise, average, fisher, copy or skip, in the output's order"""

    @property
    def template(self) -> StateDict:
        """The state dict that gives the output its names, shapes and dtypes."""
        return self.models[0] if self.base is None else self.base

    def merged(self) -> Iterator[tuple[str, Tensor | None, list[Tensor]]]:
        """Iterate over the tensors that take part in arithmetic: name, base, models."""
        for name, rule in self.rules.items():
            if rule not in ("copy", "skip"):
                base = None if self.base is None else self.base[name]
                yield name, base, [model[name] for model in self.models]


def check_inputs(
    base: StateDict | None, models: Sequence[StateDict], method: Method, rules: Sequence[tuple[str, str]]
) -> Inputs:
    """Refuse state dicts that do not fit together or hold what no merge can use."""
    if isinstance(models, Mapping) or not isinstance(models, Sequence) or not models:
        raise TensorError("models must be a non-empty list of state dicts, one per fine-tuned model.")
    everyone = [("base", base)] if base is not None else []
    everyone += [(f"models[{t}]", model) for t, model in enumerate(models)]
    for who, state in everyone:
        if not isinstance(state, Mapping):
            raise TensorError(f"{who} must be a mapping from names to tensors, got {type(state).__name__}.")
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise TensorError(f"{who}[{name!r}] must be a tensor, got {type(value).__name__}.")
    if base is None and method.needs_base:
        raise TensorError(f"{method.name} needs the base model that the others were fine-tuned from; pass base.")
    inputs = Inputs(base, models, _resolve_rules(base, models, method, rules))
    _check_names(inputs, rules)
    for name, W0, tensors in inputs.merged():
        template = inputs.template[name]
        owners = [("base", W0)] if W0 is not None else []
        owners += [(f"models[{t}]", W) for t, W in enumerate(tensors)]
        for who, W in owners:
            _check_tensor(who, name, W, template)
    return inputs


def _resolve_rules(
    base: StateDict | None, models: Sequence[StateDict], method: Method, rules: Sequence[tuple[str, str]]
) -> dict[str, str]:
    template = models[0] if base is None else base
    everything = {name for state in (template, *models) for name in state}
    for pattern, _ in rules:
        if not any(matching(name, [(pattern, "match")]) for name in everything):
            raise ParameterError(
                f"The rule pattern {pattern!r} matches no tensor; patterns are globs over whole names: '*.bias'."
            )
    resolved = {}
    for name, W in template.items():
        rule = matching(name, rules)
        if rule is None:
            if not W.is_floating_point() or not W.numel():
                rule = "copy"
            elif method.elementwise:
                rule = "elementwise"
            else:
                rule = "matrix" if is_matrix(name, W.shape) else "average"
        elif rule in ("matrix", "average", "fisher"):
            if not W.is_floating_point():
                raise TensorError(f"The rule {rule!r} cannot be applied to {name!r}, which is {W.dtype}; use 'copy'.")
            if rule == "matrix" and W.dim() < 2:
                raise TensorError(f"The rule 'matrix' cannot be applied to {name!r} of shape {tuple(W.shape)}.")
            if not W.numel():
                rule = "copy"
            elif rule == "matrix" and method.elementwise:
                rule = "elementwise"
        resolved[name] = rule
    return resolved


def _check_names(inputs: Inputs, rules: Sequence[tuple[str, str]]) -> None:
    template = "base" if inputs.base is not None else "models[0]"
    needed = [name for name, rule in inputs.rules.items() if rule not in ("copy", "skip")]
    for t, model in enumerate(inputs.models):
        missing = [name for name in needed if name not in model]
        extra = [n for n in model if n not in inputs.rules and matching(n, rules) not in ("copy", "skip")]
        if missing and len(missing) == len(needed):
            raise TensorError(
                f"models[{t}] has none of {template}'s tensors: it has {listed(model)}, not {listed(needed)}; "
                "is it a model of this ancestor, or are its names prefixed?"
            )
        if missing:
            raise TensorError(
                f"models[{t}] lacks {len(missing)} tensors that {template} has: {listed(missing)}; "
                "add them, or give them the rule 'copy' or 'skip'."
            )
        if extra:
            raise TensorError(
                f"models[{t}] has {len(extra)} tensors that {template} lacks: {listed(extra)}; "
                "remove them, or give them the rule 'skip'."
            )


def _check_tensor(who: str, name: str, W: Tensor, template: Tensor) -> None:
    if W.shape != template.shape:
        raise TensorError(
            f"{who}[{name!r}] has shape {tuple(W.shape)}, expected {tuple(template.shape)}; "
            "give it the rule 'copy' or 'skip', or use models of one architecture."
        )
    if not W.is_floating_point() or W.layout != torch.strided:
        raise TensorError(
            f"{who}[{name!r}] is {W.dtype} ({W.layout}), expected a dense floating-point tensor as in the others."
        )
    if bad := nonfinite(W):
        raise TensorError(
            f"{who}[{name!r}] holds NaN or Inf in {bad} of {W.numel()} entries; repair or leave out that model."
        )


def matrix_shape(W: Tensor) -> tuple[int, int]:
    """Return the shape of a tensor's matrix view; a convolution is (out, in·kh·kw)."""
    return len(W), W.numel() // len(W)


def task_vectors(W0: Tensor | None, tensors: Sequence[Tensor], *, matrix: bool) -> list[Tensor]:
    """Return D_t = W_t - W0 in working precision: float64 if any input is, float32 otherwise."""
    wide = torch.float64 in {W.dtype for W in (*tensors, W0) if W is not None}
    dtype = torch.float64 if wide else torch.float32
    deltas = [W.to(dtype) if W0 is None else W.to(dtype) - W0.to(dtype) for W in tensors]
    return [D.reshape(matrix_shape(D)) for D in deltas] if matrix else deltas


def check_weights(weights: Sequence[float] | None, tasks: int, method: Method) -> list[float]:
    """Return λ_t summing to 1, or the weights as given where the method is defined so."""
    if weights is None:
        return [1 / tasks] * tasks
    values = [float(w) for w in weights]
    if len(values) != tasks:
        raise ParameterError(f"weights has {len(values)} entries for {tasks} models; give one per model.")
    for t, w in enumerate(values):
        if not math.isfinite(w):
            raise ParameterError(f"weights[{t}] is {w}; weights must be finite.")
        if w < 0 and not method.absolute_weights:
            raise ParameterError(
                f"weights[{t}] is {w:g}; {method.name} takes a mean, so weights must not be negative "
                "(task_arithmetic takes negative ones)."
            )
    if method.absolute_weights:
        return values
    total = sum(values)
    if not (total > 0 and math.isfinite(total)):
        raise ParameterError(f"weights sum to {total:g}; they must have a positive, finite total.")
    return [w / total for w in values]


def check_curvatures(curvature: Any, tasks: int, method: Method) -> Curvatures | None:
    """Refuse curvature that is not one mapping per model; None where the method needs none."""
    if curvature is None:
        if method.needs_curvature:
            raise CurvatureError(
                f"{method.name} needs {method.curvature} curvature: pass curvature=, one mapping per model from "
                f"tensor name to {_CLASSES[method.curvature or '']}."
            )
        return None
    if isinstance(curvature, Mapping) or not isinstance(curvature, Sequence):
        raise CurvatureError("curvature must be a list with one mapping from tensor names to curvature per model.")
    if len(curvature) != tasks:
        raise CurvatureError(f"curvature has {len(curvature)} entries for {tasks} models; give one mapping per model.")
    for t, one in enumerate(curvature):
        if not isinstance(one, Mapping):
            raise CurvatureError(f"curvature[{t}] must be a mapping from tensor names, got {type(one).__name__}.")
    return curvature


def layer_metrics(
    curvature: Curvatures, name: str, W: Tensor, *, matrix: bool, kinds: Sequence[str], user: str
) -> list[Metric] | None:
    """Return the checked metrics of one tensor, on its matrix view if asked; None if no model has any."""
    found = [one.get(name) for one in curvature]
    if all(metric is None for metric in found):
        return None
    wanted = " or ".join(_CLASSES[kind] for kind in kinds if kind in _CLASSES)
    metrics = []
    for t, metric in enumerate(found):
        where = f"curvature[{t}][{name!r}]"
        if metric is None:
            raise CurvatureError(f"{where} is missing, while other models have it; measure it for every model.")
        if not isinstance(metric, Metric) or metric.kind not in kinds:
            raise CurvatureError(
                f"{where} is {type(metric).__name__}, but {user} needs {wanted} here; "
                "measure that kind, or take a method that uses this one."
            )
        metrics.append(check_metric(metric, where, W, matrix=matrix))
    mixed = {metric.kind for metric in metrics}
    if len(mixed) > 1:
        raise CurvatureError(
            f"the models' curvature of {name!r} is of mixed kinds ({', '.join(sorted(mixed))}); use one kind for all."
        )
    return metrics


def check_metric(metric: Metric, where: str, W: Tensor, *, matrix: bool) -> Metric:
    """Return a metric that fits the tensor, on its matrix view, or say what is wrong with it."""
    shape = matrix_shape(W) if matrix else tuple(W.shape)
    problem = metric.problem(tuple(W.shape) if isinstance(metric, Diagonal) else shape)
    if problem:
        raise CurvatureError(f"{where}: {problem}.")
    return Diagonal(metric.F.reshape(shape)) if isinstance(metric, Diagonal) else metric


def layer_basis(bases: Any, metrics: Sequence[Metric], name: str) -> Any:
    """Return the basis the caller fixed for a tensor: from `basis=` or from its projected curvature."""
    fixed = bases.get(name) if isinstance(bases, Mapping) else None
    given = [metric.basis for metric in metrics if isinstance(metric, Projected) and metric.basis is not None]
    every = ([fixed] if fixed is not None else []) + given
    if any(basis is not every[0] for basis in every):
        raise CurvatureError(f"the projected curvatures of {name!r} were measured on different bases; use one basis.")
    if isinstance(bases, Mapping) and not every:
        raise ParameterError(f"basis= has no entry for {name!r}; build it from these models with epimer.build_basis.")
    return every[0] if every else None
