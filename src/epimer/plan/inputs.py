"""Check that the models fit together, once, before any work; every error names the tensor and the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from epimer.errors import EpimerError, ParameterError, TensorError, listed
from epimer.geometry.linalg import nonfinite
from epimer.methods.frechet import FrechetOptions
from epimer.methods.options import MethodOptions, is_number
from epimer.methods.registry import Method
from epimer.methods.rules import is_matrix, matching
from epimer.plan.participants import Participant, Participants

Report = Callable[[EpimerError], None]


@dataclass(frozen=True)
class Fates:
    """What is to happen to each tensor of models that fit together."""

    rules: dict[str, str]
    """name -> matrix, elementwise, average, fisher, copy or skip, in the output's order"""
    ties: dict[str, str]
    """name -> the earlier name whose tensor it shares"""

    @property
    def matrices(self) -> list[str]:
        """The tensors that a matrix method works on, tied ones once."""
        return [name for name, rule in self.rules.items() if rule == "matrix" and name not in self.ties]


def check_models(
    participants: Participants, rules: Sequence[tuple[str, str]], report: Report, *, elementwise: bool = False
) -> Fates:
    """Decide every tensor's rule, and report models that do not fit together or hold what no merge can use.

    Args:
        participants: the base and the models.
        rules: the user's (pattern, rule) pairs.
        report: takes every problem; `refuse` raises the first one.
        elementwise: the method acts on every tensor entry by entry, instead of on matrices.
    """
    template = participants.template
    asked = _asked_rules(participants.all, rules, report)
    resolved = _resolve_rules(template.headers, asked, report, elementwise=elementwise)
    _check_names(participants.models, template.label, resolved, asked, report)
    for name, rule in resolved.items():
        if rule == "skip" or (rule == "copy" and name in asked):
            continue
        for one in participants.all:
            if name in one.headers and (problem := _problem(one, name, template.headers[name])):
                report(problem)
    ties = dict(participants.ties)
    for name, twin in template.checkpoint.ties.items():  # what is copied may be anything in the models
        if resolved.get(name) == resolved.get(twin) == "copy":
            ties.setdefault(name, twin)
    ties = {
        name: twin
        for name, twin in ties.items()
        if "skip" not in (resolved[name], resolved[twin]) and asked.get(name, resolved[twin]) == resolved[twin]
    }
    return Fates(resolved | {name: resolved[twin] for name, twin in ties.items()}, ties)


def refuse(problem: EpimerError) -> None:
    """Raise a problem."""
    raise problem


def _asked_rules(
    participants: Sequence[Participant], rules: Sequence[tuple[str, str]], report: Report
) -> dict[str, str]:
    """Return the rule the user gave to each name of any model; refuse patterns that match none."""
    names = dict.fromkeys(name for one in participants for name in one.headers)
    for pattern, rule in rules:
        if not any(matching(name, [(pattern, rule)]) for name in names):
            report(
                ParameterError(
                    f"The rule pattern {pattern!r} matches no tensor; patterns are globs over whole names: '*.bias'."
                )
            )
    return {name: chosen for name in names if (chosen := matching(name, rules))}


def _resolve_rules(
    template: Mapping[str, Tensor], asked: Mapping[str, str], report: Report, *, elementwise: bool
) -> dict[str, str]:
    resolved = {}
    for name, W in template.items():
        rule = asked.get(name, "")
        if rule in ("matrix", "average", "fisher") and not W.is_floating_point():
            report(TensorError(f"The rule {rule!r} cannot be applied to {name!r}, which is {W.dtype}; use 'copy'."))
        if rule == "matrix" and W.dim() < 2:
            report(TensorError(f"The rule 'matrix' cannot be applied to {name!r} of shape {tuple(W.shape)}."))
        if rule not in ("copy", "skip"):
            if not W.is_floating_point() or not W.numel():
                rule = "copy"
            elif elementwise and rule in ("", "matrix"):
                rule = "elementwise"
        resolved[name] = rule or ("matrix" if is_matrix(name, W.shape) else "average")
    return resolved


