"""Claim: the curvature of a 7B model is measured on one accelerator, at the cost of a few passes of training.

A Llama of Llama-2-7B's shape with random weights in bfloat16, made on the device, is measured on random texts of 512
tokens: a plain forward and backward pass first, then the diagonal, the Kronecker factors projected on a basis of 8
tasks at rank 32, the whole factors at once, and the same in several passes over the data, some layers in each. Seconds
are those of a whole measurement with its checks, divided by the samples; memory is the device's peak (the process's on
a CPU), with the model. The JSON file is written after every row; rows that would start after `--seconds` are left out.

    python benchmarks/seven_billion_curvature.py --json FILE                                       # one H200: 2 minutes
    python benchmarks/seven_billion_curvature.py --device cpu --layers 2 --hidden 64 --inner 176 --vocabulary 100
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from projected_is_small import loss_fn, orthonormal
from result_file import write_result
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import epimer
from epimer.geometry.subspace import Tagged, TensorProduct, tensor_product

TASKS, RANK, LENGTH = 8, 32, 512


def build_model(options: argparse.Namespace) -> nn.Module:
    """Return a Llama with random weights, made on the device."""
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.inner,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 128),
        vocab_size=options.vocabulary,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(options.device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def matrices(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the model's layers that a merge treats as matrices."""
    return {name: p for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2}


def basis_of(model: nn.Module, device: str) -> dict[str, TensorProduct]:
    """Return a random basis of the width that 8 tasks at rank 32 have."""
    basis = {}
    for name, W in matrices(model).items():
        width = min(TASKS * RANK, *W.shape)
        U, V = (orthonormal(side, width, device) for side in W.shape)
        owner = torch.arange(width, device=device) * TASKS // width
        basis[name] = tensor_product(Tagged(U, V, torch.ones(width, device=device), owner))
    return basis


def peak_of(run: Callable[[], Any], device: str) -> tuple[Any, float, float]:
    """Return the result of a call, its seconds and the peak of memory in GB while it ran."""
    gc.collect()
    on_gpu = device != "cpu"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # starts the kernel's peak anew
    started = time.perf_counter()
    result = run()
    if on_gpu:
        torch.cuda.synchronize()
        return result, time.perf_counter() - started, torch.cuda.max_memory_allocated() / 1e9
    seconds, lines = time.perf_counter() - started, Path("/proc/self/status").read_text().splitlines()
    return result, seconds, next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e9


def measurements(model: nn.Module, batches: list[Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each way to measure; a result is freed before the next one is measured."""
    names, samples = list(matrices(model)), options.samples

    def plain() -> None:
        for p in model.parameters():
            p.requires_grad_(True)
        for inputs, targets in batches:
            loss_fn(model(**inputs), targets).sum().backward()
        model.zero_grad(set_to_none=True)

    def measure(**more: Any) -> Callable[[], epimer.Curvature]:
        more = {"kind": "kronecker", "layers": names} | more
        return lambda: epimer.estimate_curvature(model, batches, loss_fn, samples=None, progress=False, **more)

    basis = basis_of(model, options.device)
    ways: dict[str, Callable[[], Any]] = {
        "first forward + backward (not counted)": plain,
        "forward + backward": plain,
        "diagonal": measure(kind="diagonal"),
        f"kronecker, projected on p = {TASKS * RANK}": measure(basis=basis),
        "kronecker": measure(),
        f"kronecker, {options.passes} passes": measure(passes=options.passes),
    }
    started = time.perf_counter()
    for way, run in ways.items():
        if time.perf_counter() - started > options.seconds:
            yield {"way": way, "left_out": f"it would have started after {options.seconds} s"}
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result, seconds, peak = peak_of(run, options.device)
            except epimer.EpimerError as error:
                yield {"way": way, "left_out": str(error)}
                continue
        said = [str(warning.message) for warning in caught if issubclass(warning.category, epimer.EpimerWarning)]
        size = 0 if result is None else result.nbytes
        del result
        yield {
            "way": way, "seconds": seconds, "seconds_per_sample": seconds / samples, "peak_gb": peak,
            "curvature_gb": size / 1e9, "said": said,
        }  # fmt: skip


def main() -> None:
    """Measure every way, and print seconds per sample, memory and the ratio to plain passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=11008)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120, help="rows that would start later are left out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = build_model(options)
    shape = (options.samples, options.length + 1)
    ids = torch.randint(options.vocabulary, shape, device=options.device).split(options.batch_size)
    batches = [({"input_ids": part[:, :-1]}, part[:, 1:]) for part in ids]
    about = {name: value for name, value in vars(options).items() if name != "json"}
    about |= {"parameters": sum(p.numel() for p in model.parameters())}
    print(
        f"{about['parameters'] / 1e9:.2f}B parameters in bfloat16, {options.samples} texts of {options.length} tokens"
    )
    rows: list[dict[str, Any]] = []
    for row in measurements(model, batches, options):
        rows.append(row)
        plain = next((one for one in rows if one["way"] == "forward + backward"), None)
        if plain is not None and "seconds" in row:
            row["x_forward_backward"] = row["seconds"] / plain["seconds"]
        if options.json:
            write_result(options.json, {**about, "rows": rows}, seed=0)
        if "left_out" in row:
            print(f"{row['way']:<40} left out: {row['left_out']}", flush=True)
            continue
        ratio = f"{row['x_forward_backward']:6.2f}x" if plain is not None else "      -"
        peak = f"peak {row['peak_gb']:7.2f} GB, curvature {row['curvature_gb']:6.2f} GB"
        print(f"{row['way']:<40} {row['seconds_per_sample']:8.4f} s a sample {ratio}  {peak}", flush=True)
        for text in row["said"]:
            print(f"    {text}")


if __name__ == "__main__":
    main()
