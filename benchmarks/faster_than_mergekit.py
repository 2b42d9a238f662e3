"""Claim: end to end, epimer is 3x faster than mergekit in linear and task_arithmetic, and 8x in ties.

Three fine-tuned Llamas of 0.49 GB and their base, in bfloat16 with random weights, are merged by the same recipe file
through both command lines, in turns; numbers are medians, memory is the peak that the kernel reports for the process.
Both start as processes and end when their files are written. mergekit runs as its README shows it, and again with the
options that it offers for speed. All files lie in the page cache, for both. The disk's limit is a plain copy: every
input is read, the bytes of one model are written and synced; `average` aims at 60% of its speed once torch is loaded.

    python benchmarks/faster_than_mergekit.py --mergekit .venv-conformance/bin/mergekit-yaml [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from result_file import write_result

import epimer
from epimer.checkpoints.writer import save_tensors

HIDDEN, INNER, VOCABULARY, LAYERS, HEADS = 1024, 2816, 32000, 14, 16
MODELS = ("base", "a", "b", "c")
CLAIMS = {"linear": 3, "task_arithmetic": 3, "ties": 8}
OPTIONS = {"mergekit": [], "mergekit, fastest": ["--lazy-unpickle", "--async-write", "--write-threads", "2", "-j", "2"]}
BUFFER = 1 << 23  # bytes that a plain copy holds at a time
QUIET = {"PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS"}  # each program keeps its bytecode and chooses its threads

MEASURE = """
import resource, subprocess, sys, time
started = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
seconds, used = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
print(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss)
sys.exit(done.returncode)
"""


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors of the model by name."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        prefix = f"model.layers.{i}"
        found |= {f"{prefix}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        found |= {f"{prefix}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        found[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        found |= {f"{prefix}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def write_models(root: Path) -> int:
    """Write the base and three models that differ from it by a tenth; return the bytes of one."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "vocab_size": VOCABULARY, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    files = {"config.json": config, "tokenizer.json": tokenizer, "tokenizer_config.json": {}}
    for t, name in enumerate(MODELS):
        (root / name).mkdir()
        tensors = {}
        for i, (key, shape) in enumerate(shapes().items()):
            W = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(i))
            if t:
                W += 0.002 * torch.randn(shape, generator=torch.Generator().manual_seed(1000 * t + i))
            tensors[key] = W.bfloat16()
        save_tensors(root / name / "model.safetensors", tensors)
        for file, content in files.items():
            (root / name / file).write_text(json.dumps(content))
    return (root / "base" / "model.safetensors").stat().st_size


def write_recipe(root: Path, method: str) -> Path:
    """Write a recipe that both programs read; return its path."""
    parameters = {"weight": 1 / 3} | ({"density": 0.2} if method == "ties" else {})
    models = [{"model": str(root / name), "parameters": parameters} for name in MODELS[1:]]
    recipe = {"merge_method": method, "models": models, "dtype": "bfloat16"}
    if method != "linear":
        recipe["base_model"] = str(root / "base")
    path = root / f"{method}.yaml"
    path.write_text(json.dumps(recipe))
    return path


class Run(NamedTuple):
    """What one process took."""

    seconds: float
    cpu_seconds: float
    """of all its threads, which says more than `seconds` where others use the machine"""
    peak: int
    """bytes of memory"""


def run(command: list[str], out: Path) -> Run:
    """Run a command that makes the folder `out`."""
    shutil.rmtree(out, ignore_errors=True)
    environment = {key: value for key, value in os.environ.items() if key not in QUIET}
    # From a small process: the kernel counts the memory of the one that starts it, until the program is loaded.
    done = subprocess.run([sys.executable, "-c", MEASURE, *command], capture_output=True, env=environment, text=True)
    if done.returncode or not list(out.glob("*.safetensors")):
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    seconds, cpu_seconds, peak = done.stdout.split()
    return Run(float(seconds), float(cpu_seconds), int(peak) * 1024)


