"""Aim: tsv at least 4x faster than FusionBench's TSV-M at its own rank, 15x at rank 32; "claimed" is a row's aim.

Two layers of ViT-B (8 matrices of 768 x 768, 2 of 3072 x 768, 2 of 768 x 3072), 8 models in float32, whose task vectors
have singular values i^-0.7 and random singular vectors; 2 threads, everything in memory. Both sides start from the
base and the models and return the merged model; ours through `merge_state_dicts` with its defaults. Methods that
FusionBench has are timed against it, all others against its TSV-M. The difference is that of our merged delta from
ours in float64, which takes full SVDs and exact solves, on the first layer.

    .venv-conformance/bin/python benchmarks/faster_than_fusionbench.py [--only NAME] [--no-difference] [--json FILE]

Without FusionBench (any other environment) only our seconds are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from result_file import write_result

import epimer

TASKS, RANK, THREADS, REPEATS = 8, 32, 2, 2
LAYER = {"attn.q": (768, 768), "attn.k": (768, 768), "attn.v": (768, 768), "attn.o": (768, 768),
         "mlp.up": (3072, 768), "mlp.down": (768, 3072)}  # fmt: skip
State = dict[str, torch.Tensor]


def orthonormal(m: int, n: int) -> torch.Tensor:
    """Return random orthonormal columns."""
    return torch.linalg.qr(torch.randn(m, n)).Q


def task_vector(m: int, n: int) -> torch.Tensor:
    """Return a task vector with σ_i = i^-0.7."""
    side = min(m, n)
    return (orthonormal(m, side) * torch.arange(1, side + 1) ** -0.7) @ orthonormal(n, side).T


def factor(size: int) -> torch.Tensor:
    """Return a Kronecker factor as samples leave it: eigenvalues falling as 1/i, directions of its own."""
    Q = orthonormal(size, size)
    return (Q / torch.arange(1, size + 1)) @ Q.T


class Models:
    """The models of the claim, and curvature for them."""

    def __init__(self, layers: int = 2) -> None:
        torch.manual_seed(0)
        shapes = {f"layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in LAYER.items()}
        self.base = {name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}
        self.vectors = [{name: task_vector(*shape) for name, shape in shapes.items()} for _ in range(TASKS)]
        self.models = [{name: W + D[name] for name, W in self.base.items()} for D in self.vectors]

    def curvature(self, kind: str) -> list[dict[str, Any]]:
        """Return curvature of every model."""
        torch.manual_seed(1)
        return [{name: self._metric(kind, D) for name, D in vector.items()} for vector in self.vectors]

    @staticmethod
    def _metric(kind: str, D: torch.Tensor) -> Any:
        m, n = D.shape
        if kind == "rank one":
            noise = 1 + 0.05 * (2 * torch.rand(m, n) - 1)
            return epimer.Diagonal(torch.outer(torch.randn(m).exp(), torch.randn(n).exp()) * noise)
        if kind == "D²":
            return epimer.Diagonal(D.square())
        if kind == "inputs":
            return epimer.Kronecker(A=factor(n))
        return epimer.Kronecker(G=factor(m), A=factor(n))


def without_output(function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Call a function of FusionBench, which prints."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return function(*given, **options)


def fusionbench(name: str, models: Models, curvature: list[dict[str, Any]] | None) -> State:
    """Merge by FusionBench's own functions, from base and models to the merged model."""
    from fusion_bench.method.fisher_merging.fisher_merging import merging_with_fisher_weights
    from fusion_bench.method.isotropic_merging.iso_utils import iso_c, iso_cts
    from fusion_bench.method.regmean.regmean import merging_with_regmean_weights
    from fusion_bench.method.task_singular_vector.utils.TSVM_utils import compute_and_sum_svd_mem_reduction
    from fusion_bench.method.ties_merging.ties_merging_utils import (
        state_dict_to_vector,
        ties_merging,
        vector_to_state_dict,
    )
    from fusion_bench.utils.state_dict_arithmetic import state_dict_add, state_dict_avg, state_dict_mul, state_dict_sub

    base, states = models.base, models.models
    lists = {name: [state[name] for state in states] for name in base}
    if name == "average":
        return state_dict_avg(states)
    if name == "fisher":
        fishers = [{name: metric.F.clone() for name, metric in one.items()} for one in curvature or ()]
        weights = torch.full((TASKS,), 1 / TASKS)
        return merging_with_fisher_weights(
            lists, fishers, weights, normalize_fisher_weight=False, minimal_fisher_weight=1e-6
        )
    if name == "regmean":
        grams = [{name.removesuffix(".weight"): metric.A for name, metric in one.items()} for one in curvature or ()]
        return merging_with_regmean_weights(lists, grams, reduce_non_diagonal_ratio=0.9)
    vectors = [state_dict_sub(state, base) for state in states]
    if name == "task_arithmetic":
        total = vectors[0]
        for vector in vectors[1:]:
            total = state_dict_add(total, vector)
        merged = state_dict_mul(total, 1 / TASKS)
    elif name == "ties":
        flat = torch.vstack([state_dict_to_vector(vector) for vector in vectors])
        merged = vector_to_state_dict(ties_merging(flat, reset_thresh=20, merge_func="mean"), base)
    elif name == "iso_cts":
        merged = iso_cts(vectors, 0.8, accelerator="cpu")
    else:
        merged = {"iso_c": iso_c, "tsv": compute_and_sum_svd_mem_reduction}[name](vectors, accelerator="cpu")
    return state_dict_add(base, merged)


