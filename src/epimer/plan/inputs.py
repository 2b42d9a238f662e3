"""Assign every tensor its rule and check that the models fit together; every error names the tensor and the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from epimer.checkpoints.renamed import find_prefix
from epimer.errors import EpimerError, ParameterError, TensorError, listed
from epimer.geometry.linalg import nonfinite
from epimer.methods.frechet import FrechetOptions
from epimer.methods.options import RULES_PARAMETER, MethodOptions, Rules, is_number
from epimer.methods.registry import Method
from epimer.methods.rules import is_counter, is_matrix, is_statistic, matching
from epimer.plan.participants import Participant, Participants
from epimer.recipe.model import AUTO, known_parameters


@dataclass(frozen=True)
class TensorRules:
    """What is done with each tensor, and why some of the models cannot be merged so."""

    rules: dict[str, str]
    """name -> matrix, elementwise, average, statistic, fisher, copy or skip, in the output's order"""
    ties: dict[str, str]
    """name -> the earlier name whose tensor it shares"""
    problems: list[EpimerError]
    notes: list[str]
    kept: Mapping[str, str] = field(default_factory=dict)
    """name -> which model has NaN or Inf there, for tensors that are left as the base has them"""

    @property
    def matrices(self) -> list[str]:
        """The tensors that a matrix method works on, tied ones once."""
        return [name for name, rule in self.rules.items() if rule == "matrix" and name not in self.ties]

    def checked(self) -> TensorRules:
        """Return the rules; raise the first problem if there is any."""
        if self.problems:
            raise self.problems[0]
        return self


def assign_rules(participants: Participants, patterns: Rules, *, elementwise: bool = False) -> TensorRules:
    """Assign every tensor of the template a rule: that of the user's (pattern, rule) pairs, or else the default.

    With `elementwise`, the method acts on every tensor entry by entry instead of on matrices.
    """
    template = participants.template
    names = dict.fromkeys(name for participant in participants.all for name in participant.headers)
    explicit = {name: rule for name in names if (rule := matching(name, patterns))}
    rules = {
        name: _rule(name, W, explicit.get(name, ""), elementwise=elementwise) for name, W in template.headers.items()
    }
    problems = [
        *_rule_problems(template.headers, names, patterns, explicit),
        *_name_problems(participants, rules, explicit),
        *_tensor_problems(participants, rules, explicit),
        *_integer_problems(participants, explicit),
    ]
    ties = dict(participants.ties)
    for name, twin in template.checkpoint.ties.items():  # what is copied may be anything in the models
        if rules.get(name) == rules.get(twin) == "copy":
            ties.setdefault(name, twin)
    ties = {
        name: twin
        for name, twin in ties.items()
        if "skip" not in (rules[name], rules[twin]) and explicit.get(name, rules[twin]) == rules[twin]
    }
    kept: dict[str, str] = {}
    for name, (one, text) in participants.non_finite.items() if participants.skip_non_finite and not problems else ():
        if rules[name] in ("copy", "skip"):
            continue
        if participants.base is None:
            no_base = "there is no base whose tensor could be kept; repair or leave out that model"
            problems.append(TensorError(f"{text}, and {no_base}."))
        elif one is participants.base:
            problems.append(TensorError(f"{text}; repair the base: its own tensor cannot be kept."))
        kept[name], rules[name] = text, "copy"
    rules |= {name: rules[twin] for name, twin in ties.items()}
    notes = [*_statistics_notes(participants, rules), *_kept_notes(list(kept.values()))]
    return TensorRules(rules, ties, problems, notes, kept)


def _rule(name: str, W: Tensor, explicit: str, *, elementwise: bool) -> str:
    if explicit in ("copy", "skip"):
        return explicit
    if not W.is_floating_point() or not W.numel():
        return "copy"
    if is_statistic(name):
        return "statistic"
    if elementwise and explicit in ("", "matrix"):
        return "elementwise"
    return explicit or ("matrix" if is_matrix(name, W.shape) else "average")


