"""Weights: safetensors files, shards with an index, torch files, adapters, FP8, formats that are refused."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.convert import convert
from epimer.checkpoints.folder import REFUSED
from epimer.errors import CheckpointError
from fuzz.harness import Reader
from fuzz.mutations import NAMES, damage_content, damage_files, mutated_bytes, mutated_pickle
from fuzz.readers.models import CONFIG, merge, merge_and_compare, recipe, tensors, write_models


def _read_everything(text: str) -> None:
    """Open a checkpoint and read all of it; each tensor must be what its header says."""
    checkpoint = open_checkpoint(text)
    assert checkpoint.fingerprint
    assert checkpoint.state is not None
    for name, W in checkpoint.headers.items():
        found = checkpoint.read(name)
        assert tuple(found.shape) == tuple(W.shape), f"{name!r} was read with another shape"
        if W.dim() and W.shape[0] > 1:
            assert torch.equal(checkpoint.read(name, (1, 2)), found[1:2]) or bool(torch.isnan(found.float()).any())


# safetensors


def _build_three(folder: Path) -> None:
    write_models(folder, "base", "one", "two")


def _damage_safetensors(rng: Random, folder: Path) -> None:
    path = folder / rng.choice(("base", "one", "two")) / "model.safetensors"
    (damage_files if rng.random() < 0.05 else damage_content)(rng, path)


def _read_three(folder: Path) -> None:
    for name in ("base", "one", "two"):
        _read_everything(str(folder / name))
    merge_and_compare(recipe(folder), folder / "out")


# an index with shards


def _build_index(folder: Path) -> None:
    write_models(folder, "base", "one", "two")
    for name in ("base", "one", "two"):
        state = load_file(folder / name / "model.safetensors")
        (folder / name / "model.safetensors").unlink()
        files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        parts: list[dict] = [{}, {}]
        for i, (key, W) in enumerate(state.items()):
            parts[i % 2][key] = W
        for file, part in zip(files, parts, strict=True):
            save_file(part, folder / name / file)
        weight_map = {key: files[i % 2] for i, key in enumerate(state)}
        index = {"metadata": {"total_size": sum(W.nbytes for W in state.values())}, "weight_map": weight_map}
        (folder / name / "model.safetensors.index.json").write_text(json.dumps(index))


def _damage_index(rng: Random, folder: Path) -> None:
    place = folder / rng.choice(("base", "one"))
    if rng.random() < 0.1:
        damage_files(rng, rng.choice(sorted(place.iterdir())))
    else:
        damage_content(rng, place / "model.safetensors.index.json")


# torch files: a state dict and a whole module in the zip format, and both in the older one


class Net(nn.Module):
    """A module to be saved whole."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.up = nn.Linear(4, 5)
        self.model.register_buffer("steps", torch.tensor([1, 2]))
        self.model.register_buffer("scratch", torch.zeros(2), persistent=False)


