"""Records as epimer writes them, of made-up numbers that are easy to tell apart."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from epimer.records import (
    Advice,
    Conflict,
    Diagnosis,
    Forecast,
    LayerDiagnosis,
    LayerFindings,
    MergeRecord,
    MergeTheory,
    TensorRecord,
)

TASKS = ("digits", "greek", "rotation", "sum")
METHODS = ("average", "tsv", "epimer", "epimer_kron")


def experiment(name: str, title: str, data: list[dict], headings=("method",), figure=None, notes=()) -> dict:
    rows = [[str(row.get(heading, "")) for heading in headings] for row in data]
    return {
        "kind": "experiment", "format": 1, "name": name, "title": title, "headings": list(headings), "rows": rows,
        "data": data, "notes": list(notes), "figure": figure,
    }  # fmt: skip


def score(method: str, values, **more) -> dict:
    average = sum(values) / len(values)
    tasks = dict(zip(TASKS, values, strict=True))
    return {
        "method": method, "average": average, "low": average - 0.01, "high": average + 0.01, "worst": min(values),
        "tasks": tasks, **more,
    }  # fmt: skip


def performance(suite: str = "glyphs8", methods=METHODS) -> dict:
    data = [
        score("few-shot probe", (0.76, 0.75, 0.64, 0.45), reference=True),
        score("fine-tuned", (0.93, 0.88, 0.92, 0.9), reference=True),
    ]
    for i, method in enumerate(methods):
        values = (0.8 + 0.02 * i, 0.78 + 0.01 * i, 0.71 + 0.03 * i, 0.52 + 0.05 * (i % 3))
        more = {"scale": 1.0 + i, "edge": i == 3, "seconds": 0.1 * 10**i, "validation": 0.7 + 0.01 * min(i, 2)}
        against = {} if method == "tsv" else {"difference": -0.02 + 0.015 * i, "p": 0.0001 * 8**i}
        data.append(score(method, values, **more, **against))
    headings = ("method", "average", "worst", "scale", "against tsv")
    return experiment(
        "performance", f"{suite}: accuracy of merged models", data, headings, notes=["Scale chosen on val."]
    )


def alpha() -> dict:
    data, lines = [], {}
    for method in ("epimer", "epimer_kron"):
        for k in (4, 16):
            for aggregator in ("sum", "mean"):
                for a in (0.2, 0.3, 0.4, 0.5, 0.7, 1.0):
                    value = 0.8 - (a - 0.5) ** 2 * (1 if aggregator == "sum" else 0.6) + 0.001 * k
                    tasks = dict.fromkeys(TASKS, value)
                    row = {
                        "method": method,
                        "k": k,
                        "aggregator": aggregator,
                        "alpha": a,
                        "average": value,
                        "tasks": tasks,
                    }
                    data.append(row)
                    lines.setdefault(f"{method}, k = {k}, {aggregator}", []).append(
                        (a, value, value - 0.01, value + 0.01)
                    )
    figure = {"kind": "lines", "x": "α", "y": "average accuracy", "lines": lines}
    return experiment("alpha", "Sensitivity to α", data, ("method", "k", "aggregator", "alpha", "average"), figure)


def eta() -> dict:
    data = [
        {
            "k": k,
            "eta": 0.1 * k,
            "eta_unit_trace": 0.02 * k,
            "eta_fraction": 0.4 / (1 + k / 8),
            "difference": d,
            "p": 0.2,
        }
        for k, d in ((2, -0.004), (4, 0.001), (8, 0.006), (16, 0.012), (32, 0.009))
    ]
    lines = {"epimer - tsv (projected)": [(row["k"], row["difference"]) + (row["difference"],) * 2 for row in data]}
    figure = {"kind": "lines", "x": "k", "y": "accuracy margin", "lines": lines}
    return experiment("eta", "η against rank", data, ("k", "eta", "difference"), figure)


def landscape(side: int = 15) -> dict:
    """Bowls around each task's model."""
    a = [-3 + 6 * i / (side - 1) for i in range(side)]
    b = [-2 + 4 * i / (side - 1) for i in range(side)]
    centres = dict(zip(TASKS, ((-1.5, -0.5), (1.5, -0.4), (0.1, 1.2), (0.3, -1.1)), strict=True))
    maps = {t: [[0.2 + (x - u) ** 2 + (y - v) ** 2 for x in a] for y in b] for t, (u, v) in centres.items()}
    joint = [[sum(maps[t][i][j] for t in TASKS) for j in range(side)] for i in range(side)]
    marked = [("base", "base", 0.0, -0.1), *((t, "task", *centres[t]) for t in TASKS)]
    marked += [("average", "merged", 0.1, -0.2), ("tsv", "merged", 0.16, -0.15), ("epimer", "merged", 0.2, -0.25)]
    points = []
    for name, kind, x, y in marked:
        losses = {t: 0.2 + (x - u) ** 2 + (y - v) ** 2 for t, (u, v) in centres.items()}
        point = {
            "name": name,
            "kind": kind,
            "a": x,
            "b": y,
            "off": 0.3,
            "joint": sum(losses.values()),
            "losses": losses,
        }
        points.append(point)
    figure = {"kind": "maps", "a": a, "b": b, "maps": maps, "joint": joint, "points": points, "explained": 0.55}
    return experiment("landscape", "Loss landscape", points, ("name", "a", "b", "joint"), figure)


