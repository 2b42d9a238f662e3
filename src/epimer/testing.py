"""A test kit for people who write a method: `check_laws` tests on small random models what the method's row claims.

The laws are those that any merge may obey (`LAWS`); a method states in `Method.laws` which ones it does. Those of
`EVERY_METHOD` hold for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import epimer
from epimer.geometry.metric import Diagonal, Kronecker, Metric, Samples
from epimer.methods.registry import Method, describe_method, list_methods, register_method, unregister_method

State = dict[str, Tensor]

MATRICES = {"block.0.weight": (24, 20), "block.1.weight": (18, 30)}
OTHERS = {
    "embed_tokens.weight": (11, 6),
    "block.0.bias": (24,),
    "conv.weight": (4, 3, 2, 2),
    "temperature": (),
    "empty": (0, 3),
    "lm_head.weight": (5, 20),
}


def check_laws(method: Method | str) -> None:
    """Raise AssertionError unless a method obeys exactly the laws that its row states, at its defaults.

    Those of `EVERY_METHOD` it must obey without stating them. `method` is a row, registered or not, or the name of a
    registered one.
    """
    with _registered(method) as row:
        problems = [f"{row.name} states the law {law!r}, which does not exist." for law in row.laws - LAWS.keys()]
        for law, (meaning, _) in LAWS.items():
            broken = find_violation(row, law)
            if law in row.laws and broken is not None:
                problems.append(f"{row.name} breaks the law {law!r} ({meaning}), which it states: {broken}.")
            elif law not in row.laws and broken is None:
                problems.append(f"{row.name} obeys the law {law!r} ({meaning}); add it to its laws.")
        for law, (meaning, _) in EVERY_METHOD.items():
            if (broken := find_violation(row, law)) is not None:
                problems.append(
                    f"{row.name} breaks the law {law!r} ({meaning}), which holds for every method: {broken}."
                )
    if problems:
        raise AssertionError("\n".join(problems))


def find_violation(method: Method | str, law: str) -> str | None:
    """Return how a method breaks a law on random models, in words; None where it obeys it."""
    with _registered(method) as row:
        return (LAWS | EVERY_METHOD)[law][1](row)


@contextmanager
def _registered(method: Method | str) -> Iterator[Method]:
    """Register a method for a while, if it is not."""
    row = describe_method(method) if isinstance(method, str) else method
    forms = {one.mergekit for one in map(describe_method, list_methods())}
    if row in forms or (row.name in list_methods() and describe_method(row.name) is row):
        yield row
        return
    register_method(row)
    try:
        yield row
    finally:
        unregister_method(row.name)


def make_base(dtype: torch.dtype = torch.float32, seed: int = 0) -> State:
    """Return an ancestor with matrices, vectors, a convolution, a scalar, an empty and an integer tensor."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in (MATRICES | OTHERS).items()}
    state["steps"] = torch.tensor([3, 1, 4])
    return state


def make_models(base: Mapping[str, Tensor], count: int = 3, *, rank: int | None = None, seed: int = 1) -> list[State]:
    """Return fine-tuned models; with `rank`, their matrices moved in that many directions only."""
    generator = torch.Generator().manual_seed(seed)
    models = []
    for t in range(count):
        model = {}
        for name, W in base.items():
            if not W.is_floating_point():
                model[name] = W.clone()
                continue
            delta = 0.1 * (1 + t) * torch.randn(W.shape, generator=generator)
            if rank is not None and name in MATRICES:
                delta = delta[:, :rank] @ delta[:rank, :]
            model[name] = (W.double() + delta.double()).to(W.dtype)
        models.append(model)
    return models


def make_curvature(
    base: Mapping[str, Tensor], kind: str | None, count: int = 3, seed: int = 2
) -> list[dict[str, Metric]] | None:
    """Return one mapping per model: a diagonal for every float tensor, the other kinds for the matrices."""
    if kind not in ("diagonal", "kronecker", "samples"):
        return None
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def metric(W: Tensor) -> Metric:
        if kind == "diagonal":
            return Diagonal(draw(*W.shape).square() * draw(*W.shape).exp())
        m, n = W.shape
        g, x = draw(40, 2, m) * draw(m).exp(), draw(40, 2, n) * draw(n).exp()
        if kind == "samples":
            return Samples(g=g, x=x)
        G, A = g.flatten(0, 1), x.flatten(0, 1)
        return Kronecker(G=G.T @ G / len(G), A=A.T @ A / len(A))

    names = [name for name, W in base.items() if (W.is_floating_point() if kind == "diagonal" else name in MATRICES)]
    return [{name: metric(base[name]) for name in names} for _ in range(count)]


def usual_count(method: Method, most: int = 3) -> int:
    """Return how many models to test a method with: three, or as many as it merges."""
    return most if method.models[1] is None else min(most, method.models[1])


