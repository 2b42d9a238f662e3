"""Kronecker factors that kronfluence or bergson measured, read from their folders.

Both store sums under the names of layers: of xxᵀ over tokens, where a layer's bias is one more input that is always 1,
and of ggᵀ over tokens. Ours are A = E_token[xxᵀ] and G = E_sample[Σ_token ggᵀ], without the bias.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epimer.checkpoints.folder import inside, read_json
from epimer.checkpoints.safetensors import SafetensorsFile
from epimer.checkpoints.torchfile import load
from epimer.errors import CheckpointError, CurvatureError, listed, short
from epimer.geometry.metric import Kronecker
from epimer.yaml_values import yaml_value

SIDES = ("activation", "gradient")
SHARD = re.compile(r"shard_(\d+)\.safetensors")
MOST = 1 << 53  # samples or tokens: a float holds the number
NAMELESS = "the model has no layer of this name"


@dataclass(frozen=True)
class FactorSums:
    """Sums over tokens of one data set, by the name of the layer, and over how many of them."""

    source: str
    A: Mapping[str, Tensor]
    G: Mapping[str, Tensor]
    tokens: Mapping[str, int]
    samples: int | None
    """how many samples the tokens are of; None where the folder does not say"""


def read_factor_sums(folder: Path) -> FactorSums:
    """Read a folder of kronfluence's (`factors_NAME`) or of bergson's (`activation_sharded`, …)."""
    where = folder.name
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; give one of kronfluence's factors_NAME, or of bergson's runs.")
    if (folder / "activation_covariance.safetensors").is_file():
        return _kronfluence(folder, where)
    if (folder / "activation_sharded").is_dir():
        return _bergson(folder, where)
    inner = sorted(path.name for path in folder.glob("factors_*"))
    parts = next(folder.glob("*_data_partition*.safetensors"), None)
    if inner:
        raise CheckpointError(f"{where} holds {listed(inner)}; give one of these folders.")
    if parts is not None:
        raise CheckpointError(f"{where} holds parts only ({parts.name}); let kronfluence aggregate them first.")
    expected = "activation_covariance.safetensors (kronfluence) or activation_sharded (bergson)"
    raise CheckpointError(f"{where} holds no factors that are known: expected {expected}.")


def factors_of(
    model: nn.Module, sums: FactorSums, samples: int | None = None
) -> tuple[dict[str, Kronecker], dict[str, str]]:
    """Return parameter -> its factors, and layers without a parameter of the model -> why they are left out.

    `samples` is how many samples the sums are of, where they do not say; without either, G is a mean over tokens.
    """
    modules = dict(model.named_modules())
    layers = {name: layer for name, layer in modules.items() if isinstance(getattr(layer, "weight", None), Tensor)}
    metrics, left_out = dict[str, Kronecker](), dict[str, str]()
    for name in sums.A:
        found = [name] if name in layers else [known for known in layers if f".{known}".endswith(f".{name}")]
        if not found:
            found = [known for known in layers if f".{name}".endswith(f".{known}")]
        if len(found) != 1:
            left_out[name] = NAMELESS if not found else f"it may be {listed(found)}"
            continue
        metrics[f"{found[0]}.weight"] = _metric(layers[found[0]], name, sums, samples or sums.samples)
    if not metrics:
        problem = f"none of its layers ({listed(sums.A)}) is one of the model's ({listed(layers)})"
        raise CurvatureError(f"the factors of {sums.source} are of another model: {problem}; give that model.")
    order = [name for layer in layers if (name := f"{layer}.weight") in metrics]
    return {name: metrics[name] for name in order}, left_out


def _metric(layer: nn.Module, name: str, sums: FactorSums, samples: int | None) -> Kronecker:
    """Return one layer's factors, after checking that they are of its size."""
    W: Any = layer.weight
    m, n = len(W), W[0].numel()
    inputs_first = type(layer).__name__ == "Conv1D"  # GPT-2's
    if inputs_first:
        m, n = n, m
    A, G = sums.A[name], sums.G[name]
    if A.dim() != 2 or G.dim() != 2 or not A.is_floating_point() or not G.is_floating_point():
        kinds = f"{A.dtype} of {A.dim()} and {G.dtype} of {G.dim()} dimensions"
        raise CurvatureError(f"{sums.source} has factors for {name!r} that are {kinds}, expected two matrices.")
    biased = len(A) == n + 1 and getattr(layer, "bias", None) is not None
    if getattr(layer, "groups", 1) != 1 or A.shape != (n + biased,) * 2 or G.shape != (m, m):
        sizes = f"{tuple(A.shape)} and {tuple(G.shape)}, expected {(n, n)} and {(m, m)}"
        raise CurvatureError(f"{sums.source} has factors of {sizes} for {name!r}; were they measured on this model?")
    wide = torch.float64 if A.dtype == torch.float64 else torch.float32
    A, G = A[:n, :n].to(wide) / sums.tokens[name], G.to(wide) / (samples or sums.tokens[name])
    A, G = ((M + M.T) / 2 for M in (A, G))
    metric = Kronecker(A=G, G=A, inputs=0) if inputs_first else Kronecker(A=A, G=G)
    if problem := metric.problem((n, m) if inputs_first else (m, n)):
        raise CurvatureError(f"{sums.source} has factors for {name!r} that cannot be used: {problem}; fit them again.")
    return metric


