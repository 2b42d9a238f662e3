"""The bench on a language model: SmolLM2-135M fine-tuned on six generation tasks, merged and judged by the library.

Data (TASK.SPLIT.jsonl with prompts and responses) and base model are not part of the project.

    python benchmarks/smol6.py DATA_FOLDER MODEL_FOLDER [--device cuda] [--samples 256] [--methods tsv …]

A method may have parameters: --methods tsv "epimer_kron basis=full anchor=sum". What is done is kept in --cache and not
done again. A GPU is busier with several processes (under nvidia-cuda-mps-control -d): start them with --stages train
--part 0/6, 1/6, …, when all have ended with --stages merge --part 0/4, 1/4, …, and at last with --stages table.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from smol6_texts import MATCH, NEW_TOKENS, Texts, exact_matches, read_texts
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, LlamaForCausalLM
from transformers.utils import logging

from epimer.diagnosis.rounds import FIT
from epimer.diagnosis.sweep import SCALES, climb
from epimer.errors import EpimerError
from epimer.evaluation.judges import Evaluate, by_agreement
from epimer.evaluation.metrics import TOKEN_SCORES
from epimer.evaluation.provenance import provenance
from epimer.evaluation.statistics import Scores
from epimer.evaluation.suite import State, Suite, SuiteTask
from epimer.experiments.bench import CANDIDATES, Bench, Candidate
from epimer.experiments.paper import MATCHED
from epimer.experiments.results import (
    Cells,
    Row,
    against,
    dots,
    edge_notes,
    number,
    share,
    starred_scale,
    summary,
    tabulate,
    text,
    write,
)
from epimer.records import Experiment
from epimer.score_format import format_p_value
from epimer.tasks.labels import IGNORED
from epimer.tasks.task import sample_losses

TASKS = ("maths", "sql", "intent", "french", "bash", "triples")
SPLITS = ("train", "val", "test")
RATE, EPOCHS, BATCH, WARM_UP = 3e-5, 3, 16, 0.05
EVALUATED = 64  # texts in a batch: their logits are 64 x 192 x 49152 numbers
METRICS = ("loss", "token-accuracy", "exact match")
RIVALS = ("tsv", "average")


# --- models ----------------------------------------------------------------------------------------------------------


def load_base(folder: Path, device: str, layers: int | None) -> LlamaForCausalLM:
    """Load the base in float32, or only its first layers."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.num_hidden_layers = layers or config.num_hidden_layers
    network = LlamaForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, local_files_only=True)
    # Forward passes of a GPU multiply in TF32, which is some times faster; merges and curvature do not.
    network.register_forward_pre_hook(lambda *_: torch.set_float32_matmul_precision("high"))
    network.register_forward_hook(lambda *_: torch.set_float32_matmul_precision("highest"), always_call=True)
    return network.to(device).eval()


def fine_tune(network: nn.Module, train: Texts, device: str, most_steps: int | None) -> None:
    """Train all parameters on the responses' tokens."""
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(parameters, RATE, weight_decay=0.01, fused=device == "cuda")
    steps = min(EPOCHS * math.ceil(len(train) / BATCH), most_steps or 1 << 30)
    warm_up = max(1, round(WARM_UP * steps))

    def rate(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))
        return (step + 1) / warm_up if step < warm_up else cosine

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    epochs = (
        train.batches(BATCH, torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch)))
        for epoch in range(EPOCHS)
    )
    network.train()
    for _, (inputs, targets) in zip(range(steps), (batch for epoch in epochs for batch in epoch), strict=False):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            outputs = network(**inputs, use_cache=False)
        (sample_losses(outputs, targets).sum() / (targets != IGNORED).sum()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    network.eval()


def weights(network: nn.Module) -> dict[str, Tensor]:
    """Return a network's parameters; the output layer is the table of embeddings and not named twice."""
    return {name: W.detach() for name, W in network.named_parameters()}


def copy_in(network: nn.Module, state: State) -> nn.Module:
    """Copy a state dict into a network, in place."""
    with torch.no_grad():
        for name, W in network.named_parameters():
            W.copy_(state[name])
    return network.requires_grad_(True).eval()


def expert_file(cache: Path, task: str) -> Path:
    """Return where a fine-tuned model is kept."""
    return cache / "models" / f"{task}.safetensors"


def train_experts(given: argparse.Namespace, splits: Mapping[str, Mapping[str, Texts]], part: int, parts: int) -> None:
    """Fine-tune the base on those of this part's tasks whose model is not in the cache."""
    for task in TASKS[part::parts]:
        file = expert_file(given.cache, task)
        if file.exists():
            continue
        started = time.perf_counter()
        network = load_base(given.model, given.device, given.layers)
        fine_tune(network, splits[task]["train"], given.device, given.steps)
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: W.cpu() for name, W in weights(network).items()}, file.with_suffix(".draft"))
        file.with_suffix(".draft").replace(file)
        print(f"{task}: fine-tuned in {time.perf_counter() - started:.0f} s", flush=True)