def _rule_problems(
    template: Mapping[str, Tensor], names: Iterable[str], patterns: Rules, explicit: Mapping[str, str]
) -> Iterator[EpimerError]:
    for pattern, rule in patterns:
        if not any(matching(name, [(pattern, rule)]) for name in names):
            yield ParameterError(
                f"The rule pattern {pattern!r} matches no tensor; patterns are globs over whole names: '*.bias'."
            )
    for name, W in template.items():
        rule = explicit.get(name, "")
        if rule in ("matrix", "average", "fisher") and not W.is_floating_point():
            yield TensorError(f"The rule {rule!r} cannot be applied to {name!r}, which is {W.dtype}; use 'copy'.")
        if rule == "matrix" and W.dim() < 2:
            yield TensorError(f"The rule 'matrix' cannot be applied to {name!r} of shape {tuple(W.shape)}.")


def _name_problems(
    participants: Participants, rules: Mapping[str, str], explicit: Mapping[str, str]
) -> Iterator[TensorError]:
    template = participants.template.label
    needed = [name for name, rule in rules.items() if rule not in ("copy", "skip")]
    for model in participants.models:
        who, headers = model.label, model.headers
        missing = [name for name in needed if name not in headers]
        extra = [name for name in headers if name not in rules and explicit.get(name) not in ("copy", "skip")]
        if needed and not headers:
            yield TensorError(f"{who} is empty, expected {template}'s tensors: {listed(needed)}.")
        elif missing and len(missing) == len(needed):
            remedy = _other_prefix(participants, model, missing) or "is it a model of this ancestor?"
            yield TensorError(
                f"{who} has none of {template}'s tensors: it has {listed(headers)}, not {listed(needed)}; {remedy}"
            )
        elif missing:
            remedy = _other_prefix(participants, model, missing)
            remedy = remedy or "add them, or give them the rule 'copy' or 'skip'."
            yield TensorError(f"{who} lacks {len(missing)} tensors that {template} has: {listed(missing)}; {remedy}")
        elif extra:
            yield TensorError(
                f"{who} has {len(extra)} tensors that {template} lacks: {listed(extra)}; "
                "remove them, or give them the rule 'skip'."
            )


def _other_prefix(participants: Participants, model: Participant, missing: Sequence[str]) -> str:
    """Return the remedy where a model has the missing tensors under names with another prefix, or nothing."""
    prefix = find_prefix(model.headers, participants.template.headers, missing)
    if not prefix:
        return ""
    old, new = next(iter(prefix.items()))
    return f"it has names with {old!r} in place of {new!r}: give the model `prefix: {prefix}` in the recipe."


def _tensor_problems(
    participants: Participants, rules: Mapping[str, str], explicit: Mapping[str, str]
) -> Iterator[TensorError]:
    """Yield what is wrong with the dtype, the shape or the storage of tensors that are not skipped."""
    checked = [name for name, rule in rules.items() if rule not in ("skip", "copy" if name in explicit else "")]
    for name, participant in ((n, p) for n in checked for p in participants.all if n in p.headers):
        W, template, where = participant.headers[name], participants.template.headers[name], participant.label
        if W.is_floating_point() != template.is_floating_point() or W.is_complex():
            yield TensorError(
                f"{where}[{name!r}] is {W.dtype} where the output takes {template.dtype}: one is not a floating-point "
                "tensor; convert it, or give it the rule 'copy' or 'skip'."
            )
        elif W.is_floating_point() and W.shape != template.shape:
            yield TensorError(
                f"{where}[{name!r}] has shape {tuple(W.shape)}, expected {tuple(template.shape)}; "
                "give it the rule 'copy' or 'skip', or use models of one architecture."
            )
        elif W.is_floating_point() and (problem := participant.problem(name)):
            yield TensorError(f"{where}[{name!r}] {problem}, expected a dense tensor.")


def _integer_problems(participants: Participants, explicit: Mapping[str, str]) -> Iterator[TensorError]:
    """Yield the integer tensors that differ between models where no rule says what to do; counters are no problem."""
    template = participants.template.label
    for name, model in participants.differing_integers.items():
        if name not in explicit and not is_counter(name):
            W = participants.template.headers[name]
            yield TensorError(
                f"{model}[{name!r}] differs from {template}'s, and {W.dtype} cannot be averaged; give it the rule "
                f"'copy' if {template}'s is right for the output, or 'skip' to leave it out."
            )