def _kronfluence(folder: Path, where: str) -> FactorSums:
    files = [f"{side}_covariance.safetensors" for side in SIDES]
    counts = [f"num_{side}_covariance_processed.safetensors" for side in SIDES]
    read = [SafetensorsFile(inside(folder, name), f"{where}/{name}") for name in (*files, *counts)]
    A, G, tokens, again = ({name: file.read(name) for name in file.headers} for file in read)
    for name, count in (*tokens.items(), *again.items()):
        if count.numel() != 1 or count.is_floating_point() or count.is_complex():
            raise CheckpointError(f"{where} counts {tuple(count.shape)} {count.dtype} for {name!r}, expected a number.")
    numbers = {name: int(count) for name, count in tokens.items()}
    if not A.keys() == G.keys() == tokens.keys() == again.keys() or any(n < 1 for n in numbers.values()):
        raise CheckpointError(f"{where} has other layers in {files[0]} than in {files[1]}; fit the covariances again.")
    if other := [name for name, count in again.items() if int(count) != numbers[name]]:
        problem = f"counts inputs and gradients of {other[0]!r} differently (gradient checkpointing, torch.compile)"
        raise CheckpointError(f"{where} {problem}; fit the covariances without them.")
    samples = None
    described, used = (folder / name for name in ("covariance_dataset_metadata.json", "factor_arguments.json"))
    if described.is_file() and used.is_file():
        size = read_json(described, f"{where}/{described.name}").get("dataset_size")
        most = read_json(used, f"{where}/{used.name}").get("covariance_max_examples")
        if not isinstance(size, int) or not isinstance(most, int | None) or not 1 <= min(size, most or size) <= MOST:
            raise CheckpointError(f"{where}/{described.name} says that there are {short(size)} samples; fit it again.")
        samples = size if most is None else min(size, most)
    return FactorSums("kronfluence", A, G, numbers, samples)


def _bergson(folder: Path, where: str) -> FactorSums:
    if others := [method for method in _methods(folder / "config.yaml", where) if method != "kfac"]:
        problem = f"was measured by bergson's method {others[0]}, whose factors are not K-FAC's"
        raise CheckpointError(f"{where} {problem}; measure it with method kfac.")
    A, G = (_joined(folder / f"{side}_sharded", f"{where}/{side}_sharded") for side in SIDES)
    file = folder / "total_processed.pt"
    if not file.is_file() or A.keys() != G.keys():
        raise CheckpointError(f"{where} lacks total_processed.pt, or a side of some layers; give a whole run.")
    total: Any = load(file, f"{where}/{file.name}", mapped=False)
    tokens = _count(total)
    if tokens < 1:
        raise CheckpointError(f"{where}/{file.name} says that {tokens} tokens were read; measure it again.")
    return FactorSums("bergson", A, G, dict.fromkeys(A, tokens), None)


def _methods(config: Path, where: str) -> list[str]:
    """Return the methods of Hessians that a run's config names; none without a config."""
    seen = set[int]()  # YAML can have one mapping in endlessly many places

    def walk(value: Any) -> Iterator[str]:
        if not isinstance(value, dict | list) or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, dict) and {"method", "hessian_dtype"} <= value.keys():
            yield str(value["method"])
        for item in value.values() if isinstance(value, dict) else value:
            yield from walk(item)

    try:
        return list(walk(yaml_value(config.read_text(encoding="utf-8")) if config.is_file() else None))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}/config.yaml cannot be read: {short(str(error))}; give a whole run.") from error


def _joined(folder: Path, where: str) -> dict[str, Tensor]:
    """Return matrices whose rows lie in one file per process, in the order of their numbers."""
    numbers = sorted(int(found[1]) for path in folder.glob("*") if (found := SHARD.fullmatch(path.name)))
    if not numbers or numbers != list(range(len(numbers))):
        raise CheckpointError(f"{where} has shards {numbers}, expected all from 0 on; give a whole run.")
    files = [SafetensorsFile(inside(folder, f"shard_{i}.safetensors"), f"{where}/shard_{i}") for i in numbers]
    if any(file.headers.keys() != files[0].headers.keys() for file in files):
        raise CheckpointError(f"{where} has other layers in some shards; give a whole run.")
    for name in files[0].headers:
        shapes = [tuple(file.headers[name].shape) for file in files]
        if any(len(shape) != 2 or shape[1] != shapes[0][-1] for shape in shapes):
            raise CheckpointError(
                f"{where} has parts of {name!r} of shapes {listed(map(str, shapes))}; give a whole run."
            )
    return {name: torch.cat([file.read(name) for file in files]) for name in files[0].headers}


def _count(value: Any) -> int:
    """Return a count that may be stored as a tensor; 0 where it is none."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 and not value.is_complex() else 0
    return int(value) if isinstance(value, int | float) and 0 <= value <= MOST else 0
