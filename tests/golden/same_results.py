"""Record, bit by bit, what epimer computes, and compare two such records: a refactoring must change nothing.

    python tests/golden/same_results.py record before.json
    python tests/golden/same_results.py record after.json --only 'merge/tsv/*'
    python tests/golden/same_results.py compare before.json after.json

A record maps the name of a case to what came out: the hash of every tensor's bytes beside a few sums that tell how far
two of them are apart, the record of the merge, all numbers of a diagnosis. Words (warnings, notes, model cards) are
kept apart from numbers. Left out are times, memory in use and paths. All inputs are made from fixed seeds in a folder
that is removed afterwards; only public names and the command line are used. One thread, one worker unless a case says
otherwise: records of one machine and one version of torch can be compared, those of two may differ in last digits.

A case that fails is recorded with its error, and `record` then exits with 1; `compare` exits with 1 if any case
differs or is missing. Two minutes of one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import epimer

Found = dict[str, Any]
Case = Callable[[], Found]
State = dict[str, Tensor]
Parameters = dict[str, Any]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
PASSING = {"seconds", "timings", "peak_memory", "date"}  # what is true of one run only
WORDS = {"warnings", "texts", "note", "notes", "advice", "recipe", "left_out"}  # fields that hold sentences


# --- numbers that do not depend on the order in which they are asked for ----------------------------------------------


def noise(*shape: int, key: object) -> Tensor:
    """Return normal numbers in float64 that depend on the shape and the key alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr((shape, key)).encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def gram(size: int, key: object, rows: int | None = None) -> Tensor:
    """Return a positive semi-definite matrix of uneven spectrum; singular where it has fewer rows than columns."""
    X = noise(rows or 2 * size, size, key=("rows", key)) * noise(size, key=("spread", key)).exp()
    return X.T @ X / len(X)


def step(shape: Sequence[int], size: float, key: object) -> Tensor:
    """Return a task vector: a matrix has a falling spectrum over noise, as fine-tuning leaves it."""
    if len(shape) != 2 or not all(shape):
        return size * noise(*shape, key=key)
    m, n = shape
    rank = min(m, n, 64)
    left, right = noise(m, rank, key=("left", key)), noise(rank, n, key=("right", key))
    falling = 0.85 ** torch.arange(rank, dtype=torch.float64)
    return size * ((left * falling) @ right + 0.02 * noise(m, n, key=key))


# --- a small model with every kind of tensor --------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (30, 24),
    "layers.0.square.weight": (24, 24),
    "layers.0.square.bias": (24,),
    "layers.0.wide.weight": (16, 40),
    "layers.0.norm.weight": (24,),
    "layers.1.tall.weight": (40, 16),
    "layers.1.norm.weight": (24,),
    "layers.1.norm.bias": (24,),
    "layers.2.large.weight": (256, 224),  # wide enough for a searched SVD and for a low-rank diagonal
    "layers.2.large.bias": (256,),
    "small.weight": (2, 2),  # fewer directions than tasks
    "conv.weight": (8, 4, 3, 3),
    "temperature": (),
    "empty": (0, 3),
    "head.weight": (3, 10),
    "head.bias": (3,),
}
TABLES = ("embed.weight", "head.weight", "empty")
MATRICES = [name for name, shape in SHAPES.items() if len(shape) == 2 and name not in TABLES]
TIES = {"lm_head.weight": "embed.weight"}
CONV = [("conv.weight", "matrix")]
NO_SMALL = [("small.weight", "average")]  # which has no basis


@cache
def ancestor(dtype: torch.dtype = torch.float32) -> State:
    """Return the base model; one tensor has two names."""
    state = {name: noise(*shape, key=name).to(dtype) for name, shape in SHAPES.items()}
    state |= {name: state[twin] for name, twin in TIES.items()}
    return state | {"steps": torch.tensor([3, 1, 4]), "mask": torch.tensor([True, False])}


@cache
def family(count: int, dtype: torch.dtype = torch.float32, kind: str = "usual") -> list[State]:
    """Return fine-tuned models: usual ones, copies of the first, or with one that never moved."""
    base, models = ancestor(dtype), []
    for t in range(count):
        source = 0 if kind == "copies" and t < 2 else t
        size = 0.0 if kind == "still" and t == 1 else 0.1 * (1 + source / 2)
        model = {
            name: (base[name].double() + step(shape, size, (name, source))).to(dtype) for name, shape in SHAPES.items()
        }
        model |= {name: model[twin] for name, twin in TIES.items()}
        models.append(model | {name: base[name] for name in ("steps", "mask")})
    return models


def metric(kind: str, shape: tuple[int, ...], key: object) -> Any:
    """Return curvature of a tensor; of its matrix view where it is two-sided."""
    m, n = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    key = (kind, key)
    match kind:
        case "diagonal":
            sides = [noise(side, key=(i, key)).exp() for i, side in enumerate(shape)]
            F = noise(*shape, key=key).mul(0.01).exp()  # near a product of its sides, so that a low rank serves
            for i, side in enumerate(sides):
                F = F * side.reshape([-1 if j == i else 1 for j in range(len(shape))])
            return epimer.Diagonal(F)
        case "rough diagonal":
            return epimer.Diagonal(noise(*shape, key=key).clamp_min(0).square())
        case "kronecker":
            return epimer.Kronecker(A=gram(n, (1, key)), G=gram(m, (0, key)))
        case "kronecker, singular":
            return epimer.Kronecker(A=gram(n, (1, key), rows=3), G=gram(m, (0, key), rows=2))
        case "kronecker, A":
            return epimer.Kronecker(A=gram(n, (1, key)))
        case "kronecker, G":
            return epimer.Kronecker(G=gram(m, (0, key)))
        case "kronecker, inputs=0":
            return epimer.Kronecker(A=gram(n, (1, key)), G=gram(m, (0, key)), inputs=0)
        case "ekfac":
            P, Q = (torch.linalg.qr(noise(side, side, key=(i, key))).Q for i, side in enumerate((m, n)))
            return epimer.Corrected(S=noise(m, n, key=key).square(), P=P, Q=Q)
        case "samples":
            g, x = (noise(12, 2, side, key=(i, key)) * noise(side, key=(i, key)).exp() for i, side in enumerate((m, n)))
            return epimer.Samples(g=g, x=x)
    raise AssertionError(kind)


@cache
def curvature(kind: str, count: int) -> list[dict[str, Any]]:
    """Return each model's curvature: a diagonal for every tensor, other kinds for matrices."""
    names = [name for name, shape in SHAPES.items() if math.prod(shape) and name != "temperature"]
    if not kind.endswith("diagonal"):
        names = [*MATRICES, "conv.weight"]
    return [{name: metric(kind, SHAPES[name], (name, t)) for name in names} for t in range(count)]