def counted() -> dict:
    lines = {
        m: [(t, y := 0.95 - 0.03 * t * (1 + i), y - 0.02, y + 0.01 * t) for t in (2, 3, 4)]
        for i, m in enumerate(METHODS)
    }
    data = [{"method": m, "T": x, "average": y} for m, points in lines.items() for x, y, *_ in points]
    figure = {"kind": "lines", "x": "merged models", "y": "average accuracy on their tasks", "lines": lines}
    return experiment("tasks", "Number of tasks", data, ("method", "T", "average"), figure)


def cost() -> dict:
    data = [{"method": m, "median": 0.01 * 20**i, "least": 0.008 * 20**i} for i, m in enumerate(METHODS)]
    dots = {row["method"]: [row["median"]] * 3 + [row["least"]] for row in data}
    figure = {"kind": "dots", "x": "seconds", "names": ["median", "least"], "log": True, "dots": dots}
    return experiment("cost", "Wall-clock time", data, ("method", "median", "least"), figure)


def theory(count: int, *, rank: int | None = None, share: float = 0.3, r_s: float | None = 0.2) -> LayerDiagnosis:
    return LayerDiagnosis(
        eta=share * 2, eta_unit_trace=share / 10, flat_objective=2.0, v_s=0.4, v_s_solve=1.4, r_s=r_s,
        bound=None if r_s is None else 0.5 * (math.sqrt(0.4) + math.sqrt(r_s)) ** 2, energy_kept=0.81,
        energy_kept_by_task=tuple(0.7 + 0.03 * t for t in range(count)), condition=432.0, damped=7, rank=rank,
    )  # fmt: skip


def diagnosis(models=TASKS, layers: int = 12, advice=None) -> dict:
    count, chance = len(models), random.Random(0)
    named = [f"model.layers.{i // 4}.{('q', 'k', 'v', 'out')[i % 4]}_proj.weight" for i in range(layers)]
    made = {
        name: LayerFindings(
            shape=(64, 64),
            theory=theory(count, rank=16, share=chance.random()),
            norms=tuple(0.1 + chance.random() for _ in models),
            base_norm=20.0,
            energy={"2": (0.4,) * count, "16": (0.8,) * count},
            forecast={m: tuple(chance.random() for _ in models) for m in METHODS},
            merges={m: MergeTheory(1.0, 0.5, 0.3, 0.1, 0.373) for m in METHODS},
        )
        for name in named
    }

    def square(low: float, high: float) -> tuple:
        upper = [[chance.uniform(low, high) for _ in models] for _ in models]
        return tuple(tuple(1.0 if s == t else upper[min(s, t)][max(s, t)] for t in range(count)) for s in range(count))

    conflict = Conflict(square(-0.3, 0.5), square(0.4, 0.6), square(0.0, 0.4), square(0.0, 0.4), square(0.05, 1.6))
    forecast = {}
    for i, method in enumerate(METHODS):
        lost = tuple(0.2 + 0.6 * chance.random() - 0.04 * i for _ in models)
        mean = sum(lost) / count
        forecast[method] = Forecast(lost, mean, max(lost), 1.5, 0.9 * mean)
    merges = {
        method: tuple(MergeTheory(scale, 3.5 * scale + i, 4.25 + i, 0.25, 3.125 + i) for scale in (1.0, 1.5))
        for i, method in enumerate(METHODS)
    }
    ranks = (2, 4, 8, 16, 32)
    energy = {str(k): tuple(min(0.99, 0.3 + 0.1 * math.log2(k) + 0.04 * t) for t in range(count)) for k in ranks}
    by_rank = ({"k": k, "eta": 0.1 * k, "eta_unit_trace": 0.01 * k, "eta_fraction": 0.5 / (1 + k / 8)} for k in ranks)
    default = (
        Advice("take", "epimer_kron at rank 16: the least is forecast to be lost, 31% on average and 52% on sum."),
        Advice("warning", "rotation and sum point away from each other (cosine −0.21)."),
        Advice("note", "A basis of rank 16 keeps 81% of the task vectors' energy."),
    )
    found = Diagnosis(
        models=tuple(models), layers=made, total=theory(count), norms=tuple(1.5 + 0.4 * t for t in range(count)),
        base_norm=60.0, conflict=conflict, forecast=forecast, curvature="kronecker", rank=16, damping=0.01,
        energy=energy, eta_by_rank=tuple(by_rank),
        base="ancestor", recipe="merge_method: epimer_kron\nmodels:\n  - model: digits\n", version="0.1.0",
        advice=default if advice is None else tuple(advice), merges=merges,
    )  # fmt: skip
    return json.loads(json.dumps(found.to_dict()))