def build(given: argparse.Namespace, splits: Mapping[str, Mapping[str, Texts]], metric: str = "loss") -> Suite:
    """Return base, models and tasks as a suite that is scored by a metric."""
    network = load_base(given.model, given.device, given.layers)
    base = {name: W.clone() for name, W in weights(network).items()}
    models = [load_file(expert_file(given.cache, task), device=given.device) for task in TASKS]
    tasks = [
        SuiteTask(task, [], splits[task], score=TOKEN_SCORES[metric], loss=sample_losses, metric=metric)
        for task in TASKS
    ]
    return Suite("smol6", base, models, tasks, lambda state, task: copy_in(network, state), batch=EVALUATED)


# --- outcomes --------------------------------------------------------------------------------------------------------


class RecordingBench(Bench):
    """A bench that remembers the model it scored last, that of an outcome, and the last candidate's merge."""

    scored: State
    merged: tuple[str, Callable[[float], State]] | None = None

    def at_scales(self, candidate: Candidate) -> Callable[[float], State]:
        if self.merged is None or self.merged[0] != candidate.name:
            self.merged = candidate.name, super().at_scales(candidate)
        return self.merged[1]

    def score(self, state: State, split: str) -> Scores:
        self.scored = state
        return super().score(state, split)


def parse_candidate(words: str) -> Candidate:
    """Return what `method parameter=value …` names; other parameters are the bench's."""
    method, *pairs = words.split()
    usual = next((candidate for candidate in CANDIDATES if candidate.name == method), Candidate(method))
    parameters = {name: yaml.safe_load(value) for name, value in (pair.split("=", 1) for pair in pairs)}
    return Candidate(method, {**usual.parameters, **parameters}, words) if pairs else usual


def chosen_candidates(methods: Sequence[str] | None) -> list[Candidate]:
    """Return the methods to compare; without names the library's, and tsv at epimer's rank."""
    if methods is not None:
        return [parse_candidate(words) for words in methods]
    return [*(c for c in CANDIDATES if c.method != "epimer_exact"), MATCHED]


def read_outcomes(cache: Path) -> dict[str, Row]:
    """Return name -> outcome of everything that is done; a line that a killed process left half is not."""
    done = {}
    for file in sorted(cache.glob("outcomes-*.jsonl")):
        for line in file.read_text().splitlines():
            if line.endswith("}"):
                row = json.loads(line)
                done[row["method"]] = row
    return done


class Judge:
    """Scores a model on test data, by every metric."""

    def __init__(self, bench: RecordingBench, tokenizer: Tokenizer, generate: int) -> None:
        self.bench, self.tokenizer, self.generate = bench, tokenizer, generate
        suite = bench.suite
        tasks = [replace(t, score=TOKEN_SCORES["token-accuracy"], metric="token-accuracy") for t in suite.tasks]
        self.accuracy = replace(suite, tasks=tasks)

    def judge(self, states: Sequence[State], losses: Scores | None = None) -> Row:
        """Return every text's scores; `states` has one model per task, and `losses` is what is known already."""
        suite, scores = self.bench.suite, dict[str, dict[str, list[float]]]()
        for metric, judged in (("loss", suite), ("token-accuracy", self.accuracy)):
            if metric == "loss" and losses is not None:
                values = list(losses.values)
            else:
                values = [judged.finite_scores(s, t, "test") for s, t in zip(states, judged.tasks, strict=True)]
            scores[metric] = {t.name: rounded(v) for t, v in zip(suite.tasks, values, strict=True)}
        scores["exact match"] = {}
        for state, task in zip(states, suite.tasks, strict=True):
            if task.name in MATCH and self.generate:
                data: Any = task.splits["test"]
                order = torch.linspace(0, len(data) - 1, min(self.generate, len(data))).long()
                texts = Texts(data.ids[order.to(data.ids.device)], data.prompts[order], data.lengths[order])
                network = suite.network(state, task)
                scores["exact match"][task.name] = exact_matches(network, task.name, texts, self.tokenizer)
        return scores