@cache
def bases(form: str, rank: int | None, count: int, dtype: torch.dtype, rules: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Return the bases of the models' matrices."""
    return epimer.build_basis(ancestor(dtype), family(count, dtype), rank=rank, basis=form, rules=rules)


def projected(kind: str, form: str, count: int, *, known: bool) -> list[dict[str, Any]]:
    """Return curvature in the coordinates of a basis of rank 4: H, or factors; `known` gives it the basis itself."""
    built = bases(form, 4, count, torch.float32)
    found: list[dict[str, Any]] = []
    for t in range(count):
        mapping = {}
        for name, basis in built.items():
            sides = {"H": basis.U.shape[1], "G": basis.U.shape[1], "A": basis.V.shape[1]}
            parts = {part: gram(sides[part], (part, name, t)) for part in kind}
            mapping[name] = epimer.Projected(**parts, basis=basis if known else None)
        found.append(mapping)
    return found


def score(state: Mapping[str, Tensor]) -> float:
    """Score a merge for greedy_soup: higher where it is near the first two of four models."""
    near = family(4)[:2]
    distances = [float((state[name].double() - model[name].double()).norm()) for model in near for name in MATRICES]
    return -sum(distances)


# --- merges of state dicts --------------------------------------------------------------------------------------------

KINDS = {
    "fisher": "diagonal",
    "gradient_matching": "diagonal",
    "epimer": "diagonal",
    "regmean": "kronecker",
    "mats": "kronecker",
    "epimer_kron": "kronecker",
    "epimer_full": "kronecker",
    "epimer_exact": "samples",
}
"""the curvature a method needs"""
BASELESS = ("average", "nan", "greedy_soup", "fisher", "regmean", "mats")
WEIGHING: list[Parameters] = [
    {"normalize": "none"},
    {"normalize": "trace"},
    {"damping": 0.0},
    {"damping": 0.3},
    {"jitter": 0.05},
    {"normalize": "trace", "jitter": 0.05, "damping": 0.1},
]
EQUATION: list[Parameters] = [
    *WEIGHING,
    {"basis": "tagged"},
    {"basis": "tensor"},
    {"basis": "full"},
    {"basis": "tagged", "rank": 8},
    {"basis": "tensor", "rank": 8},
    {"basis": "built tagged"},
    {"basis": "built tensor"},
    {"rank": 2},
    {"rank": 8},
    {"rank": 24},
    {"rank": None},
    {"aggregator": "mean"},
    {"aggregator": "sum"},
    *({"aggregator": "anchored", "anchor": anchor} for anchor in ("tsv", "sum", "average")),
    {"aggregator": "anchored", "anchor": "iso_c", "calibrate": None},
    {"aggregator": "anchored", "normalize": "none", "damping": 0.2},
    {"aggregator": "anchored", "basis": "full", "rank": 8},
    {"aggregator": "anchored", "basis": "built tagged"},
    {"projection_tol": 0.0},
    {"projection_tol": 0.5},
    {"iterations": 3},
    {"iterations": 3, "basis": "tensor", "rank": 8},
]
OPTIONS: dict[str, list[Parameters]] = {
    "average": [{"seed": 3}],
    "task_arithmetic": [{"weights": [0.7, -0.2, 1.1]}],
    "nan": [],
    "greedy_soup": [],
    "ties": [{"density": 0.5}, {"density": 1.0}, {"density": [0.1, 0.5, 0.9]}, {"elect": "frequency"}],
    "dare": [{"density": 0.9}, {"density": [0.1, 0.5, 0.9]}, {"seed": 7}, {"weights": [0.7, -0.2, 1.1]}],
    "dare_ties": [{"density": 0.9, "normalize": False}, {"compat": "mergekit", "density": 0.5}],
    "breadcrumbs": [{"density": 0.4, "gamma": 0.1}, {"rescale": True}],
    "breadcrumbs_ties": [{"density": [0.4, 0.9, 0.7], "normalize": True}],
    "della": [{"density": 0.6, "epsilon": 0.3}, {"compat": "mergekit", "density": 0.5}],
    "della_linear": [{"density": 0.6, "epsilon": 0.3}],
    "multislerp": [{"normalize_weights": False, "weights": [0.7, 0.2, 1.1]}],
    "karcher": [{"max_iter": 2}],
    "model_stock": [{"filter_wise": True}, {"compat": "mergekit"}],
    "sce": [{"select_topk": 0.3}, {"compat": "mergekit"}],
    "ram": [{"epsilon": 0.01}],
    "ramplus_tl": [{"epsilon": 0.01, "r": 0.5}],
    "slerp": [{"t": 0.3}, {"t": 0.3, "compat": "mergekit"}],
    "nuslerp": [{"nuslerp_flatten": False}, {"nuslerp_flatten": False, "nuslerp_row_wise": True}],
    "nearswap": [{"t": 0.01}],
    "arcee_fusion": [],
    "passthrough": [{"scale": 0.5}],
    "gradient_matching": [
        {"prior": 0.1},
        {"samples": [10.0, 200.0, 30.0]},
        {"base_curvature": "diagonal"},
        {"base_curvature": "diagonal", "base_samples": 4.0, "prior": 0.01, "samples": [1.0, 2.0, 3.0]},
    ],
    "tsv": [{"rank": 2}, {"rank": 8}, {"rank": 24}, {"coefficients": "projected"},
            {"coefficients": "projected", "rank": 8}],
    "iso_c": [],
    "iso_cts": [{"common": 0.0}, {"common": 0.5}, {"common": 1.0}],
    "fisher": WEIGHING,
    "regmean": [{"off_diagonal": 0.0}, {"off_diagonal": 1.0}, *EQUATION],
    "mats": EQUATION,
    "wudi": EQUATION,
    "epimer": EQUATION,
    "epimer_kron": EQUATION,
    "epimer_exact": EQUATION,
    "epimer_free": EQUATION,
    "epimer_full": [{"calibrate": None}],
}  # fmt: skip
"""what is varied of each method, one at a time, on three float32 models"""
RULES: dict[str, list[tuple[str, str]]] = {
    "conv as a matrix": CONV,
    "copy, skip, average": [("layers.0.*.bias", "copy"), ("head.*", "skip"), ("layers.1.tall.weight", "average")],
    "tables as matrices": [("embed.weight", "matrix"), ("lm_head.weight", "matrix"), ("head.weight", "matrix")],
    "ties undone": [("lm_head.weight", "copy")],
}
FISHER_RULE = [("layers.0.*", "fisher"), ("conv.weight", "fisher")]
MORE_CURVATURE: dict[str, tuple[str, ...]] = {
    "fisher": ("rough diagonal",),
    "gradient_matching": ("rough diagonal",),
    "epimer": ("rough diagonal",),
    "regmean": ("kronecker, singular", "kronecker, A", "kronecker, inputs=0"),
    "mats": ("kronecker, singular", "kronecker, A", "kronecker, G", "kronecker, inputs=0"),
    "epimer_kron": ("kronecker, singular", "kronecker, A", "kronecker, G", "kronecker, inputs=0", "ekfac"),
}
"""kinds beside a method's first one, on the models as they are"""
PROJECTED = [
    ("epimer", "H", "tagged"),
    ("epimer_exact", "H", "tagged"),
    ("epimer_kron", "H", "tagged"),
    ("epimer_kron", "AG", "tagged"),
    ("epimer_kron", "AG", "tensor"),
    ("epimer_kron", "A", "tensor"),
    ("mats", "AG", "tensor"),
    ("mats", "G", "tagged"),
]
ONLY_SMALL = [("layers.2.large.weight", "average")]  # where a large matrix would take too long


def merged(
    method: str,
    *,
    count: int = 3,
    dtype: str = "float32",
    kind: str | None = None,
    models: str = "usual",
    base: bool = True,
    given: list[dict[str, Any]] | None = None,
    **parameters: Any,
) -> Found:
    """Merge state dicts and record what came out; `built tagged` and the like stand for what is not plain data."""
    wide = DTYPES[dtype]
    if (wanted := parameters.get("basis")) in ("built tagged", "built tensor"):
        rules = tuple(parameters.get("rules", ()))
        parameters["basis"] = bases(wanted.removeprefix("built "), parameters.pop("rank", 4), count, wide, rules)
    if parameters.get("base_curvature") == "diagonal":
        parameters["base_curvature"] = curvature("diagonal", 9)[8]
    if method == "greedy_soup":
        parameters["evaluate"] = score
    kind = kind or KINDS.get(method)
    if given is None and kind is not None:
        given = curvature(kind, count)
    return observed(
        lambda: epimer.merge_state_dicts(
            ancestor(wide) if base else None, family(count, wide, models), method, curvature=given, **parameters
        )
    )


def observed(run: Callable[[], Any]) -> Found:
    """Return what a merge in memory made, its record and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    return {
        "tensors": {name: summary(W) for name, W in result.items()},
        "order": list(result),
        "tied": [name for name, twin in TIES.items() if name in result and result[name] is result.get(twin)],
        "record": unversioned(plain(result.record.to_dict())),
        "warnings": said(caught),
    }


def unversioned(record: Found) -> Found:
    """Return a record without its kind, its format and its hash, which older ones do not name."""
    return {key: value for key, value in record.items() if key not in ("kind", "format", "sha256")}


def read_header(file: Path) -> Found:
    """Return the header of a folder of curvature or of a basis without its hashes, which older ones do not have."""

    def unhashed(pairs: list[tuple[str, Any]]) -> Found:
        return {key: value for key, value in pairs if key not in ("sha256", "checksums")}

    return json.loads(file.read_text(), object_pairs_hook=unhashed)


def named(parameters: Mapping[str, Any]) -> str:
    """Return parameters as part of a case's name."""
    return ", ".join(f"{key}={value}" for key, value in parameters.items()) or "defaults"


def merges() -> Iterator[tuple[str, Case]]:
    """Yield the merges of state dicts."""
    for method in epimer.list_methods():
        fewest, most = epimer.describe_method(method).models
        if most is not None:
            for parameters in ({}, *OPTIONS.get(method, ())):
                yield f"merge/{method}/{named(parameters)}", partial(merged, method, count=most, **parameters)
            continue
        slow = method in ("mats", "epimer_full")  # which solves in the full space, by conjugate gradients
        run, at = partial(merged, method, rules=ONLY_SMALL if slow else []), f"merge/{method}"
        yield f"{at}/defaults", partial(merged, method)
        for count, dtype in ((1, "float32"), (4, "float32"), (3, "bfloat16"), (4, "bfloat16"), (3, "float64"),
                             (4, "float64")):  # fmt: skip
            if count >= fewest:
                yield f"{at}/{count} models in {dtype}", partial(run, count=count, dtype=dtype)
        yield f"{at}/copies", partial(run, models="copies")
        yield f"{at}/copies, rank 8 or so", partial(run, models="copies", **({"rank": 8} if has_rank(method) else {}))
        yield f"{at}/one that never moved", partial(run, models="still")
        yield f"{at}/weights", partial(run, weights=[0.5, 2.0, 1.0], scale=0.7)
        yield f"{at}/a weight of 0", partial(run, weights=[1.0, 0.0, 1.0])
        yield f"{at}/scale=1.3", partial(run, scale=1.3, dtype="bfloat16")
        yield f"{at}/scale=0", partial(run, scale=0.0, rules=ONLY_SMALL)
        for name, rules in RULES.items():
            if name == "tables as matrices" and method in KINDS and KINDS[method] != "diagonal":
                continue  # there is no two-sided curvature of tables here
            yield f"{at}/rules: {name}", partial(run, rules=[*rules, *ONLY_SMALL])
        for parameters in OPTIONS.get(method, ()):
            rules = [] if fits(method, parameters) else ONLY_SMALL
            yield f"{at}/{named(parameters)}", partial(run, **parameters, rules=rules)
        for kind in MORE_CURVATURE.get(method, ()):
            yield f"{at}/{kind}", partial(run, kind=kind)
            if method not in ("gradient_matching", "fisher"):
                yield f"{at}/{kind}, undamped", partial(run, kind=kind, damping=0.0, rules=ONLY_SMALL)
        if method in BASELESS:
            for dtype in DTYPES:
                yield f"{at}/no base, {dtype}", partial(run, base=False, dtype=dtype)
            yield f"{at}/no base, weights", partial(run, base=False, weights=[3.0, 1.0, 2.0])
        if KINDS.get(method, "diagonal") == "diagonal":
            fisher = curvature("diagonal", 3)
            yield f"{at}/rules: fisher", partial(run, given=fisher, rules=[*FISHER_RULE, *ONLY_SMALL])
    for method, kind, form in PROJECTED:
        given, at = partial(projected, kind, form, 3), f"merge/{method}/projected {kind} on a {form} basis"
        yield f"{at}", partial(_projected_merge, method, partial(given, known=True))
        yield f"{at}, basis=", partial(_projected_merge, method, partial(given, known=False), basis=f"built {form}")
    yield "merge/epimer_kron/ekfac, tagged", partial(merged, "epimer_kron", kind="ekfac", basis="tagged")
    yield "merge/mats/ekfac", partial(merged, "mats", kind="ekfac", rules=ONLY_SMALL)
    yield "merge/epimer_kron/conv, basis=", partial(merged, "epimer_kron", basis="built tensor", rules=CONV)
    yield "merge/average/curvature that is not used", partial(merged, "average", kind="diagonal")
    yield "merge/average/device=cpu", partial(merged, "average", device="cpu")
    for method in ("tsv", "epimer_free"):
        for factor in (1e-9, 1e6):  # powers of which leave float32
            yield f"merge/{method}/all times {factor:g}", partial(_scaled_merge, method, factor)


def _projected_merge(method: str, given: Callable[[], list[dict[str, Any]]], **parameters: Any) -> Found:
    return merged(method, given=given(), rules=NO_SMALL, **parameters)


def _scaled_merge(method: str, factor: float) -> Found:
    base, *models = [
        {name: factor * W for name, W in state.items() if W.is_floating_point()} for state in (ancestor(), *family(3))
    ]
    return observed(lambda: epimer.merge_state_dicts(base, models, method, rank=8))


def has_rank(method: str) -> bool:
    """Whether a method has a rank, by the table of what is varied."""
    return any("rank" in parameters for parameters in OPTIONS.get(method, ()))


def fits(method: str, parameters: Mapping[str, Any]) -> bool:
    """Whether a setting is quick on the large matrix too."""
    if method == "mats":
        return "iterations" in parameters or parameters.get("basis", "full") != "full"
    large = parameters.get("basis") in ("tensor", "full", "built tensor")  # per-sample gradients of all pairs are not
    return not (large and method in ("epimer", "epimer_exact"))


def built() -> Iterator[tuple[str, Case]]:
    """Yield the bases that are built in memory."""

    def shown(form: str, rank: int | None, count: int, dtype: str, rules: tuple[Any, ...]) -> Found:
        return {"tensors": {k: basis_summary(one) for k, one in bases(form, rank, count, DTYPES[dtype], rules).items()}}

    for form in ("tagged", "tensor"):
        for rank in (4, 8, 32, None):
            for dtype in DTYPES:
                run = partial(shown, form, rank, 3, dtype, ())
                yield f"basis/{form}, rank {rank}, {dtype}", run
        yield f"basis/{form}, conv", partial(shown, form, 4, 4, "float32", tuple(CONV))

        def copies(form: str = form) -> Found:
            made = epimer.build_basis(ancestor(), family(3, kind="copies"), rank=8, basis=form)
            return {"tensors": {name: basis_summary(one) for name, one in made.items()}}

        yield f"basis/{form}, copies", copies


# --- networks whose curvature is measured -----------------------------------------------------------------------------


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight is stored as (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.empty(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Block(nn.Module):
    """Two linear layers around a bend."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Words(nn.Module):
    """Tokens in, one of the tokens out: a table that is also the head, a convolution, GPT-2's layer, blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.mix = Conv1D(16, 16)
        self.layers = nn.ModuleList([Block(16, 40), Block(16, 28), Block(16, 24)])
        self.lm_head = nn.Linear(16, 20, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor([3, 1, 4]))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = torch.tanh(self.mix(x + self.conv(x.transpose(1, 2)).transpose(1, 2)))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x.mean(1))


class Pictures(nn.Module):
    """Convolutions, one of them in groups, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2, groups=2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))).flatten(2).mean(2))


class Attention(nn.Module):
    """An encoder layer over padded tokens, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids == 0
        x = self.table(ids)
        for _ in range(2):
            x = self.layer(x, src_key_padding_mask=padding)
        return self.head(x[:, 0])


class Text(nn.Module):
    """Tokens in, the next token at every place out; padding is told by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block, self.head = nn.Embedding(7, 8), Block(8, 12), nn.Linear(8, 7)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.table(ids) * attention_mask[..., None]
        return self.head(self.block(x.cumsum(1)))


def mlp() -> nn.Module:
    """Return a tiny MLP."""
    return nn.Sequential(nn.Linear(12, 18), nn.Tanh(), nn.LayerNorm(18), nn.Linear(18, 10), nn.Tanh(), nn.Linear(10, 5))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "regression": mlp,
    "words": Words,
    "pictures": Pictures,
    "attention": Attention,
    "text": Text,
}


@cache
def network(kind: str, t: int | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a network with fixed weights: the ancestor, or the model fine-tuned for task t."""
    made = NETWORKS[kind]().to(dtype)
    with torch.no_grad():
        for name, p in made.named_parameters():
            W = noise(*p.shape, key=(kind, name)) * (0.1 if p.dim() < 2 else p[0].numel() ** -0.5)
            W = W + ("norm" in name and name.endswith("weight"))
            p.copy_(W if t is None else W + step(p.shape, 0.05 * (1 + t / 2), (kind, name, t)))
    return made.eval()


def batches(kind: str, t: int, dtype: torch.dtype = torch.float32) -> list[tuple[Any, Tensor]]:
    """Return a few batches of a task's inputs and targets, the last one shorter."""
    found: list[tuple[Any, Tensor]] = []
    for i, size in enumerate((6, 6, 4)):
        key = (kind, "data", t, i)
        classes = {"words": 20, "pictures": 3, "attention": 3}.get(kind, 5)
        targets: Tensor = (noise(size, key=("y", key)).abs() * 1000).long() % classes
        inputs: Any = None
        if kind == "words":
            inputs = (noise(size, 5, key=key).abs() * 1000).long() % 20
        elif kind == "attention":
            inputs = (noise(size, 4, key=key).abs() * 1000).long() % 8 + 1
            inputs[::2, 3:] = 0
        elif kind == "text":
            ids = (noise(size, 5, key=key).abs() * 1000).long() % 7
            mask = torch.ones_like(ids)
            mask[::2, 3:] = 0
            inputs, targets = {"ids": ids, "attention_mask": mask}, torch.where(mask > 0, ids, -100)
        elif kind == "pictures":
            inputs = noise(size, 2, 6, 6, key=key).to(dtype)
        else:
            inputs = noise(size, 12, key=key).to(dtype)
        if kind == "regression":
            targets = noise(size, 5, key=("y", key)).to(dtype)
        found.append((inputs, targets))
    return found


def loss_of(kind: str) -> Callable[[Any, Any], Tensor]:
    """Return the loss of every sample."""
    if kind == "regression":
        return lambda outputs, targets: functional.mse_loss(outputs, targets, reduction="none").sum(1)
    if kind == "text":
        return lambda outputs, targets: functional.cross_entropy(
            outputs[:, :-1].transpose(1, 2), targets[:, 1:], reduction="none"
        ).sum(1)
    return lambda outputs, targets: functional.cross_entropy(outputs, targets, reduction="none")


def network_bases(kind: str, form: str, rank: int = 4) -> dict[str, Any]:
    """Return the bases of three fine-tuned networks."""
    states = [dict(network(kind, t).state_dict()) for t in (None, 0, 1, 2)]
    return epimer.build_basis(states[0], states[1:], rank=rank, basis=form)


def measure(network_kind: str, t: int = 0, *, model: str = "float32", form: str | None = None, **options: Any) -> Any:
    """Measure the curvature of a network in a precision; with `form`, in a basis."""
    basis = {} if form is None else {"basis": network_bases(network_kind, form)}
    wide = DTYPES[model]
    return epimer.estimate_curvature(
        network(network_kind, t, wide), batches(network_kind, t, wide), loss_of(network_kind), progress=False,
        **({"samples": None} | basis | options),
    )  # fmt: skip


MEASURED = ("kronecker", "diagonal", "ekfac", "samples")
LABELS = ("model", "true", "expected")


def measurements() -> Iterator[tuple[str, Case]]:
    """Yield the measurements of curvature."""

    def run(take: Callable[[], Any]) -> Found:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = take()
        return {**curvature_summary(found), "warnings": said(caught)}

    def case(name: str, take: Callable[[], Any]) -> tuple[str, Case]:
        return f"curvature/{name}", partial(run, take)

    for kind in MEASURED:
        for net in NETWORKS:
            for labels in LABELS:
                yield case(f"{net}, {kind}, {labels}", partial(measure, net, kind=kind, labels=labels))
        yield case(f"mlp, {kind}, float64", partial(measure, "mlp", kind=kind, model="float64"))
        yield case(f"mlp, {kind}, bfloat16", partial(measure, "mlp", kind=kind, model="bfloat16"))
        yield case(f"mlp, {kind}, summed in float64", partial(measure, "mlp", kind=kind, dtype=torch.float64))
        yield case(f"mlp, {kind}, seed 5, 9 samples", partial(measure, "mlp", kind=kind, seed=5, samples=9))
        yield case(f"words, {kind}, reduce", partial(measure, "words", kind=kind, sequence="reduce"))
        yield case(f"text, {kind}, reduce", partial(measure, "text", kind=kind, sequence="reduce"))
        yield case(f"words, {kind}, some layers", partial(measure, "words", kind=kind, layers=["layers.*.weight"]))
        if kind != "ekfac":
            yield case(f"mlp, {kind}, two sets added", partial(_added, kind))
    for kind, form in [("kronecker", "tensor"), *((kind, "tagged") for kind in (*MEASURED, "hessian", "ggn"))]:
        for labels in LABELS:
            if kind != "ekfac" and (labels != "expected" or kind in MEASURED):
                run_on = partial(measure, "mlp", kind=kind, labels=labels, form=form)
                yield case(f"mlp, {kind}, {labels}, {form} basis", run_on)
    yield case("words, hessian, tagged basis", partial(measure, "words", kind="hessian", form="tagged"))
    yield case("words, diagonal, tagged basis", partial(measure, "words", kind="diagonal", form="tagged"))
    yield case("mlp, loss of a sum", _of_a_sum)
    for moment in ("first", "second"):
        yield case(f"optimizer, {moment} moment", partial(_from_optimizer, moment))


def _added(kind: str) -> Any:
    one, two = (
        epimer.estimate_curvature(
            network("mlp", 0), batches("mlp", s), loss_of("mlp"), kind=kind, samples=n, progress=False
        )
        for s, n in ((0, 16), (1, 7))
    )
    return one + two


def _of_a_sum() -> Any:
    loss = loss_of("mlp")
    given = batches("mlp", 0)
    return epimer.estimate_curvature(network("mlp", 0), given, lambda o, y: loss(o, y).sum(), progress=False)


def _from_optimizer(moment: str) -> Any:
    model = NETWORKS["mlp"]()
    model.load_state_dict(network("mlp", 0).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches("mlp", 0):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(optimizer.state_dict(), Path(folder) / "optimizer.pt")
        return epimer.Curvature.from_optimizer(Path(folder) / "optimizer.pt", model, moment=moment)


def measured_merges() -> Iterator[tuple[str, Case]]:
    """Yield merges under curvature that was measured."""

    def run(method: str, net: str, form: str | None = None, **options: Any) -> Found:
        states = [dict(network(net, t).state_dict()) for t in (None, 0, 1, 2)]
        found = [measure(net, t, form=form, **options) for t in range(3)]
        basis = {} if form is None else {"basis": network_bases(net, form)}
        return observed(lambda: epimer.merge_state_dicts(states[0], states[1:], method, curvature=found, **basis))

    for method, kind in [*((m, k) for m, k in KINDS.items()), ("mats", "ekfac"), ("epimer_kron", "ekfac")]:
        for labels in LABELS:
            yield f"measured/{method}, {kind}, {labels}", partial(run, method, "mlp", kind=kind, labels=labels)
        yield f"measured/{method}, {kind}, words", partial(run, method, "words", kind=kind)
    for method, kind, form in [
        ("epimer_kron", "kronecker", "tensor"),
        ("epimer_kron", "kronecker", "tagged"),
        ("mats", "kronecker", "tensor"),
        ("epimer", "diagonal", "tagged"),
        ("epimer_exact", "samples", "tagged"),
        ("epimer_exact", "hessian", "tagged"),
        ("epimer_exact", "ggn", "tagged"),
    ]:
        yield f"measured/{method}, {kind} on a {form} basis", partial(run, method, "mlp", form=form, kind=kind)


# --- models on disk ---------------------------------------------------------------------------------------------------


def save_model(folder: Path, state: Mapping[str, Tensor], form: str = "single", ties: Mapping[str, str] = TIES) -> None:
    """Write a model folder: one safetensors file, shards with an index, or a torch file; with what lies beside it."""
    folder.mkdir()
    stored = {name: W for name, W in state.items() if name not in ties}
    if form == "torch":
        torch.save(dict(state), folder / "pytorch_model.bin")
    elif form == "both names":
        save_file({name: W.clone() for name, W in state.items()}, folder / "model.safetensors")
    elif form == "single":
        metadata = {"format": "pt"} | {name: twin for name, twin in ties.items() if name in state}
        save_file(stored, folder / "model.safetensors", metadata)
    else:
        names = list(stored)
        parts = [names[: len(names) // 2], names[len(names) // 2 :]]
        files = {name: f"model-{i + 1:05}-of-00002.safetensors" for i, part in enumerate(parts) for name in part}
        for part in parts:
            own = {name: twin for name, twin in ties.items() if twin in part and name in state}
            save_file({name: stored[name] for name in part}, folder / files[part[0]], {"format": "pt"} | own)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config = {"model_type": "words", "torch_dtype": "float32", "_name_or_path": "/not/here", "layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 3}))
    (folder / "tokenizer.json").write_text(json.dumps({"made for": folder.name}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T", "name_or_path": "/not/here"}))


def save_adapter(folder: Path, key: object, layers: Mapping[str, int], *, binary: bool = False, **config: Any) -> None:
    """Write a LoRA adapter of some of the base's tensors, each with its rank; what begins with = is replaced whole."""
    folder.mkdir()
    tensors: State = {}
    for name, rank in layers.items():
        whole = name.removeprefix("=")
        shape, stem = SHAPES[whole], f"base_model.model.{whole.removesuffix('.weight')}"
        if whole != name:
            moved = ancestor()[whole].double() + 0.1 * noise(*shape, key=(key, name))
            tensors[f"base_model.model.{whole}"] = moved.float()
            continue
        A, B = noise(rank, *shape[1:], key=("A", key, name)), noise(shape[0], rank, key=("B", key, name)) * 0.1
        if name == "embed.weight":
            A, B = noise(rank, shape[0], key=("A", key, name)), noise(shape[1], rank, key=("B", key, name)) * 0.1
            tensors |= {f"{stem}.lora_embedding_A": A.float(), f"{stem}.lora_embedding_B": B.float()}
            continue
        if len(shape) > 2:
            B = B.reshape(*B.shape, *[1] * (len(shape) - 2))
        tensors |= {f"{stem}.lora_A.weight": A.float(), f"{stem}.lora_B.weight": B.float()}
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["square"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if binary:
        torch.save(tensors, folder / "adapter_model.bin")
    else:
        save_file(tensors, folder / "adapter_model.safetensors")


JUDGE = '''"""Scores of a merge: how near each layer's outputs are to those of the task's own model."""

from pathlib import Path

import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
LAYERS = ("layers.0.up.weight", "layers.1.down.weight", "mix.weight")


def scores(state, split):
    """Return a score for each of six samples, task by task."""
    found = {}
    for t in range(3):
        own = load_file(HERE / f"words-{t}.safetensors")
        generator = torch.Generator().manual_seed(10 * t + (split == "test"))
        total = torch.zeros(6, dtype=torch.float64)
        for name in LAYERS:
            X = torch.randn(own[name].shape[1], 6, generator=generator, dtype=torch.float64)
            total -= ((state[name].double() - own[name].double()) @ X).square().sum(0)
        found[f"task {t}"] = total
    return found


def one_score(state):
    """Return one number per task."""
    return {task: float(values.mean()) for task, values in scores(state, "val").items()}
'''
TABLE = (4096, 2100)  # so large that it is merged in parts


def furnish(root: Path) -> None:
    """Write all models, adapters, curvature and bases that recipes name."""
    forms = {"one": "single", "two": "shards", "three": "torch", "four": "both names"}
    for prefix, dtype in (("", torch.float32), ("half-", torch.bfloat16)):
        save_model(root / f"{prefix}base", ancestor(dtype))
        for model, (name, form) in zip(family(4, dtype), forms.items(), strict=True):
            save_model(root / f"{prefix}{name}", model, form)
    save_model(root / "base-both", ancestor(), "both names")
    save_model(root / "base-torch", ancestor(), "torch")
    save_model(root / "headless", {name: W for name, W in family(4)[3].items() if name not in TIES})
    save_file({name: W for name, W in family(4)[3].items() if name not in TIES}, root / "five.safetensors",
              dict(TIES))  # fmt: skip
    torch.save(family(4)[3], root / "six.pt")
    for t in (None, 0, 1):
        W = noise(*TABLE, key="table").float() + (0.0 if t is None else 0.1 * noise(*TABLE, key=t).float())
        save_file({"embed.weight": W, "norm.weight": noise(8, key=t).float()}, root / f"table-{t}.safetensors")
    lora = {"layers.0.square.weight": 4, "layers.0.wide.weight": 4, "layers.2.large.weight": 4}
    save_adapter(root / "lora-a", "a", lora)
    save_adapter(root / "lora-b", "b", {**lora, "layers.1.tall.weight": 3, "=layers.1.norm.weight": 0},
                 use_rslora=True, alpha_pattern={"layers.0.wide": 11, "tall": 3})  # fmt: skip
    save_adapter(root / "lora-c", "c", {"layers.0.square.weight": 2, "embed.weight": 4, "conv.weight": 3,
                                        "=layers.0.square.bias": 0}, fan_in_fan_out=True, binary=True)  # fmt: skip
    for t in (None, 0, 1, 2):
        state, name = dict(network("words", t).state_dict()), "words" if t is None else f"words-{t}"
        save_model(root / name, state)
        save_file({k: W for k, W in state.items() if k not in TIES}, root / f"{name}.safetensors", dict(TIES))
        for kind in MEASURED if t is not None else ():
            measure("words", t, kind=kind).save(root / f"words-{t}.{kind}")
        for kind, form in (("kronecker", "tensor"), ("diagonal", "tagged"), ("samples", "tagged")):
            if t is not None:
                measure("words", t, kind=kind, form=form).save(root / f"words-{t}.{kind}-{form}")
    (root / "judge.py").write_text(JUDGE)


def recipe(
    method: str,
    *models: str,
    base: str | None = "base",
    own: Mapping[str, Parameters] | None = None,
    curvature: str | list[str] | None = None,
    **rest: Any,
) -> dict[str, Any]:
    """Return a recipe; `own` are single models' parameters, `curvature` is the kind of their folders or a list."""
    entries: list[dict[str, Any]] = [{"model": model} for model in models or ("one", "two", "three")]
    for entry in entries:
        if entry["model"] in (own or {}):
            entry["parameters"] = (own or {})[entry["model"]]
        if isinstance(curvature, str):
            entry["curvature"] = f"{entry['model']}.{curvature}"
    if isinstance(curvature, list):
        rest["curvature"] = curvature
    given = {"merge_method": method, "models": entries, **rest}
    return given if base is None else {"base_model": base, **given}


def words(method: str, kind: str | list[str] | None = None, **rest: Any) -> dict[str, Any]:
    """Return a recipe of the networks whose curvature was measured."""
    return recipe(method, "words-0", "words-1", "words-2", base="words", curvature=kind, **rest)


LORA = ("base+lora-a", "base+lora-b", "base+lora-c")
HALF = ("half-one", "half-two", "half-three")
FILTERS = [{"filter": "layers.0", "value": 0.3}, {"filter": "weight", "value": [0.2, 0.8, 1.4]}, {"value": 0.6}]
FREE = ("average", "task_arithmetic", "nan", "ties", "dare", "tsv", "iso_c", "iso_cts", "wudi", "epimer_free")
SHARDED = {"max_shard_size": "40KB"}

RECIPES: dict[str, dict[str, Any]] = {
    **{method: recipe(method) for method in FREE},
    **{f"{method}, half": recipe(method, *HALF, base="half-base") for method in FREE},
    **{f"{method}, adapters": recipe(method, *LORA) for method in FREE},
    "average, adapters and models": recipe("average", "base+lora-a", "two", "half-base+lora-b"),
    "tsv, adapters and models": recipe("tsv", "base+lora-a", "two", "half-base+lora-b", parameters={"rank": 8}),
    "epimer_free, adapters of a half base": recipe(
        "epimer_free", "half-base+lora-a", "half-base+lora-b", base="half-base"
    ),
    "tsv, conv adapter as a matrix": recipe("tsv", *LORA, rules={"conv.weight": "matrix"}),
    "average, four models": recipe("average", "one", "two", "three", "four"),
    "average, both names stored": recipe("average", "one", "two", "four", base="base-both"),
    "average, a head that is not stored": recipe("average", "four", "headless", base="base-both"),
    "tsv, equal models": recipe("tsv", "one", "one", "base-both", "two", parameters={"rank": 8}),
    "average, torch base": recipe("average", "one", "three", "six.pt", base="base-torch"),
    "tsv, single files": recipe("tsv", "five.safetensors", "six.pt", "one"),
    "tsv, rank 8": recipe("tsv", parameters={"rank": 8}),
    "tsv, mixed dtypes": recipe("tsv", "one", "half-two", "three", parameters={"rank": 8}),
    "average, no base": recipe("average", base=None),
    "linear": recipe("linear", base=None, own={"one": {"weight": 0.2}, "two": {"weight": 0.5}, "three": {"weight": 1}}),
    "linear, not normalized": recipe(
        "linear", base=None, parameters={"normalize": False, "weight": [0.2, 0.5, 0.9]}
    ),
    "average, not normalized": recipe("average", parameters={"normalize": 0.0, "weight": 0.4}),
    "task_arithmetic, normalized": recipe(
        "task_arithmetic", parameters={"normalize": True}, own={"one": {"weight": 2}, "two": {"weight": 1},
                                                                 "three": {"weight": -0.5}}
    ),
    "task_arithmetic, base listed": recipe("task_arithmetic", "base", "one", "two", parameters={"weight": 0.4}),
    "task_arithmetic, gradients": recipe(
        "task_arithmetic", parameters={"lambda": [0.5, 1.0]},
        own={"one": {"weight": [0, 0.4, 1]}, "two": {"weight": FILTERS}, "three": {"weight": 0.3}},
    ),
    "tsv, filters": recipe("tsv", parameters={"scale": FILTERS, "rank": [2, 8], "weight": FILTERS}),
    "epimer_free, filters": recipe(
        "epimer_free",
        parameters={"basis": [{"filter": "layers.0", "value": "tagged"}, {"value": "tensor"}], "rank": 8,
                    "damping": [{"filter": "tall", "value": "1e-2"}, {"value": 0.5}]},
    ),
    "ties, own densities": recipe(
        "ties", own={"one": {"density": 0.5, "weight": 1}, "two": {"weight": 2}, "three": {"density": 0.1,
                                                                                            "weight": 0.5}},
        parameters={"density": 0.3, "elect": "frequency"}, scale=0.8,
    ),
    "dare_linear": recipe("dare_linear", parameters={"density": [0.3, 0.9], "seed": 4}),
    "average, float64": recipe("average", dtype="float64"),
    "tsv, float64": recipe("tsv", dtype="float64", out_dtype="bfloat16"),
    "tsv, float16": recipe("tsv", dtype="float16"),
    "epimer_free, bfloat16": recipe("epimer_free", dtype="bfloat16", parameters={"rank": 8}),
    "average, tokenizer of another": recipe("average", tokenizer_source="two"),
    "average, tokenizer of a stranger": recipe("average", tokenizer_source="words"),
    "tsv, rules": recipe(
        "tsv", rules=[["conv.weight", "matrix"], ["layers.0.*.bias", "copy"], ["head.*", "skip"],
                      ["layers.1.tall.weight", "average"]]
    ),
    "iso_c, rules as a mapping": recipe("iso_c", rules={"*.bias": "copy", "embed*": "skip", "lm_head*": "skip"}),
    "epimer_free, scale by forecast": recipe("epimer_free", scale="auto"),
    "auto": recipe("auto"),
    "auto, scale too": recipe("auto", scale="auto", own={n: {"weight": w} for n, w in (("one", 1), ("two", 2),
                                                                                        ("three", 1))}),
    "auto, adapters": recipe("auto", *LORA, scale="auto"),
    **{f"{method}, {kind}": words(method, kind) for method, kind in KINDS.items()},
    **{f"{method}, words": words(method) for method in ("tsv", "epimer_free", "iso_cts")},
    "epimer_kron, ekfac": words("epimer_kron", "ekfac"),
    "mats, ekfac": words("mats", "ekfac"),
    "mats, no base": recipe("mats", "words-0", "words-1", base=None, curvature="kronecker"),
    "regmean, no base": recipe("regmean", "words-0", "words-1", base=None, curvature="kronecker"),
    "epimer_kron, conv": words("epimer_kron", "kronecker", rules={"conv.weight": "matrix"}, parameters={"rank": 4}),
    "epimer, conv": words("epimer", "diagonal", rules={"conv.weight": "matrix", "*.bias": "fisher"}),
    "tsv, fisher rule": words("tsv", "diagonal", rules={"*.bias": "fisher", "embed.weight": "fisher"}),
    "average, curvature not used": words("average", "diagonal"),
    "epimer_kron, curvature as a list": words(
        "epimer_kron", [f"words-{t}.kronecker" for t in range(3)], parameters={"weight": [0.5, 1.0], "damping": 0.1}
    ),
    "epimer_kron, own basis": words("epimer_kron", "kronecker", basis="tensor.basis"),
    "epimer_kron, projected": words("epimer_kron", "kronecker-tensor", basis="tensor.basis"),
    "mats, projected": words("mats", "kronecker-tensor", basis="tensor.basis"),
    "epimer, projected": words("epimer", "diagonal-tagged", basis="tagged.basis"),
    "epimer_exact, projected": words("epimer_exact", "samples-tagged", basis="tagged.basis"),
    "epimer_free, stored basis": words("epimer_free", basis="tensor.basis"),
    "epimer_kron, scale by forecast": words("epimer_kron", "kronecker", scale="auto"),
    **{f"auto, {kind}": words("auto", kind, scale="auto") for kind in MEASURED},
    "average, in parts": recipe("average", "table-0.safetensors", "table-1.safetensors", base="table-None.safetensors"),
    "ties, in parts": recipe("ties", "table-0.safetensors", "table-1.safetensors", base="table-None.safetensors"),
}  # fmt: skip
OPTIONS_ON_DISK: dict[str, list[dict[str, Any]]] = {
    "tsv": [SHARDED, {"max_memory": "8GB"}, {"workers": 2}],
    "average": [SHARDED, {"max_memory": "8GB", "workers": 2}],
    "ties": [{"workers": 2}],
    "epimer_kron, kronecker": [{"workers": 2, "max_shard_size": "8KiB"}],
    "average, both names stored": [SHARDED],
}
"""how else some of them are merged"""
BASES = {"tensor": ["--rank", "4"], "tagged": ["--rank", "4", "--kind", "tagged"]}
"""the basis folders, with the options that make them"""
DRY_RUNS = ("ties", "tsv, adapters", "tsv, rules", "tsv, equal models", "epimer_kron, kronecker",
            "epimer, projected", "auto, scale too")  # fmt: skip


class Disk:
    """A folder with models and recipes, and what is done with them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "out").mkdir()

    def written(self, name: str) -> Path:
        """Return the file of a recipe."""
        path = self.root / f"{slug(name)}.yaml"
        path.write_text(yaml.safe_dump(RECIPES[name], sort_keys=False))
        return path

    def cleaned(self, value: Any) -> Any:
        """Return plain data without what is true of one run or one machine."""
        text = json.dumps(plain(value)).replace(json.dumps(str(self.root))[1:-1], "<root>")
        return json.loads(text)

    def merge(self, name: str, **options: Any) -> Found:
        """Merge a recipe into a folder and record what lies in it."""
        out = self.root / "out" / slug(f"{name} {named(options)}")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            record = epimer.merge(self.written(name), out, progress=False, **({"workers": 1} | options))
        found = folder_summary(out)
        stored = unversioned(plain(json.loads((out / "epimer.json").read_text())))
        found["returned record is the stored one"] = unversioned(plain(record.to_dict())) == stored
        found |= {"record": stored, "warnings": said(caught)}
        found["texts"] = {"README.md": (out / "README.md").read_text()}
        return self.cleaned(found)

    def diagnose(self, name: str, **options: Any) -> Found:
        """Diagnose a recipe."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = epimer.diagnose(self.written(name), progress=False, **({"workers": 1} | options))
        return self.cleaned({"diagnosis": found.to_dict(), "warnings": said(caught)})

    def sweep(self, name: str, evaluation: str, *, keep: bool = False, **options: Any) -> Found:
        """Sweep a recipe."""
        out = self.root / "out" / slug(f"sweep {name} {named(options)}")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kept = {"keep_best": out} if keep else {}
            found = epimer.sweep(self.written(name), evaluation, progress=False, **kept, **options)
        made = {"kept": folder_summary(out)} if keep else {}
        return self.cleaned({"sweep": found.to_dict(), "warnings": said(caught), **made})

    def command(self, *arguments: str) -> str:
        """Run the command line in the folder, and return what it prints."""
        paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(
            [sys.executable, "-m", "epimer", *arguments], cwd=self.root, env=env, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"epimer {' '.join(arguments)} exited with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def printed(self, *arguments: str) -> Found:
        """Return the JSON that a command prints."""
        return self.cleaned({"printed": json.loads(self.command(*arguments))})

    def dry_run(self, name: str) -> Found:
        """Return the plan of a recipe."""
        return self.printed("merge", self.written(name).name, "--dry-run", "--json")

    def make_basis(self, form: str) -> Path:
        """Return a basis folder, made by the command line."""
        out = self.root / f"{form}.basis"
        if not out.exists():
            self.command("basis", self.written("epimer_kron, kronecker").name, out.name, "--quiet", *BASES[form])
        return out

    def basis(self, form: str) -> Found:
        """Record a basis folder."""
        folder = self.make_basis(form)
        header = read_header(folder / "basis.json")
        return self.cleaned({"header": header, "tensors": file_summary(folder / "basis.safetensors")})

    def curvature(self, name: str) -> Found:
        """Record a curvature folder, as it lies there and as it is read."""
        folder = self.root / name
        header = read_header(folder / "curvature.json")
        stored = {"header": header, "stored": file_summary(folder / "curvature.safetensors")}
        return self.cleaned({**stored, **curvature_summary(epimer.Curvature.load(folder))})

    def cases(self) -> Iterator[tuple[str, Case]]:
        """Yield all that is done with models on disk."""
        for form in BASES:
            yield f"disk basis/{form}", partial(self.basis, form)
        for name, given in RECIPES.items():
            if "basis" in given:
                self.make_basis(given["basis"].removesuffix(".basis"))
            yield f"disk merge/{name}", partial(self.merge, name)
            for options in OPTIONS_ON_DISK.get(name, ()):
                yield f"disk merge/{name}: {named(options)}", partial(self.merge, name, **options)
        for kind in (*MEASURED, "kronecker-tensor", "diagonal-tagged", "samples-tagged"):
            yield f"disk curvature/{kind}", partial(self.curvature, f"words-1.{kind}")
        for name in (
            "tsv", "tsv, half", "tsv, adapters", "tsv, mixed dtypes", "epimer_free, filters", "auto, scale too",
            "ties, own densities", "tsv, words", "regmean, kronecker", "epimer, diagonal", "epimer_exact, samples",
            "epimer_kron, ekfac", "epimer_kron, conv", "epimer, projected", "epimer_exact, projected",
        ):  # fmt: skip
            yield f"disk diagnosis/{name}", partial(self.diagnose, name)
        yield "disk diagnosis/tsv, rank 8", partial(self.diagnose, "tsv", rank=8)
        yield (
            "disk diagnosis/mats, methods",
            partial(self.diagnose, "mats, kronecker", methods=["mats", "wudi", "iso_c"], damping=0.1, workers=2),
        )
        entry, single = "judge:scores", "judge:one_score"
        for kind in MEASURED:
            yield f"disk sweep/auto, {kind}", partial(self.sweep, f"auto, {kind}", entry)
        yield "disk sweep/no curvature", partial(self.sweep, "tsv, words", entry, keep=True)
        yield "disk sweep/scales and ranks", partial(
            self.sweep, "epimer_kron, kronecker", single, scales=[0.5, 1.0, 1.7], ranks=[2, 4],
            methods=["tsv", "epimer_kron", "task_arithmetic"], keep=True,
        )  # fmt: skip
        yield (
            "disk sweep/gradient_matching",
            partial(self.sweep, "gradient_matching, diagonal", entry, methods=["gradient_matching", "fisher", "ties"]),
        )
        yield (
            "disk sweep/projected",
            partial(self.sweep, "epimer_kron, own basis", single, methods=["epimer_kron", "mats"], scales=[1.0, 1.2]),
        )
        for name in DRY_RUNS:
            yield f"command/dry run, {name}", partial(self.dry_run, name)
        yield "command/inspect, torch file", partial(self.printed, "inspect", "three", "--json")
        yield "command/inspect, adapter", partial(self.printed, "inspect", "base+lora-c", "--json")
        yield "command/methods", partial(self.printed, "methods", "--json")


# --- diagnoses of state dicts -----------------------------------------------------------------------------------------


def diagnoses() -> Iterator[tuple[str, Case]]:
    """Yield diagnoses of state dicts, and a loss landscape."""

    def run(kind: str | None = None, count: int = 3, dtype: str = "float32", models: str = "usual",
            given: Callable[[], Any] | None = None, **options: Any) -> Found:  # fmt: skip
        wide = DTYPES[dtype]
        if options.get("basis") == "built":
            options["basis"] = bases("tagged", 4, count, wide)
        curvatures = given() if given is not None else None if kind is None else curvature(kind, count)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = epimer.diagnose_state_dicts(
                ancestor(wide), family(count, wide, models), curvature=curvatures, **options
            )
        return {"diagnosis": plain(found.to_dict()), "warnings": said(caught)}

    kinds = (None, "kronecker", "kronecker, A", "kronecker, G", "kronecker, inputs=0", "kronecker, singular",
             "diagonal", "rough diagonal", "samples", "ekfac")  # fmt: skip
    for kind in kinds:
        some = {"methods": ["average", "tsv", "epimer_kron"]} if kind == "kronecker, G" else {}  # regmean needs A
        yield f"diagnosis/{kind}", partial(run, kind, **some)
        yield f"diagnosis/{kind}, rank 8", partial(run, kind, rank=8, weights=[0.5, 2.0, 1.0], **some)
    for dtype in ("bfloat16", "float64"):
        yield f"diagnosis/{dtype}", partial(run, None, 4, dtype)
        yield f"diagnosis/kronecker, {dtype}", partial(run, "kronecker", 4, dtype, rank=8)
    for models in ("copies", "still"):
        yield f"diagnosis/{models}", partial(run, models=models, rank=8)
        yield f"diagnosis/kronecker, {models}", partial(run, "kronecker", models=models, rank=8)
    yield "diagnosis/rank 2", partial(run, rank=2)
    yield "diagnosis/rank None", partial(run, rank=None, rules=CONV, names=["a", "b", "c"])
    yield "diagnosis/kronecker, conv", partial(run, "kronecker", rank=None, rules=CONV, damping=0.3)
    yield (
        "diagnosis/methods",
        partial(
            run, "kronecker", rank=8, methods=["average", "mats", "wudi", "iso_c", "iso_cts", "epimer_kron", "dare"]
        ),
    )
    yield (
        "diagnosis/methods with parameters",
        partial(
            run,
            rank=8,
            methods={"tsv": {"coefficients": "projected"}, "epimer_free": {"damping": 0.1, "iterations": 20}},
        ),
    )
    for kind in ("H", "AG", "A"):
        given = partial(projected, kind, "tagged", 3)
        yield (
            f"diagnosis/projected {kind}",
            partial(run, given=partial(given, known=False), basis="built", rank=4, rules=NO_SMALL),
        )
        yield (
            f"diagnosis/projected {kind}, its own basis",
            partial(run, given=partial(given, known=True), rank=4, rules=NO_SMALL),
        )

    def landscape() -> Found:
        base, *models = [{name: state[name] for name in SHAPES if SHAPES[name]} for state in (ancestor(), *family(3))]

        def losses(state: Mapping[str, Tensor]) -> list[float]:
            return [sum(float((state[k] - one[k]).double().square().sum()) for k in MATRICES) for one in family(3)]

        made = {"mean": epimer.merge_state_dicts(base, models, "average")}
        called = dict(zip("abc", models, strict=True))
        return {"landscape": plain(epimer.landscape(base, called, losses, merged=made, grid=5).to_dict())}

    yield "landscape", landscape  # without the scalar, which it does not take


# --- what is written down ---------------------------------------------------------------------------------------------


def summary(W: Tensor) -> Found:
    """Return a tensor's bytes as a hash, beside a sum, a norm and a probe that tell how far another one is."""
    W = W.detach().cpu().contiguous()
    raw = W.reshape(-1).view(torch.uint8).numpy().tobytes() if W.numel() else b""
    x = W.reshape(-1).double()
    weights = (torch.arange(len(x)) * 7919 % 1009).double() / 1009 - 0.5
    numbers = {"sum": float(x.sum()), "norm": float(x.square().sum().sqrt()), "probe": float((x * weights).sum())}
    about = {"dtype": str(W.dtype).removeprefix("torch."), "shape": list(W.shape)}
    return {"sha256": hashlib.sha256(raw).hexdigest(), **about, **plain(numbers)}


def basis_summary(basis: Any) -> Found:
    """Return the tensors of a basis, and those of the atoms it was made from."""
    parts = {part: getattr(basis, part, None) for part in ("U", "V", "sigma", "owner", "mix")}
    found: Found = {part: summary(W) for part, W in parts.items() if W is not None}
    if (atoms := getattr(basis, "atoms", None)) is not None:
        found["atoms"] = basis_summary(atoms)
    return found


def curvature_summary(found: Any) -> Found:
    """Return the tensors of curvature by the letters they are known under, and what was measured on what."""
    tensors: Found = {}
    for name, one in found.items():
        parts = {letter: getattr(one, letter, None) for letter in "FAGSPQgxH"}
        tensors[name] = {letter: summary(W) for letter, W in parts.items() if W is not None}
        tensors[name] |= {"kind": one.kind, "inputs": getattr(one, "inputs", None)}
    return {
        "tensors": tensors,
        "about": plain(dataclasses.asdict(getattr(found, "provenance", None) or found.about)),
        "clipped": plain(found.clipped),
        "nbytes": found.nbytes,
    }


def file_summary(path: Path) -> Found:
    """Return the tensors of a safetensors file."""
    return {name: summary(W) for name, W in sorted(load_file(path).items())}


def folder_summary(folder: Path) -> Found:
    """Return a model folder: tensors, metadata, and hashes of whole files but for those that hold words."""
    found: Found = {"tensors": {}, "metadata": {}, "files": {}}
    for path in sorted(folder.iterdir()):
        if path.name not in ("README.md", "epimer.json"):
            found["files"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        if path.suffix == ".safetensors":
            found["tensors"] |= file_summary(path)
            with safe_open(path, "pt") as file:
                found["metadata"][path.name] = dict(sorted((file.metadata() or {}).items()))
    return found


def said(caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """Return epimer's own warnings; those of libraries come with whoever imports them first."""
    return [str(warning.message) for warning in caught if issubclass(warning.category, epimer.EpimerWarning)]


def plain(value: Any) -> Any:
    """Return what JSON holds exactly: floats as they are, or as a word where they are no number; nothing of one run."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if key not in PASSING}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def slug(name: str) -> str:
    """Return a name that can be a file's."""
    return "".join(letter if letter.isalnum() or letter == "_" else "-" for letter in name)


def environment() -> Found:
    """Return what bits may depend on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": torch.backends.cpu.get_cpu_capability(),
    }


def inputs() -> Found:
    """Return the models that are merged, so that a difference in them is not mistaken for one in the merge."""
    found = {"base": ancestor(), **{f"model {t}": model for t, model in enumerate(family(4))}}
    found["curvature"] = {name: one.F for name, one in curvature("diagonal", 3)[0].items()}
    found["factors"] = {name: one.A for name, one in curvature("kronecker", 3)[0].items()}
    return {"tensors": {f"{who} {name}": summary(W) for who, state in found.items() for name, W in state.items()}}


def record(out: Path, only: str) -> int:
    """Compute all cases and write them down; return how many failed."""
    torch.set_num_threads(1)
    started, found, spent = time.perf_counter(), dict[str, Found](), dict[str, float]()
    lacking = [method for method in epimer.list_methods() if method not in OPTIONS]
    if lacking:
        print(f"nothing is varied of {', '.join(lacking)}: add them to OPTIONS", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        sys.path.insert(0, str(root))
        sys.dont_write_bytecode = True
        furnish(root)
        spent["furnish"] = time.perf_counter() - started
        sources = (merges(), built(), measurements(), measured_merges(), diagnoses(), Disk(root).cases())
        every: list[tuple[str, Case]] = [("environment", environment), ("inputs", inputs)]
        every += [case for source in sources for case in source]
        repeated = [name for name, count in Counter(name for name, _ in every).items() if count > 1]
        assert not repeated, repeated
        for name, case in every:
            if not fnmatchcase(name, only):
                continue
            before = time.perf_counter()
            try:
                found[name] = case()
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}".replace(str(root), "<root>")}
                print(f"{name}: {found[name]['error']}", file=sys.stderr)
            spent[name] = time.perf_counter() - before
        sys.path.remove(str(root))
    out.write_text(json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    failed = sum("error" in one for one in found.values())
    slowest = ", ".join(
        f"{name} {seconds:.1f} s" for name, seconds in sorted(spent.items(), key=lambda item: -item[1])[:5]
    )
    print(f"{len(found)} cases ({failed} failed) in {time.perf_counter() - started:.0f} s; slowest: {slowest}")
    return failed


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Difference:
    """One place in which two records differ."""

    path: tuple[str, ...]
    one: Any
    two: Any
    apart: float | None = None
    """relative difference, where both are numbers or tensors of one shape"""

    @property
    def words(self) -> bool:
        """Whether it is only about how something is put."""
        return bool(WORDS.intersection(self.path))

    def __str__(self) -> str:
        at = " > ".join(self.path)
        if self.apart is not None:
            return f"{at}: {self.apart:.1e} apart"
        one, two = (text if len(text := repr(value)) < 200 else f"{text[:200]}…" for value in (self.one, self.two))
        return f"{at}: {one} | {two}"


def differences(one: Any, two: Any, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Yield where two records differ; a tensor is one place."""
    if isinstance(one, dict) and isinstance(two, dict):
        if "sha256" in one and "sha256" in two:
            if one != two:
                yield Difference(path, one, two, tensors_apart(one, two))
            return
        for key in dict.fromkeys([*one, *two]):
            yield from differences(one.get(key, "(not there)"), two.get(key, "(not there)"), (*path, key))
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            yield from differences(a, b, (*path, str(i)))
    elif repr(one) != repr(two):
        yield Difference(path, one, two, numbers_apart(one, two))


def numbers_apart(one: Any, two: Any) -> float | None:
    """Return the relative difference of two numbers."""
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in (one, two)):
        return None
    return abs(one - two) / (max(abs(one), abs(two)) or 1.0)


def tensors_apart(one: Found, two: Found) -> float | None:
    """Return about how far two tensors are apart as a share of their size, from the sums beside their hashes."""
    sums = [(a[key], b[key]) for a, b in [(one, two)] for key in ("sum", "norm", "probe")]
    if one["shape"] != two["shape"] or one["dtype"] != two["dtype"] or any(isinstance(x, str) for p in sums for x in p):
        return None
    return max(abs(a - b) for a, b in sums) / (max(one["norm"], two["norm"]) or 1.0)


def compare(first: Path, second: Path, shown: int) -> int:
    """Print which cases differ, in which fields and by how much; return how many."""
    one, two = (json.loads(path.read_text()) for path in (first, second))
    verdicts = Counter[str]()
    largest = 0.0
    for name in dict.fromkeys([*one, *two]):
        if name not in one or name not in two:
            verdicts["missing"] += 1
            print(f"MISSING  {name}: only in {first if name in one else second}")
            continue
        found = list(differences(one[name], two[name]))
        verdict = "same" if not found else "words" if all(place.words for place in found) else "numbers"
        verdicts[verdict] += 1
        fields = Counter(place.path[0] for place in found)
        apart = max((place.apart for place in found if place.apart is not None), default=None)
        largest = max(largest, apart or 0.0)
        listed = ", ".join(f"{field} ({count})" for field, count in fields.items())
        far = "" if apart is None else f"; largest relative difference {apart:.1e}"
        print(f"{verdict if verdict == 'same' else verdict.upper():<8} {name}" + (f": {listed}{far}" if found else ""))
        for place in sorted(found, key=lambda place: -(place.apart or 0.0))[:shown]:
            print(f"           {place}")
    print(f"{verdicts['same']} of {verdicts.total()} cases are the same; {verdicts['words']} differ in words only, "
          f"{verdicts['numbers']} in more (largest relative difference {largest:.1e}), {verdicts['missing']} are in "
          "one record only")  # fmt: skip
    return verdicts.total() - verdicts["same"]


def main() -> None:
    """Record, or compare two records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="compute everything and write it down")
    recording.add_argument("out", type=Path)
    recording.add_argument("--only", default="*", help="a pattern of case names")
    comparing = commands.add_parser("compare", help="say which cases differ")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    comparing.add_argument("--shown", type=int, default=5, help="places shown of a case that differs")
    given = parser.parse_args()
    if given.command == "record":
        sys.exit(1 if record(given.out, given.only) else 0)
    sys.exit(1 if compare(given.first, given.second, given.shown) else 0)


if __name__ == "__main__":
    main()