def _statistics_notes(participants: Participants, rules: Mapping[str, str]) -> Iterator[str]:
    """Say what becomes of the statistics and counters of BatchNorm."""
    layers = {name.rpartition(".")[0] for name, rule in rules.items() if rule == "statistic"}
    if layers:
        yield (
            f"running means and variances of {len(layers)} normalisation layers are averaged and never extrapolated, "
            "whatever the method and scale; re-estimate them on data: epimer.reestimate_statistics(model, batches)."
        )
    counters = [name for name in participants.differing_integers if is_counter(name) and rules[name] == "copy"]
    if counters:
        yield f"{listed(counters)} differ between models and are copied from {participants.template.label}."


def _kept_notes(texts: Sequence[str]) -> Iterator[str]:
    """Say which tensors are left as the base has them because a model has NaN or Inf there."""
    if texts:
        more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
        yield f"{len(texts)} tensors are left as the base has them: {', '.join(texts[:3])}{more}."


def check_finite(one: Participant, name: str, W: Tensor) -> None:
    """Refuse a tensor with NaN or Inf in `W`, which is all or a part of what a model has of it, or a factor of that."""
    if bad := nonfinite(W):
        text = one.non_finite(name) or f"{one.label}[{name!r}] holds NaN or Inf in {bad} of {W.numel()} entries"
        raise TensorError(f"{text}; repair or leave out that model, or say `non_finite: skip-tensor`.")


def check_shared_options(user: str, **options: Any) -> dict[str, Any]:
    """Return options that the methods with curvature share, each checked."""
    known = {**known_parameters(AUTO), "rules": RULES_PARAMETER}
    return {name: known[name].check(user, value) for name, value in options.items()}


def check_weights(weights: Sequence[float] | None, tasks: int, user: str, *, absolute: bool = False) -> list[float]:
    """Return λ_t summing to 1, or the unchanged weights where they are `absolute`; `user` is what errors name."""
    if weights is None:
        return [1 / tasks] * tasks
    values = weights.tolist() if hasattr(weights, "tolist") else weights
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ParameterError(f"weights must be a list of numbers, one per model, got {type(weights).__name__}.")
    if len(values) != tasks:
        raise ParameterError(f"weights has {len(values)} entries for {tasks} models; give one per model.")
    for t, w in enumerate(values):
        if not is_number(w):
            raise ParameterError(f"weights[{t}] is {w!r}; weights must be finite numbers.")
        if w < 0 and not absolute:
            raise ParameterError(
                f"weights[{t}] is {w:g}; {user} takes a mean, so weights must not be negative "
                "(task_arithmetic takes negative ones)."
            )
    if absolute:
        return [float(w) for w in values]
    total = sum(map(float, values))
    if not (total > 0 and math.isfinite(total)):
        raise ParameterError(f"weights sum to {total:g}; they must have a positive, finite total.")
    return [float(w) / total for w in values]


def check_options(options: MethodOptions, method: Method, tasks: int, *, based: bool) -> None:
    """Refuse lists of another length than there are models, and options that need a base where there is none."""
    for parameter in method.parameters:
        value = getattr(options, parameter.name)
        if parameter.one_per_model and isinstance(value, list) and len(value) != tasks:
            raise ParameterError(
                f"The {parameter.name!r} parameter of {method.name} must be {parameter.expected}. "
                f"Got {len(value)} entries for {tasks} models instead."
            )
    if not based and options.scale != 1 and not method.ignores_base:
        raise ParameterError(f"The 'scale' parameter of {method.name} needs a base model; pass it or leave scale at 1.")
    if not based and isinstance(options, FrechetOptions) and (options.basis != "full" or options.aggregator != "mean"):
        raise ParameterError(
            f"{method.name} without a base model must have basis='full' and aggregator='mean'; pass base."
        )