def rounded(values: Tensor) -> list[float]:
    """Return scores as plain numbers of six digits."""
    return [float(f"{value:.6g}") for value in values.tolist()]


def scale_without_labels(bench: RecordingBench, candidate: Candidate, inputs: Evaluate) -> Row:
    """Return the scale at which a merge diverges least from the models on their train inputs, and its test loss."""
    at = bench.at_scales(candidate)
    scale = climb(lambda scale: inputs(at(scale), FIT).order, SCALES)
    return {"scale": scale, "loss": -bench.score(at(scale), "test").average}


def merge_all(
    given: argparse.Namespace, splits: Mapping[str, Mapping[str, Texts]], tokenizer: Tokenizer, part: int, parts: int
) -> None:
    """Score base, fine-tuned models and merges of this part, and append each outcome to the part's file."""
    bench = RecordingBench(build(given, splits), samples=given.samples, keep=False)
    judge = Judge(bench, tokenizer, given.generate)
    inputs = by_agreement(bench.suite.inputs_only(given.samples))
    jobs: list[str | Candidate] = ["base", "fine-tuned", *chosen_candidates(given.methods)]
    done = read_outcomes(given.cache)
    for job in jobs[part::parts]:
        name, started = job if isinstance(job, str) else job.name, time.perf_counter()
        if name in done:
            continue
        states: Sequence[State] = [bench.suite.base] * len(TASKS) if job == "base" else bench.states
        row: Row = {"method": name}
        if isinstance(job, Candidate):
            try:
                outcome = bench.best(job)
            except (EpimerError, RuntimeError) as error:  # one method that fails does not stop the others
                print(f"{name}: FAILED: {error}", flush=True)
                continue
            row |= {"scale": outcome.scale, "edge": outcome.edge, "seconds": outcome.seconds}
            row |= {"validation": outcome.validation, "parameters": dict(job.parameters), "kind": job.curvature}
            row |= judge.judge([bench.scored] * len(TASKS), outcome.test)
            row["unlabelled"] = scale_without_labels(bench, job, inputs)
            bench.model = {}
        else:
            row |= {"reference": True, **judge.judge(states)}
            row["tokens"] = {t: (splits[t]["test"].lengths - splits[t]["test"].prompts).tolist() for t in TASKS}
        row |= {"samples": given.samples, "notes": bench.notes, "measuring": bench.seconds}
        row |= {"made": provenance(seed=bench.seed, samples=given.samples, device=given.device)}
        with (given.cache / f"outcomes-{part}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # other processes share the GPU
        averages = ", ".join(f"{m} {Scores(values_of(row[m])).average:.4f}" for m in METRICS if row[m])
        print(f"{name}: scale {row.get('scale')}, {averages}, {time.perf_counter() - started:.0f} s", flush=True)


# --- tables ----------------------------------------------------------------------------------------------------------


def values_of(scores: Mapping[str, Sequence[float]], tokens: Mapping[str, Sequence[int]] | None = None) -> list[Tensor]:
    """Return the scores per task; with `tokens`, such that their mean is the mean over all tokens of a task.

    That mean R is a ratio of two sums over texts, so text i counts as R + n_i / n̄ · (score_i - R), whose spread is R's.
    """
    values = {task: torch.tensor(list(rows), dtype=torch.float64) for task, rows in scores.items()}
    if tokens is None:
        return list(values.values())
    shares = {task: torch.tensor(list(tokens[task]), dtype=torch.float64) for task in values}
    shares = {task: n / n.mean() for task, n in shares.items()}
    means = {task: (shares[task] * rows).mean() for task, rows in values.items()}
    return [means[task] + shares[task] * (rows - means[task]) for task, rows in values.items()]


def table(metric: str, done: Mapping[str, Row]) -> Experiment:
    """Return every outcome by one metric, per task and as a share of what fine-tuning gains."""
    tokens = None if metric == "exact match" else done["base"]["tokens"]
    scores = {name: Scores(values_of(row[metric], tokens)) for name, row in done.items() if row[metric]}
    names = list(done["base"][metric])
    tasks = [SuiteTask(name, [], {}) for name in names]
    low, high = (scores[name].accuracies for name in ("base", "fine-tuned"))
    data: list[Row] = []
    for name, found in scores.items():
        row: Row = {"method": name, **summary(found, tasks)}
        row |= {key: value for key, value in done[name].items() if key not in (*METRICS, "tokens", "notes")}
        levels = zip(names, found.accuracies, low, high, strict=True)
        gains = {task: (score - base) / (own - base) for task, score, base, own in levels if own != base}
        row |= {"gains": gains, "gain": sum(gains.values()) / len(gains), "least": min(gains.values())} if gains else {}
        rivals = [rival for rival in RIVALS if rival in scores and rival != name]
        row["against"] = {rival: against(found, scores[rival], tasks) for rival in rivals}
        data.append({**row, **{f"against {rival}": margin for rival, margin in row["against"].items()}})
    cells = Cells("accuracy" if metric == "exact match" else metric)
    columns = {
        "method": text("method"),
        "average [95%]": cells.interval,
        "share of gain": share("gain"),
        "least": share("least"),
        **{name: cells.on_task(name) for name in names},
        "scale": starred_scale,
        "merge s": number("seconds", ".2f"),
    }
    for rival in (rival for rival in RIVALS if rival in scores):
        columns[f"against {rival}"] = lambda row, key=f"against {rival}": (
            "" if row.get("reference") else cells.difference(row.get(key, {}))
        )
        columns[f"p over tasks, {rival}"] = lambda row, key=f"against {rival}": (
            "" if row.get("reference") else text("p_tasks", format_p_value)(row.get(key, {}))
        )
    columns["scale without labels"] = lambda row: number("scale")(row.get("unlabelled") or {})
    notes = [
        f"{metric} on test data; {NOTES[metric]}.",
        "Scale chosen on validation data by the loss per token, the mean over tasks and texts, for every metric.",
        "Share of gain: (merged - base) / (fine-tuned - base), the mean over tasks, and of the task with the least.",
        f"Differences {cells.differences}, with 95% intervals and p of a paired sign-flip test over texts; p over "
        "tasks: the same test with tasks as its units.",
        "Scale without labels: where the merge diverges least from each task's own model on train inputs.",
        *edge_notes(data),
        *dict.fromkeys(note for row in done.values() for note in row["notes"]),
    ]
    measuring = {kind: s for row in done.values() for kind, s in row["measuring"].items()}
    notes += [f"Measuring {kind} curvature took {seconds:.1f} s." for kind, seconds in measuring.items()]
    title = f"smol6: {metric} of merged language models"
    file = metric.replace(" ", "-")
    figure = dots(data, metric, metric=cells.metric)
    made = done["base"]["made"]
    return replace(tabulate(file, title, columns, data, notes, figure), suite="smol6", metric=cells.metric, made=made)


NOTES = {
    "loss": "nats per token, over all response tokens of a task with the true ones before them",
    "token-accuracy": "the share of response tokens that are the likeliest, with the true ones before them",
    "exact match": f"the share of greedy responses, {NEW_TOKENS} tokens at most, that are right",
}


def main() -> None:
    """Fine-tune, merge and tabulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--stages", nargs="+", default=["train", "merge", "table"], choices=["train", "merge", "table"])
    parser.add_argument("--methods", nargs="+", help="'method parameter=value …' each; by default all")
    parser.add_argument("--samples", type=int, default=256, help="texts per task that curvature is measured on")
    parser.add_argument("--generate", type=int, default=400, help="test texts per task for exact matches")
    parser.add_argument("--cache", type=Path, default=Path("epimer-bench/smol6"), help="models and outcomes")
    parser.add_argument("--out", type=Path, default=Path("smol6-results"), help="tables")
    parser.add_argument("--part", default="0/1", help="i/n: train or merge only every n-th")
    parser.add_argument("--limit", type=int, help="texts of each split, for a trial")
    parser.add_argument("--steps", type=int, help="most steps of training, for a trial")
    parser.add_argument("--layers", type=int, help="layers of the model, for a trial")
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    part, parts = map(int, given.part.split("/"))
    given.cache.mkdir(parents=True, exist_ok=True)
    if {"train", "merge"} & set(given.stages):
        tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
        splits = {
            task: {
                split: read_texts(given.data / f"{task}.{split}.jsonl", tokenizer, given.device, given.limit)
                for split in SPLITS
            }
            for task in TASKS
        }
        if "train" in given.stages:
            train_experts(given, splits, part, parts)
        if "merge" in given.stages:
            merge_all(given, splits, tokenizer, part, parts)
    if "table" in given.stages:
        done = read_outcomes(given.cache)
        first = ("base", "fine-tuned", *(candidate.name for candidate in chosen_candidates(None)))
        done = {name: done[name] for name in dict.fromkeys((*first, *done)) if name in done}
        for metric in METRICS:
            if done["base"][metric]:
                result = table(metric, done)
                write(result, given.out)
                print(result.markdown(), flush=True)


if __name__ == "__main__":
    main()
