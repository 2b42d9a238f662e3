"""Check what the user gave, once, before any work; every error names the tensor and the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epimer.errors import EpimerError, ParameterError, TensorError, listed
from epimer.geometry.linalg import nonfinite
from epimer.methods.options import is_number
from epimer.methods.registry import Method
from epimer.methods.rules import is_matrix, matching

StateDict = Mapping[str, Tensor]


@dataclass(frozen=True)
class Inputs:
    """State dicts that fit together, and what is to happen to each tensor."""

    base: StateDict | None
    models: Sequence[StateDict]
    rules: dict[str, str]
    """name -> matrix, elementwise, average, fisher, copy or skip, in the output's order"""
    ties: dict[str, str]
    """name -> the earlier name it shares its tensor with, in the base and in every model"""

    @property
    def template(self) -> StateDict:
        """The state dict that gives the output its names, shapes and dtypes."""
        return self.models[0] if self.base is None else self.base

    def merged(self) -> Iterator[tuple[str, Tensor | None, list[Tensor]]]:
        """Iterate over the tensors that take part in arithmetic, tied ones once: name, base, models."""
        for name, rule in self.rules.items():
            if rule not in ("copy", "skip") and name not in self.ties:
                base = None if self.base is None else self.base[name]
                yield name, base, [model[name] for model in self.models]


def check_inputs(
    base: StateDict | None,
    models: Sequence[StateDict],
    method: Method,
    rules: Sequence[tuple[str, str]],
    *,
    labels: Sequence[str] | None = None,
    headers: bool = False,
    ties: Mapping[str, str] | None = None,
    report: Callable[[EpimerError], None] | None = None,
) -> Inputs:
    """Refuse state dicts that do not fit together or hold what no merge can use.

    Args:
        base: the ancestor, if there is one.
        models: the fine-tuned models.
        method: what is to be done with them.
        rules: the user's (pattern, rule) pairs.
        labels: what errors call the models; by default models[0], models[1], …
        headers: the tensors are meta tensors, whose data is checked when it is read.
        ties: which names share a tensor; by default found by where the tensors lie in memory.
        report: takes every problem; by default the first one is raised.
    """
    report = report or _refuse
    if isinstance(models, Mapping) or not isinstance(models, Sequence) or not models:
        raise TensorError("models must be a non-empty list of state dicts, one per fine-tuned model.")
    everyone = _everyone(base, models, labels)
    for who, state in everyone:
        if not isinstance(state, Mapping):
            raise TensorError(f"{who} must be a mapping from names to tensors, got {type(state).__name__}.")
        for name, value in state.items():
            if not isinstance(name, str):
                raise TensorError(f"{who} has a name {name!r} of type {type(name).__name__}; names must be strings.")
            if not isinstance(value, Tensor):
                raise TensorError(f"{who}[{name!r}] must be a tensor, got {type(value).__name__}.")
    if base is None and method.needs_base:
        raise TensorError(f"{method.name} needs the base model that the others were fine-tuned from; pass base.")
    asked = _asked_rules(everyone, rules, report)
    template = models[0] if base is None else base
    resolved = _resolve_rules(template, method, asked, report)
    _check_names(everyone[-len(models) :], everyone[0][0], resolved, asked, report)
    for name, rule in resolved.items():
        if rule == "skip" or (rule == "copy" and name in asked):
            continue
        for who, state in everyone:
            if name in state and (problem := _problem(who, name, state[name], template[name], headers=headers)):
                report(problem)
            elif name in state and rule != "copy" and not headers and state[name].is_floating_point():
                check_finite(who, name, state[name])
    found = _find_ties(base, models, resolved, asked) if ties is None else _fitting(ties, resolved, asked)
    return Inputs(base, models, resolved | {name: resolved[twin] for name, twin in found.items()}, found)


def _refuse(problem: EpimerError) -> None:
    raise problem


def _everyone(
    base: StateDict | None, models: Sequence[StateDict], labels: Sequence[str] | None
) -> list[tuple[str, StateDict]]:
    """Return all state dicts with the words an error calls them by."""
    everyone = [] if base is None else [("base", base)]
    return everyone + list(zip(labels or [f"models[{t}]" for t in range(len(models))], models, strict=True))


def _fitting(ties: Mapping[str, str], rules: Mapping[str, str], asked: Mapping[str, str]) -> dict[str, str]:
    """Return the ties whose two names are to be treated alike."""
    return {n: t for n, t in ties.items() if "skip" not in (rules[n], rules[t]) and asked.get(n, rules[t]) == rules[t]}


def _asked_rules(
    everyone: Sequence[tuple[str, StateDict]], rules: Sequence[tuple[str, str]], report: Callable[[EpimerError], None]
) -> dict[str, str]:
    """Return the rule the user gave to each name of any state dict; refuse patterns that match none."""
    names = dict.fromkeys(name for _, state in everyone for name in state)
    for pattern, rule in rules:
        if not any(matching(name, [(pattern, rule)]) for name in names):
            report(
                ParameterError(
                    f"The rule pattern {pattern!r} matches no tensor; patterns are globs over whole names: '*.bias'."
                )
            )
    return {name: found for name in names if (found := matching(name, rules))}