def required_arguments(method: Method | str, base: Mapping[str, Tensor], count: int = 3) -> dict[str, Any]:
    """Return the arguments that a method cannot do without: curvature of its kind, and functions that score a model."""
    row = describe_method(method) if isinstance(method, str) else method
    arguments: dict[str, Any] = {
        parameter.name: lambda state: -float(state["block.0.weight"].double().square().sum())
        for parameter in row.parameters
        if parameter.kind == "callable"
    }
    if row.needs_curvature:
        arguments["curvature"] = make_curvature(base, row.curvature, count)
    return arguments


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Return ‖a - b‖ relative to the larger norm."""
    a, b = a.double(), b.double()
    return float((a - b).norm()) / max(float(a.norm()), float(b.norm()), 1e-300)


def _differs(merged: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> str | None:
    """Name the first floating-point tensor that is not as expected."""
    for name, W in expected.items():
        if W.is_floating_point() and not (gap := relative_difference(merged[name], W)) <= tolerance:
            return f"{name!r} differs by {gap:.2g} of its norm"
    return None


def _merge(method: Method, base: State, models: list[State], **arguments: Any) -> Mapping[str, Tensor]:
    """Return the models merged, under the arguments and those that the method cannot do without."""
    needs = required_arguments(method, base, len(models))
    return epimer.merge_state_dicts(base, models, method.name, **needs | arguments)


def _permutation(method: Method) -> str | None:
    base = make_base(torch.float64)
    count = usual_count(method)
    weighted: dict[str, list[Any]] = {"models": make_models(base, count), "weights": [0.5, 0.2, 0.3][:count]}
    if method.needs_curvature:
        weighted["curvature"] = required_arguments(method, base)["curvature"]
    order = [2, 0, 1] if count == 3 else [*reversed(range(count))]
    permuted = {name: [values[t] for t in order] for name, values in weighted.items()}
    return _differs(_merge(method, base, **permuted), _merge(method, base, **weighted), 1e-8)


def _copies(method: Method) -> str | None:
    base = make_base(torch.float64)
    model = make_models(base, 1, rank=3)[0]  # moved in fewer directions than a basis keeps per model
    copies = [dict(model) for _ in range(usual_count(method))]
    return _differs(_merge(method, base, copies), model, 1e-6)


def _scale_zero(method: Method) -> str | None:
    base = make_base()
    return _differs(_merge(method, base, make_models(base, usual_count(method)), scale=0), base, 0.0)


def _curvature_scale(method: Method) -> str | None:
    base = make_base(torch.float64)
    models, curvature = make_models(base), make_curvature(base, method.curvature)
    if curvature is None:
        return "it uses no measured curvature"
    louder = [
        {name: _times(metric, c) for name, metric in mapping.items()}
        for mapping, c in zip(curvature, (1e-3, 1.0, 550.0), strict=True)
    ]
    first, second = (_merge(method, base, models, curvature=each) for each in (curvature, louder))
    return _differs(second, first, 1e-6)


def _times(metric: Metric, c: float) -> Metric:
    match metric:
        case Diagonal(F=F):
            return Diagonal(c * F)
        case Kronecker(A=Tensor() as A, G=G):
            return Kronecker(A=c * A, G=G)
        case Samples(g=g, x=x):
            return Samples(g=c**0.5 * g, x=x)
    raise AssertionError(f"no law for curvature of kind {metric.kind}")


def _zero_weight(method: Method) -> str | None:
    base, count = make_base(torch.float64), usual_count(method, 2)
    models, needs = make_models(base, count + 1), required_arguments(method, base, count + 1)
    for left_out, given_weights in ((count, [0.3, 0.7]), (0, [0.7, 0.3])):
        weights = given_weights[:count]
        weights.insert(left_out, 0.0)
        merged = _merge(method, base, models, weights=weights)
        others = [t for t in range(count + 1) if t != left_out]
        given = needs | {"weights": [weights[t] for t in others]}
        if "curvature" in needs:
            given["curvature"] = [needs["curvature"][t] for t in others]
        alone = epimer.merge_state_dicts(base, [models[t] for t in others], method.name, **given)
        if broken := _differs(merged, alone, 1e-12):
            return f"with weights {weights}, {broken} from the merge of the others"
    return None


def _weight_limit(method: Method) -> str | None:
    if method.models[1] is not None:
        return None  # a model more would be refused, so there is no merge without it
    base, models = make_base(torch.float64), make_models(make_base(torch.float64))
    needs = required_arguments(method, base)
    merged = _merge(method, base, models, weights=[0.3, 0.7, 1e-9])
    given = needs | {"weights": [0.3, 0.7]}
    if "curvature" in needs:
        given["curvature"] = needs["curvature"][:2]
    alone = epimer.merge_state_dicts(base, models[:2], method.name, **given)
    broken = _differs(merged, alone, 1e-5)
    if broken and not method.counts_models:
        return f"with a weight of 1e-9, {broken} from the merge of the others, and its row does not state counts_models"
    if method.counts_models and not broken:
        return "its row states counts_models, but a weight of 1e-9 gives the merge of the others"
    return None


Law = tuple[str, Callable[[Method], str | None]]

EVERY_METHOD: dict[str, Law] = {
    "zero_weight": ("a model of weight 0 might as well not be there", _zero_weight),
    "weight_limit": ("a model whose weight goes to 0 fades, unless `counts_models` says otherwise", _weight_limit),
}
"""laws that every method must obey, whatever its row states"""

LAWS: dict[str, Law] = {
    "permutation": ("the order of the models does not matter", _permutation),
    "copies": ("merging copies of one model returns it", _copies),
    "scale_zero": ("scale 0 returns the base", _scale_zero),
    "curvature_scale": ("each model's curvature may be in units of its own", _curvature_scale),
}
"""law -> what it says, and the check that returns how a method breaks it"""
