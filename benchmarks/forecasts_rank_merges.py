"""How well forecasts rank merges: Spearman correlation with the measured loss, over merges and tasks.

Measured is the share of each task's gain that a merge loses, (loss - own) / (base - own) on test data; forecasts are
‖x - D_t‖² / ‖D_t‖² under several forms. All methods at six scales, on glyphs8.

    python benchmarks/forecasts_rank_merges.py [--seed 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
from result_file import write_result
from torch import Tensor

import epimer
from epimer.experiments.bench import CANDIDATES, Bench, Candidate
from epimer.experiments.glyphs8.build import load
from epimer.geometry.metric import Identity, TaskGram

SCALES = (0.3, 0.5, 0.7, 1.0, 1.4, 2.0)
MORE = (
    Candidate("mats", {"damping": 0.3, "iterations": 20}, "mats, damping 0.3"),
    Candidate("epimer_kron", {"aggregator": "mean"}, "epimer_kron, mean"),
    Candidate("tsv", {"rank": 4}, "tsv, k = 4"),
    Candidate("epimer", {"rank": 8}, "epimer, k = 8"),
)
CHOICES = ("average", "tsv", "iso_c", "regmean", "wudi", "epimer_free", "epimer_kron")
"""methods among which a forecast at scale 1 chooses"""


def spearman(one: Tensor, other: Tensor) -> float:
    """Return the correlation of ranks."""
    ranks = torch.stack([x.flatten().double().argsort().argsort().double() for x in (one, other)])
    return float(torch.corrcoef(ranks)[0, 1])


def main() -> None:
    """Merge, measure, forecast, and print the correlations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    suite = load(seed=given.seed).truncated(test=300)
    bench = Bench(suite, seed=given.seed)
    base, T = dict(suite.base), len(suite.tasks)
    names = [name for name, W in base.items() if W.dim() == 2]
    deltas = [{name: model[name] - base[name] for name in names} for model in bench.states]
    kinds = {
        "distance": lambda t, name: Identity(),
        "diagonal": lambda t, name: bench.curvature("diagonal")[t][name],
        "kronecker": lambda t, name: bench.curvature("kronecker")[t][name],
        "task-gram": lambda t, name: TaskGram(deltas[t][name]),
    }
    metrics = {kind: [{name: make(t, name) for name in names} for t in range(T)] for kind, make in kinds.items()}
    own = {
        kind: torch.tensor([sum(metric[t][n].energy(deltas[t][n]) for n in names) for t in range(T)])
        for kind, metric in metrics.items()
    }
    at_own = torch.tensor([suite.losses(model, "test")[t] for t, model in enumerate(bench.states)])
    at_base = torch.tensor(suite.losses(base, "test"))
    labels, lost, right, found = [], [], [], {kind: [] for kind in (*kinds, "cosine")}
    skipped = ("task_arithmetic", "dare", "gradient_matching")  # the average again; random; not linear in its scale
    for candidate in (*(c for c in CANDIDATES if c.method not in skipped), *MORE):
        merged = bench.merge(candidate)
        for scale in SCALES:
            state = bench.scaled(merged, scale)
            labels.append((candidate.name, scale))
            lost.append((torch.tensor(suite.losses(state, "test")) - at_own) / (at_base - at_own))
            right.append(bench.score(state, "test").average)
            x = {name: state[name] - base[name] for name in names}
            for kind, metric in metrics.items():
                parts = [sum(metric[t][n].energy(x[n] - deltas[t][n]) for n in names) for t in range(T)]
                found[kind].append(torch.tensor(parts) / own[kind])
            inner = torch.tensor([sum(float((x[n] * deltas[t][n]).sum()) for n in names) for t in range(T)])
            norms = torch.tensor([sum(float(D[n].square().sum()) for n in names) for D in (x, *deltas)]).sqrt()
            found["cosine"].append(-inner / norms[0] / norms[1:])
        print(".", end="", flush=True)
    measured = torch.stack(lost)
    forecasts = {kind: torch.stack(values) for kind, values in found.items()}
    forecasts["ours"] = ((forecasts["kronecker"].sqrt() + forecasts["task-gram"].sqrt()) / 2).square()
    check(bench, forecasts["ours"][labels.index(("tsv", 1.0))])
    rows = []
    print(f"\n{len(labels)} merges x {T} tasks")
    print(f"{'forecast':<12}{'pairs':>8}{'means':>8}{'in task':>9}  best scale  chooses")
    for kind, forecast in forecasts.items():
        rows.append({"forecast": kind, **judge(forecast, measured, labels, right)})
        row = rows[-1]
        print(
            f"{kind:<12}{row['pairs']:>+8.2f}{row['means']:>+8.2f}{row['within']:>+9.2f}  "
            f"{row['scale_hits']}/{row['methods']}, -{100 * row['scale_regret']:.1f}  "
            f"{row['choice']} ({100 * row['accuracy']:.1f}; best {100 * row['best']:.1f})"
        )
    if given.json:
        write_result(given.json, {"suite": "glyphs8", "rows": rows}, seed=given.seed)


def judge(forecast: Tensor, measured: Tensor, labels: list[tuple[str, float]], right: list[float]) -> dict:
    """Return correlations over pairs, over merges' means and within tasks; the scale and the method it would choose."""
    means = forecast.mean(1)
    within = [spearman(forecast[:, t], measured[:, t]) for t in range(forecast.shape[1])]
    hits, regret, methods = 0, [], dict.fromkeys(name for name, _ in labels)
    for method in methods:
        rows = [i for i, (name, _) in enumerate(labels) if name == method]
        best, chosen = max(rows, key=lambda i: right[i]), min(rows, key=lambda i: float(means[i]))
        hits += labels[best][1] == labels[chosen][1]
        regret.append(right[best] - right[chosen])
    some = [i for i, (name, scale) in enumerate(labels) if scale == 1.0 and name in CHOICES]
    chosen = min(some, key=lambda i: float(means[i]))
    return {
        "pairs": spearman(forecast, measured),
        "means": spearman(means, measured.mean(1)),
        "within": sum(within) / len(within),
        "scale_hits": hits,
        "methods": len(methods),
        "scale_regret": sum(regret) / len(regret),
        "choice": labels[chosen][0],
        "accuracy": right[chosen],
        "best": max(right[i] for i in some),
    }


def check(bench: Bench, expected: Tensor) -> None:
    """See that `epimer diagnose` says the same of tsv."""
    curvature = bench.curvature("kronecker")
    found = epimer.diagnose_state_dicts(dict(bench.suite.base), bench.states, curvature=curvature, methods=["tsv"])
    said = torch.tensor(found.forecast["tsv"].tasks)
    assert torch.allclose(said.double(), expected.double(), rtol=0.02), (said, expected)


if __name__ == "__main__":
    main()