def _resolve_rules(
    template: StateDict, method: Method, asked: Mapping[str, str], report: Callable[[EpimerError], None]
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
            elif method.elementwise and rule in ("", "matrix"):
                rule = "elementwise"
        resolved[name] = rule or ("matrix" if is_matrix(name, W.shape) else "average")
    return resolved


def _check_names(
    models: Sequence[tuple[str, StateDict]],
    template: str,
    rules: Mapping[str, str],
    asked: Mapping[str, str],
    report: Callable[[EpimerError], None],
) -> None:
    needed = [name for name, rule in rules.items() if rule not in ("copy", "skip")]
    for who, model in models:
        missing = [name for name in needed if name not in model]
        extra = [name for name in model if name not in rules and asked.get(name) not in ("copy", "skip")]
        if needed and not model:
            report(TensorError(f"{who} is empty, expected {template}'s tensors: {listed(needed)}."))
        elif missing and len(missing) == len(needed):
            report(
                TensorError(
                    f"{who} has none of {template}'s tensors: it has {listed(model)}, not {listed(needed)}; "
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


def _problem(who: str, name: str, W: Tensor, template: Tensor, *, headers: bool) -> TensorError | None:
    """Say what is wrong with a tensor's dtype, shape or storage, or None."""
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
    if W.layout != torch.strided or (W.is_meta and not headers):
        kind = "has no data (it is on the meta device)" if W.is_meta else f"is stored as {W.layout}"
        return TensorError(f"{who}[{name!r}] {kind}, expected a dense tensor.")
    return None


def check_finite(who: str, name: str, W: Tensor) -> None:
    """Refuse a tensor with NaN or Inf in it."""
    if bad := nonfinite(W):
        raise TensorError(
            f"{who}[{name!r}] holds NaN or Inf in {bad} of {W.numel()} entries; repair or leave out that model."
        )


def _find_ties(
    base: StateDict | None, models: Sequence[StateDict], rules: Mapping[str, str], asked: Mapping[str, str]
) -> dict[str, str]:
    """Find names that are one tensor in the template and in every model; the first name's rule holds for all."""
    template = models[0] if base is None else base
    ties: dict[str, str] = {}
    heads: dict[tuple[object, ...], list[str]] = {}
    for name, rule in rules.items():
        W = template[name]
        if rule == "skip" or not W.numel():
            continue
        group = heads.setdefault(_storage(W), [])
        for twin in group:
            fits = asked.get(name, rules[twin]) == rules[twin]
            if fits and (rules[twin] == "copy" or _same_everywhere(models, name, twin)):
                ties[name] = twin
                break
        else:
            group.append(name)
    return ties


def _storage(W: Tensor) -> tuple[object, ...]:
    return W.data_ptr(), W.device, W.dtype, tuple(W.shape), W.stride()


def _same_everywhere(models: Sequence[StateDict], name: str, twin: str) -> bool:
    return all(
        name in model
        and twin in model
        and (_storage(model[name]) == _storage(model[twin]) or torch.equal(model[name], model[twin]))
        for model in models
    )


def matrix_shape(W: Tensor) -> tuple[int, int]:
    """Return the shape of a tensor's matrix view; a convolution is (out, in·kh·kw)."""
    return len(W), W.numel() // len(W)


def precision(tensors: Iterable[Tensor | None]) -> torch.dtype:
    """Return the precision to compute in: float64 if any input is, float32 otherwise."""
    return torch.float64 if any(W is not None and W.dtype == torch.float64 for W in tensors) else torch.float32


def task_vectors(
    W0: Tensor | None, tensors: Iterable[Tensor], *, matrix: bool, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return D_t = W_t - W0 in working precision, one after the other."""
    if dtype is None:
        tensors = list(tensors)
        dtype = precision((W0, *tensors))
    start = None if W0 is None else W0.to(dtype)
    deltas = [W.to(dtype) if start is None else W.to(dtype) - start for W in tensors]
    return [D.reshape(matrix_shape(D)) for D in deltas] if matrix else deltas


def check_weights(weights: Sequence[float] | None, tasks: int, method: Method) -> list[float]:
    """Return λ_t summing to 1, or the weights as given where the method is defined so."""
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
        if w < 0 and not method.absolute_weights:
            raise ParameterError(
                f"weights[{t}] is {w:g}; {method.name} takes a mean, so weights must not be negative "
                "(task_arithmetic takes negative ones)."
            )
    values = [float(w) for w in given]
    if method.absolute_weights:
        return values
    total = sum(values)
    if not (total > 0 and math.isfinite(total)):
        raise ParameterError(f"weights sum to {total:g}; they must have a positive, finite total.")
    return [w / total for w in values]