def _build_torch(folder: Path) -> None:
    write_models(folder, "base", "one", "two")
    torch.save(tensors(1), folder / "state.bin")
    torch.save({"state_dict": tensors(1), "epoch": 3}, folder / "nested.pt")
    torch.save(tensors(1), folder / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(Net(), folder / "module.pth")
    torch.save(Net(), folder / "module_old.pth", _use_new_zipfile_serialization=False)


def _damage_torch(rng: Random, folder: Path) -> None:
    path = folder / rng.choice(("state.bin", "state.bin", "nested.pt", "old.pt", "module.pth", "module_old.pth"))
    path.write_bytes(damaged_torch_file(rng, path.read_bytes()))


def damaged_torch_file(rng: Random, data: bytes) -> bytes:
    """Damage a torch file: the pickle in it, the zip around it, or any of its bytes."""
    if rng.random() < 0.25:
        return mutated_bytes(rng, data)
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return mutated_pickles(rng, data)
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(made, "w") as target:
        for entry in source.infolist():
            content, name = source.read(entry), entry.filename
            if name.endswith("data.pkl") and rng.random() < 0.9:
                content = mutated_pickle(rng, content)
            elif rng.random() < 0.05:
                content = mutated_bytes(rng, content)
            if rng.random() < 0.02:
                name = rng.choice((name + "x", "../" + name, name.replace("data", "atad"), "a" * 300))
            if rng.random() < 0.98:
                target.writestr(zipfile.ZipInfo(name), content, rng.choice((0,) * 30 + (zipfile.ZIP_DEFLATED,)))
    return made.getvalue()


def mutated_pickles(rng: Random, data: bytes) -> bytes:
    """Damage one of the pickles that a file of the older format begins with."""
    import pickle
    import pickletools

    ends, stream = [0], io.BytesIO(data)
    for _ in range(5):
        for _ in pickletools.genops(stream):
            pass
        ends.append(stream.tell())
    assert pickle.loads(data[: ends[1]])
    k = rng.choice((0, 1, 2, 3, 3, 3, 3, 4))
    return data[: ends[k]] + mutated_pickle(rng, data[ends[k] : ends[k + 1]]) + data[ends[k + 1] :]


def _read_torch(folder: Path) -> None:
    (folder / "t").mkdir()
    for file in ("old.pt", "module_old.pth"):
        convert(folder / file, folder / "t" / f"{file}.safetensors")
        load_file(folder / "t" / f"{file}.safetensors")
    convert(folder / "nested.pt", folder / "t" / "nested.safetensors", key="state_dict")
    _read_everything(str(folder / "module.pth"))
    (folder / "one" / "model.safetensors").unlink()
    (folder / "state.bin").rename(folder / "one" / "pytorch_model.bin")
    merge_and_compare(recipe(folder), folder / "out")


# adapters


def _build_adapter(folder: Path) -> None:
    write_models(folder, "base")
    draw = torch.Generator().manual_seed(3)
    for name in ("one", "two"):
        (folder / name).mkdir()
        weights = {}
        for module in ("model.layers.0.up", "model.layers.1.up"):
            weights[f"base_model.model.{module}.lora_A.weight"] = torch.randn(2, 4, generator=draw)
            weights[f"base_model.model.{module}.lora_B.weight"] = torch.randn(5, 2, generator=draw)
        weights["base_model.model.model.norm.weight"] = torch.randn(4, generator=draw)
        save_file(weights, folder / name / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["up"], "modules_to_save": ["norm"],
            "fan_in_fan_out": False, "use_rslora": name == "two", "use_dora": False, "init_lora_weights": True,
            "alpha_pattern": {"layers.1.up": 8}, "rank_pattern": {}, "bias": "none", "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "base", "revision": None, "layers_to_transform": None,
        }  # fmt: skip
        (folder / name / "adapter_config.json").write_text(json.dumps(config))


def _damage_adapter(rng: Random, folder: Path) -> None:
    place = folder / rng.choice(("one", "two"))
    if rng.random() < 0.2:  # factors of stacked experts, it says
        config = json.loads((place / "adapter_config.json").read_text())
        config["target_parameters"] = rng.choice((["up.weight"], ["up.bias"], ["layers.0.up"], [3, None], "up", {}))
        (place / "adapter_config.json").write_text(json.dumps(config))
    path = place / ("adapter_config.json" if rng.random() < 0.6 else "adapter_model.safetensors")
    (damage_files if rng.random() < 0.05 else damage_content)(rng, path)


def _read_adapter(folder: Path) -> None:
    base = str(folder / "base")
    models = [{"model": f"{base}+{folder / name}"} for name in ("one", "two")]
    made = {"merge_method": "task_arithmetic", "base_model": base, "models": models}
    merge_and_compare(made, folder / "out")
    found = merge({**made, "output": "lora"}, folder / "lora")
    assert any("lora_A" in name for name in found)


# FP8


def _build_quantized(folder: Path) -> None:
    write_models(folder, "base", "one", "two")
    quantization = {"quant_method": "fp8", "weight_block_size": [2, 2], "activation_scheme": "dynamic"}
    for seed, name in enumerate(("base", "one", "two")):
        state = tensors(seed)
        for i in (0, 1):
            key = f"model.layers.{i}.up.weight"
            state[key] = state[key].clamp(-2, 2).to(torch.float8_e4m3fn)
            state[f"{key}_scale_inv"] = torch.full((3, 2) if i else (1,), 0.5)
        save_file(state, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))


def _damage_quantized(rng: Random, folder: Path) -> None:
    damage_content(rng, folder / rng.choice(("base", "one")) / rng.choice(("config.json", "model.safetensors")))


# folders of other things


def _build_refused(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))


def _damage_refused(rng: Random, folder: Path) -> None:
    names = [f"{rng.choice(('model', 'q4', 'x'))}{ending}" for ending in (*REFUSED, ".bin", ".safetensors", ".pt", "")]
    names += [
        "model_index.json",
        "adapter_model.safetensors",
        "unet/x.safetensors",
        "optimizer.pt",
        "model.safetensors",
    ]
    names += [name for name in NAMES if name and "\0" not in name and len(name.encode("utf-8", "surrogatepass")) < 200]
    for _ in range(rng.choice((0, 1, 2, 3))):
        name = rng.choice(names)
        path = (
            folder
            / "model"
            / (name if "/" in name and not name.startswith((".", "/", "~", "a", "h", "f")) else name.replace("/", "_"))
        )
        if path.name in ("", ".", "..") or path.exists():
            continue
        try:
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_bytes(rng.choice((b"", b"GGUF\3\0\0\0", rng.randbytes(100), b"{}", b"PK\3\4", b"\x89HDF\r\n")))
        except (OSError, ValueError):
            continue


def _read_refused(folder: Path) -> None:
    for path in sorted((folder / "model").iterdir()):
        if path.suffix in REFUSED:
            with pytest.raises(CheckpointError, match=re.escape(REFUSED[path.suffix])):
                open_checkpoint(str(path))
    _read_everything(str(folder / "model"))


READERS = [
    Reader("safetensors", _build_three, _damage_safetensors, _read_three, share=6),
    Reader("shard-index", _build_index, _damage_index, _read_three, share=4),
    Reader("torch", _build_torch, _damage_torch, _read_torch, share=8),
    Reader("adapter", _build_adapter, _damage_adapter, _read_adapter, share=5),
    Reader("fp8", _build_quantized, _damage_quantized, _read_three, share=3),
    Reader("refused-formats", _build_refused, _damage_refused, _read_refused, share=1),
]