def copy(inputs: list[Path], target: Path, size: int) -> None:
    """Read every file, and write and sync `size` bytes."""
    buffer = memoryview(bytearray(BUFFER))
    with target.open("wb", buffering=0) as out:
        for path in inputs:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    if out.tell() < size:
                        out.write(buffer[: min(count, size - out.tell())])
        os.fsync(out.fileno())


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def against_a_copy(root: Path, size: int, repeats: int) -> dict[str, float]:
    """Compare `average` of three models, in a process that has imported epimer, with a plain copy of the same bytes."""
    inputs = [root / name / "model.safetensors" for name in MODELS[1:]]
    recipe = {"merge_method": "average", "models": [{"model": str(root / name)} for name in MODELS[1:]]}
    merging, copying = [], []
    for i in range(repeats + 1):
        shutil.rmtree(root / "average", ignore_errors=True)
        (root / "copy").unlink(missing_ok=True)
        times = (
            seconds_of(lambda: copy(inputs, root / "copy", size)),
            seconds_of(lambda: epimer.merge(recipe, root / "average", progress=False)),
        )
        if i:  # the first time, modules are loaded
            copying.append(times[0])
            merging.append(times[1])
    ours, theirs = median(merging), median(copying)
    return {"copy_s": theirs, "average_s": ours, "share": theirs / ours, "gb_per_s": len(MODELS) * size / ours / 1e9}


def against_mergekit(root: Path, method: str, mergekit: Path, repeats: int) -> list[dict[str, object]]:
    """Time one method through both command lines, in turns."""
    recipe, out = write_recipe(root, method), root / "out"
    commands = {"epimer": [sys.executable, "-m", "epimer", "merge", str(recipe), str(out), "--device", "cpu"]}
    for name, options in OPTIONS.items():
        commands[name] = [str(mergekit), str(recipe), str(out), *options]
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            runs[name].append(run(command, out))
    typical = {name: Run(*map(median, zip(*found, strict=True))) for name, found in runs.items()}
    ours, rows = typical["epimer"], []
    for name, one in typical.items():
        ratios = [one[i] / ours[i] for i in range(3)]
        rows.append({"method": method, "program": name, **one._asdict(), "times_epimer": ratios[0],
                     "cpu_times_epimer": ratios[1], "memory_times_epimer": ratios[2],
                     "all_seconds": [each.seconds for each in runs[name]]})  # fmt: skip
        print(f"{method:<16}{name:<20}{one.seconds:7.2f} s {ratios[0]:6.2f}x   CPU {one.cpu_seconds:6.2f} s "
              f"{ratios[1]:6.2f}x   peak {one.peak / 1e9:5.2f} GB {ratios[2]:6.2f}x", flush=True)  # fmt: skip
    return rows


def main() -> None:
    """Time everything, print the ratios and whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", type=Path, default=Path(".venv-conformance/bin/mergekit-yaml"))
    parser.add_argument("--methods", nargs="*", default=list(CLAIMS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where there is room for five models of 0.5 GB")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    if options.methods and not options.mergekit.exists():
        print(f"{options.mergekit} does not exist (`make conformance` installs it): only a copy is compared with.")
        options.methods = []
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        size = write_models(root)
        if options.methods:  # both programs keep their bytecode, and their libraries lie in the page cache
            for method in options.methods[:1]:
                recipe = write_recipe(root, method)
                run([sys.executable, "-m", "epimer", "merge", str(recipe), str(root / "out")], root / "out")
                run([str(options.mergekit), str(recipe), str(root / "out")], root / "out")
        limit = against_a_copy(root, size, 2 * options.repeats)
        print(f"average of three models of {size / 1e9:.2f} GB, once started: {limit['average_s']:.2f} s; "
              f"a plain copy {limit['copy_s']:.2f} s: {limit['share']:.0%} (aim 60%)", flush=True)  # fmt: skip
        for method in options.methods:
            rows += against_mergekit(root, method, options.mergekit, options.repeats)
    print()
    for method in options.methods:
        ratios = [float(str(row["times_epimer"])) for row in rows if row["method"] == method][1:]
        print(f"{method:<16}{min(ratios):5.2f}x to {max(ratios):.2f}x faster (claimed {CLAIMS[method]}x)")
    if options.json:
        about = {"entries": sum(map(math.prod, shapes().values())), "model_gb": size / 1e9,
                 "repeats": options.repeats, "options": OPTIONS}  # fmt: skip
        python = [str(options.mergekit.with_name("python")), "-c"]
        ask = "from importlib.metadata import version; print(version('mergekit'))"
        peer = subprocess.check_output([*python, ask], text=True).strip() if options.methods else None
        write_result(options.json, {**about, "limit": limit, "rows": rows}, mergekit=peer)


if __name__ == "__main__":
    main()
