"""Carry smol6's base model in two files of less than 55 MiB, its matrices still quantised, and rebuild it bit by bit.

    python benchmarks/smol6_transport.py pack MODEL.gguf MODEL_FOLDER PARTS_FOLDER     (needs the package gguf)
    python benchmarks/smol6_transport.py unpack PARTS_FOLDER MODEL_FOLDER              (numpy, torch and safetensors)

`pack` reads the blocks of the GGUF file, and of MODEL_FOLDER (what make_model.py made of it) the config and the
tokenizer. `unpack` writes the same folder again: dequantised in float32, rounded to bfloat16.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
PARTS = 2
BLOCK = 32  # weights that share a scale
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def pack(gguf_file: Path, model: Path, folder: Path) -> None:
    """Write the blocks of every tensor under its Hugging Face name, rows in Hugging Face's order, in parts."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    heads = {
        "attn_q": int(reader.fields["llama.attention.head_count"].contents()),
        "attn_k": int(reader.fields["llama.attention.head_count_kv"].contents()),
    }
    packed = []
    for tensor in reader.tensors:
        blocks = np.asarray(tensor.data)
        kind = tensor.name.split(".")[-2]
        if kind in heads:  # llama.cpp interleaves the two halves of a head's rotary dimensions
            blocks = blocks.reshape(heads[kind], -1, 2, blocks.shape[-1]).swapaxes(1, 2).reshape(blocks.shape)
        packed.append((f"{full_name(tensor.name)}:{tensor.tensor_type.name}", np.ascontiguousarray(blocks)))
    packed.sort(key=lambda item: -item[1].nbytes)
    parts: list[dict[str, np.ndarray]] = [{} for _ in range(PARTS)]
    for name, blocks in packed:
        min(parts, key=lambda part: sum(b.nbytes for b in part.values()))[name] = blocks
    for i, part in enumerate(parts):
        (folder / f"part{i}").mkdir(parents=True, exist_ok=True)
        np.savez(folder / f"part{i}" / "blocks.npz", **part)
    for name in FILES:
        if (model / name).exists():
            shutil.copy(model / name, folder / "part0" / name)


def full_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor of a Llama model."""
    if name in ("token_embd.weight", "output_norm.weight"):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
    layer, kind = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name).groups()
    return f"model.layers.{layer}.{LAYER[kind]}.weight"


def unpack(folder: Path, model: Path) -> None:
    """Write the model folder that was packed."""
    state: dict[str, Tensor] = {}
    for i in range(PARTS):
        with np.load(folder / f"part{i}" / "blocks.npz") as part:
            for key in part.files:
                name, kind = key.split(":")
                state[name] = torch.from_numpy(DEQUANTISE[kind](part[key])).to(torch.bfloat16)
    model.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (folder / "part0" / name).exists():
            shutil.copy(folder / "part0" / name, model / name)
    save_file(dict(sorted(state.items())), model / "model.safetensors", metadata={"format": "pt"})


def dequantise_q4_1(rows: np.ndarray) -> np.ndarray:
    """Return d·q + m for blocks of float16 d, float16 m and 32 numbers q of 4 bits, low halves of bytes first."""
    blocks = rows.reshape(-1, 4 + BLOCK // 2)
    scale, least = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    codes = blocks[:, 4:]
    values = np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.float32)
    return (scale * values + least).reshape(len(rows), -1)


def dequantise_q8_0(rows: np.ndarray) -> np.ndarray:
    """Return d·q for blocks of float16 d and 32 signed bytes q."""
    blocks = rows.reshape(-1, 2 + BLOCK)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return (scale * blocks[:, 2:].copy().view(np.int8).astype(np.float32)).reshape(len(rows), -1)


DEQUANTISE = {"Q4_1": dequantise_q4_1, "Q8_0": dequantise_q8_0, "F32": lambda values: values.astype(np.float32)}


def main() -> None:
    """Pack or unpack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function, paths in (
        ("pack", pack, ("gguf_file", "model", "folder")),
        ("unpack", unpack, ("folder", "model")),
    ):
        command = commands.add_parser(name, help=function.__doc__)
        for path in paths:
            command.add_argument(path, type=Path)
        command.set_defaults(function=function)
    given = vars(parser.parse_args())
    del given["command"]
    given.pop("function")(**given)


if __name__ == "__main__":
    main()