def _check_names(
    models: Sequence[Participant],
    template: str,
    rules: Mapping[str, str],
    asked: Mapping[str, str],
    report: Report,
) -> None:
    needed = [name for name, rule in rules.items() if rule not in ("copy", "skip")]
    for model in models:
        who, headers = model.label, model.headers
        missing = [name for name in needed if name not in headers]
        extra = [name for name in headers if name not in rules and asked.get(name) not in ("copy", "skip")]
        if needed and not headers:
            report(TensorError(f"{who} is empty, expected {template}'s tensors: {listed(needed)}."))
        elif missing and len(missing) == len(needed):
            report(
                TensorError(
                    f"{who} has none of {template}'s tensors: it has {listed(headers)}, not {listed(needed)}; "
                    "is it a model of this ancestor, or are its names prefixed?"
                )
            )
        elif missing:
            report(
                TensorError(
                    f"{who} lacks {len(missing)} tensors that {template} has: {listed(missing)}; "
                    "add them, or give them the rule 'copy' or 'skip'."
                )
            )
        elif extra:
            report(
                TensorError(
                    f"{who} has {len(extra)} tensors that {template} lacks: {listed(extra)}; "
                    "remove them, or give them the rule 'skip'."
                )
            )


def _problem(one: Participant, name: str, template: Tensor) -> TensorError | None:
    """Say what is wrong with a tensor's dtype, shape or storage, or None."""
    W, who = one.headers[name], one.label
    if W.is_floating_point() != template.is_floating_point() or W.is_complex():
        return TensorError(
            f"{who}[{name!r}] is {W.dtype} where the output takes {template.dtype}: one is not a floating-point "
            "tensor; convert it, or give it the rule 'copy' or 'skip'."
        )
    if not W.is_floating_point():
        return None
    if W.shape != template.shape:
        return TensorError(
            f"{who}[{name!r}] has shape {tuple(W.shape)}, expected {tuple(template.shape)}; "
            "give it the rule 'copy' or 'skip', or use models of one architecture."
        )
    problem = one.problem(name)
    return TensorError(f"{who}[{name!r}] {problem}, expected a dense tensor.") if problem else None


def check_finite(who: str, name: str, W: Tensor) -> None:
    """Refuse a tensor with NaN or Inf in it."""
    if bad := nonfinite(W):
        raise TensorError(
            f"{who}[{name!r}] holds NaN or Inf in {bad} of {W.numel()} entries; repair or leave out that model."
        )


def check_weights(weights: Sequence[float] | None, tasks: int, user: str, *, absolute: bool = False) -> list[float]:
    """Return λ_t summing to 1, or the weights as given where they are `absolute`; errors name the `user` of them."""
    if weights is None:
        return [1 / tasks] * tasks
    given = weights.tolist() if hasattr(weights, "tolist") else weights
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ParameterError(f"weights must be a list of numbers, one per model, got {type(weights).__name__}.")
    if len(given) != tasks:
        raise ParameterError(f"weights has {len(given)} entries for {tasks} models; give one per model.")
    for t, w in enumerate(given):
        if not is_number(w):
            raise ParameterError(f"weights[{t}] is {w!r}; weights must be finite numbers.")
        if w < 0 and not absolute:
            raise ParameterError(
                f"weights[{t}] is {w:g}; {user} takes a mean, so weights must not be negative "
                "(task_arithmetic takes negative ones)."
            )
    values = [float(w) for w in given]
    if absolute:
        return values
    total = sum(values)
    if not (total > 0 and math.isfinite(total)):
        raise ParameterError(f"weights sum to {total:g}; they must have a positive, finite total.")
    return [w / total for w in values]


def check_options(options: MethodOptions, method: Method, tasks: int, *, based: bool) -> None:
    """Refuse lists of another length than there are models, and what depends on a base that is not there."""
    for parameter in method.parameters:
        value = getattr(options, parameter.name)
        if (parameter.per_model or parameter.kind == "numbers") and isinstance(value, list) and len(value) != tasks:
            raise ParameterError(
                f"The {parameter.name!r} parameter of {method.name} must be {parameter.expected}. "
                f"Got {len(value)} entries for {tasks} models instead."
            )
    if based:
        return
    if options.scale != 1:
        raise ParameterError(
            f"The 'scale' parameter of {method.name} needs a base model; pass base or leave scale at 1."
        )
    if isinstance(options, FrechetOptions) and (options.basis != "full" or options.aggregator != "mean"):
        raise ParameterError(
            f"{method.name} without a base model must have basis='full' and aggregator='mean'; pass base."
        )