def sweep() -> dict:
    data = [
        {
            "method": method, "rank": rank, "scale": scale, "average": None, "low": None, "high": None,
            "worst": None, "tasks": None, "validation": 0.8 - (scale - 1) ** 2 / 10 + (rank or 0) / 1000,
        }
        for method, ranks in (("average", (None,)), ("tsv", (8, 16)))
        for rank in ranks
        for scale in (0.5, 1.0, 1.5)
    ]  # fmt: skip
    best = {**data[-2], "average": 0.79, "low": 0.78, "high": 0.8, "worst": 0.6, "tasks": {"digits": 0.98, "sum": 0.6}}
    return {"kind": "sweep", "format": 1, "eval": "glyphs8", "data": data, "best": best, "notes": ["Chosen on val."]}


def unlabelled_sweep() -> dict:
    """A sweep without labels: scores are agreement, and no rank is known, as older records have it."""
    scored = {"average": 0.9, "low": 0.85, "high": 0.95, "worst": 0.8, "tasks": {"digits": 1.0, "sum": 0.8}}
    data = [
        {"method": method, "rank": None, "scale": scale, "validation": 0.951 - 0.1 * i, "kl": 0.2 + i,
         **(scored if scale == 1.0 else dict.fromkeys((*scored,)))}
        for i, method in enumerate(("epimer_free", "tsv"))
        for scale in (0.5, 1.0)
    ]  # fmt: skip
    about = {"kind": "sweep", "format": 1, "eval": "inputs without labels"}
    return {**about, "data": data, "best": data[1], "notes": []}


def evaluation(metric: str = "accuracy") -> dict:
    tasks = [
        {"name": name, "metric": metric, "samples": 400, "score": 0.81 + 0.02 * i, "low": 0.79 + 0.02 * i,
         "high": 0.83 + 0.02 * i, "base": 0.4, "fine_tuned": 0.93}
        for i, name in enumerate(TASKS)
    ]  # fmt: skip
    average = {"score": 0.84, "low": 0.83, "high": 0.85, "base": 0.4, "fine_tuned": 0.93}
    worst = {"task": "digits", "score": 0.81, "base": 0.4, "fine_tuned": 0.93}
    about = {"kind": "evaluation", "format": 1, "suite": "words", "model": "merged", "split": "test"}
    return {**about, "tasks": tasks, "average": average, "worst": worst}


def harness() -> dict:
    rows = [
        {"task": "recall", "metric": "acc", "filter": "none", "score": 0.7125, "stderr": 0.0121, "samples": 40},
        {"task": "recall", "metric": "em", "filter": "strict", "score": 0.5, "stderr": None, "samples": 40},
    ]
    about = {"kind": "harness", "format": 1, "model": "merged", "harness": "lm-eval", "limit": 40}
    return {**about, "results": rows}


def merge_record(models=TASKS) -> dict:
    tensors = {
        "layers.0.weight": TensorRecord("matrix", (64, 64), "converged", 16, 1e-8, 0.25),
        "layers.1.weight": TensorRecord("matrix", (64, 64), "damped", 16, 1e-3, 0.5, "three eigenvalues were damped"),
        "layers.0.bias": TensorRecord("average", (64,)),
    }
    record = MergeRecord(
        "epimer_kron", {"rank": 16, "scale": 1.25, "basis": "tagged", "damping": 0.01}, (0.25,) * 4, tensors,
        (("ancestor", "00aa11bb"), *((name, f"{i:08x}") for i, name in enumerate(models))),
        "merge_method: epimer_kron\nmodels:\n  - model: digits\n", "abc", {"model.safetensors": 33_000_000}, "0.1.0",
    )  # fmt: skip
    data = json.loads(json.dumps(record.lasting()))
    return {key: value for key, value in data.items() if key != "sha256"}  # tests change the record


def without_labels() -> dict[str, dict]:
    """The records of somebody who has no labels to choose by, and then evaluates another merge."""
    return {
        "sweep.json": unlabelled_sweep(), "epimer.json": merge_record(), "diagnosis.json": diagnosis(),
        "eval.json": evaluation(),
    }  # fmt: skip


def everything() -> dict[str, dict]:
    """One record of every kind, by file name."""
    return {
        "performance.json": performance(), "alpha.json": alpha(), "eta.json": eta(), "landscape.json": landscape(),
        "tasks.json": counted(), "cost.json": cost(), "diagnosis.json": diagnosis(), "sweep.json": sweep(),
        "epimer.json": merge_record(), "eval.json": evaluation(), "lm-eval.json": harness(),
    }  # fmt: skip


def write_all(folder: Path, records: dict[str, dict] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, record in (records or everything()).items():
        (folder / name).write_text(json.dumps(record), encoding="utf-8")
    return folder