CASES: dict[str, tuple[str, dict[str, Any], str | None, str | None, float | None]] = {
    # row: method, options, curvature, its counterpart in FusionBench (None: TSV-M), the ratio that is claimed
    "tsv, default rank": ("tsv", {}, None, "tsv", 4),
    "tsv, rank 32": ("tsv", {"rank": RANK}, None, None, 15),
    "iso_c against TSV-M": ("iso_c", {}, None, None, 11),
    "epimer_free, rank 32": ("epimer_free", {"rank": RANK}, None, None, 6),
    "epimer, rank 32, F near rank one": ("epimer", {"rank": RANK}, "rank one", None, 8),
    "epimer, rank 32, F = D²": ("epimer", {"rank": RANK}, "D²", None, 5),
    "epimer_kron, rank 32": ("epimer_kron", {"rank": RANK}, "kronecker", None, 4),
    "iso_c": ("iso_c", {}, None, "iso_c", None),
    "iso_cts": ("iso_cts", {}, None, "iso_cts", None),
    "ties": ("ties", {"density": 0.2}, None, "ties", None),
    "average": ("average", {}, None, "average", None),
    "task_arithmetic": ("task_arithmetic", {}, None, "task_arithmetic", None),
    "fisher": ("fisher", {}, "D²", "fisher", None),
    "regmean": ("regmean", {}, "inputs", "regmean", None),
}


def best(run: Callable[[], State], repeats: int) -> tuple[float, State]:
    """Return the shortest of a few runs, and the result."""
    seconds, result = float("inf"), {}
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        seconds = min(seconds, time.perf_counter() - start)
    return seconds, result


def wide(state: dict[str, Any], names: Iterable[str], device: torch.device) -> dict[str, Any]:
    """Return some tensors, or curvature, of a state in float64."""
    return {name: state[name].to(device, torch.float64) for name in names}


def difference(models: Any, merged: State, method: str, options: dict[str, Any], curvature: Any) -> float:
    """Return the relative difference from the float64 merge, over the first layer of models on any device."""
    first = [name for name in models.base if name.startswith("layers.0.")]
    device = models.base[first[0]].device
    base, *states = [wide(state, first, device) for state in (models.base, *models.models)]
    curvature = None if curvature is None else [wide(one, first, device) for one in curvature]
    exact = epimer.merge_state_dicts(base, states, method, curvature=curvature, **options)
    apart = sum(float((merged[name] - exact[name]).square().sum()) for name in first)
    return (apart / sum(float((exact[name] - base[name]).square().sum()) for name in first)) ** 0.5


def main() -> None:
    """Time every row and print seconds, ratios and differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="rows whose name begins so; may be repeated")
    parser.add_argument("--no-difference", action="store_true", help="leave out the float64 merges, which take minutes")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    models, peer = Models(), find_spec("fusion_bench") is not None
    if not peer:
        print("FusionBench is not installed here (`make conformance` installs it): our seconds only")
    kept = {row: case for row, case in CASES.items() if not options.only or row.startswith(tuple(options.only))}
    curvatures = {kind: models.curvature(kind) for kind in {case[2] for case in kept.values()} if kind}
    theirs: dict[str, float] = {}
    rows = []
    for row, (method, given, kind, counterpart, claimed) in kept.items():
        curvature = curvatures.get(kind or "")
        rival = counterpart or "tsv"
        if peer and rival not in theirs:
            repeats = 1 if rival == "tsv" else REPEATS
            theirs[rival], _ = best(partial(without_output, fusionbench, rival, models, curvature), repeats)
        merge = partial(epimer.merge_state_dicts, models.base, models.models, method, curvature=curvature, **given)
        seconds, merged = best(merge, REPEATS)
        ratio = theirs[rival] / seconds if peer else None
        apart = None if options.no_difference else difference(models, merged, method, given, curvature)
        rows.append({"row": row, "seconds": seconds, "fusionbench": rival, "fusionbench_s": theirs.get(rival),
                     "ratio": ratio, "claimed": claimed, "difference": apart})  # fmt: skip
        against = f"   {rival} there {theirs[rival]:7.2f} s   {ratio:6.1f}x" if ratio else ""
        against += f" (claimed {claimed:g}x)" if ratio and claimed else ""
        print(f"{row:<34}{seconds:7.2f} s{against}" + (f"   difference {apart:.1e}" if apart is not None else ""),
              flush=True)  # fmt: skip
    if options.json:
        peers = {"fusion_bench": version("fusion-bench")} if peer else {}
        write_result(options.json, {"threads": THREADS, "tasks": TASKS, "rows": rows}, seed=[0, 1], **peers)


if __name__ == "__main__":
    main()
