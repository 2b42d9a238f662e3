"""clip8 in miniature: tiny random CLIP models and tiny datasets under the ids and in the layout of the real ones."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import yaml
from PIL import Image
from pyarrow import parquet
from safetensors.torch import save
from torch import Tensor, nn

from epimer.experiments.clip8.tasks import TASKS, VARIANTS, ClipTask

SIDE = 8
START, END = "<|startoftext|>", "<|endoftext|>"
FOLDER = {"svhn": "cropped_digits", "mnist": "mnist"}
"""where a dataset has its files, where not in `data`"""


def vocabulary() -> dict[str, int]:
    """Return the bytes, each inside and at the end of a word, as CLIP's own vocabulary begins."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    return {token: i for i, token in enumerate([*letters, *(letter + "</w>" for letter in letters), START, END])}


def make_clip(seed: int = 0):
    """Return a random CLIP model with a scale of logits that is not the usual one."""
    from transformers import CLIPConfig, CLIPModel

    tokens = vocabulary()
    ends = {"bos_token_id": tokens[START], "eos_token_id": tokens[END], "pad_token_id": tokens[END]}
    size = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**size, **ends, "num_hidden_layers": 1, "vocab_size": len(tokens), "max_position_embeddings": 77},
        vision_config={**size, "num_hidden_layers": 2, "image_size": SIDE, "patch_size": 4},
        projection_dim=12,
    )
    torch.manual_seed(seed)
    clip = CLIPModel(config).eval()
    with torch.no_grad():
        for W in clip.parameters():
            W += 0.3 * torch.randn(W.shape) / max(W.shape[-1] if W.dim() else 1, 4) ** 0.5
        clip.logit_scale.fill_(3.0)
    return clip


def base_files(clip) -> dict[str, bytes]:
    """Return the files of the base's repository."""
    size = {"height": SIDE, "width": SIDE}
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "crop_size": size,
        "size": {"shortest_edge": SIDE},
        **dict.fromkeys(("do_center_crop", "do_normalize", "do_resize", "do_convert_rgb", "do_rescale"), True),
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "resample": 3,
        "rescale_factor": 1 / 255,
    }
    tokenizer = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": 77,
        "bos_token": START,
        "eos_token": END,
        "pad_token": END,
        "unk_token": END,
    }
    return {
        "config.json": json.dumps({**clip.config.to_dict(), "architectures": ["CLIPModel"]}).encode(),
        "model.safetensors": save({name: W.contiguous() for name, W in clip.state_dict().items()}, {"format": "pt"}),
        "preprocessor_config.json": json.dumps(processor).encode(),
        "tokenizer_config.json": json.dumps(tokenizer).encode(),
        "vocab.json": json.dumps(vocabulary()).encode(),
        "merges.txt": b"#version: 0.2\n",
        "README.md": b"# CLIP",
    }


def tuned_state(clip, seed: int) -> dict[str, Tensor]:
    """Return a vision tower that was moved a little, by the names it has inside a whole model."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: W + 0.05 * torch.randn(W.shape, generator=generator)
        for name, W in clip.state_dict().items()
        if name.startswith("vision_model.")
    }


def tuned_files(clip, seed: int) -> dict[str, bytes]:
    """Return the files of a fine-tuned model's repository; odd ones are named as transformers 5 names tensors."""
    state = tuned_state(clip, seed)
    if seed % 2:
        state = {name.removeprefix("vision_model."): W for name, W in state.items()}
    config = {**clip.config.vision_config.to_dict(), "architectures": ["CLIPVisionModel"]}
    return {"config.json": json.dumps(config).encode(), "model.safetensors": save(state, {"format": "pt"})}


def picture(label: int, generator: np.random.Generator) -> bytes:
    """Return a PNG of its class's colour, not square, with noise."""
    colour = np.random.default_rng(label).integers(0, 200, 3)
    pixels = colour + generator.integers(0, 56, (SIDE + 2, SIDE + 5, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def shard(labels: list[int], names: list[str] | None, seed: int) -> bytes:
    """Return a parquet file as the `datasets` library writes them, with the names of the labels in its schema."""
    generator = np.random.default_rng(seed)
    images = [{"bytes": picture(label, generator), "path": None} for label in labels]
    table = pa.table({"image": images, "label": labels})
    if names is not None:
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    file = io.BytesIO()
    parquet.write_table(table, file, row_group_size=7)
    return file.getvalue()


def data_files(task: ClipTask, t: int, names: list[str] | None, train: int = 30, test: int = 12) -> dict[str, bytes]:
    """Return the files of a dataset's repository: two splits, and others that clip8 has no use for."""
    folder, count = FOLDER.get(task.name, "data"), len(task.classes)

    def labels(rows: int, seed: int) -> list[int]:
        return np.random.default_rng(seed).integers(0, count, rows).tolist()

    files = {
        f"{folder}/train-00000-of-00002.parquet": shard(labels(train // 2, t), names, t),
        f"{folder}/train-00001-of-00002.parquet": shard(labels(train - train // 2, t + 100), names, t + 100),
        f"{folder}/test-00000-of-00001.parquet": shard(labels(test, t + 200), names, t + 200),
        f"{folder}/contrast-00000-of-00001.parquet": b"not parquet",
        "README.md": b"# data",
    }
    if task.subset:
        files["full_numbers/train-00000-of-00001.parquet"] = b"not parquet"
    return files


def card(names: list[str]) -> bytes:
    """Return a dataset card that names the labels."""
    label = {"name": "label", "dtype": {"class_label": {"names": {str(i): name for i, name in enumerate(names)}}}}
    head = {"dataset_info": {"features": [{"name": "image", "dtype": "image"}, label]}}
    return f"---\n{yaml.safe_dump(head)}---\n# data\n".encode()


def repositories(variant: str = "B/32") -> dict[str, dict[str, bytes]]:
    """Return the files of all repositories that a variant needs, by id."""
    clip, sizes = make_clip(), VARIANTS[variant]
    repos = {sizes.base: base_files(clip)}
    for t, task in enumerate(TASKS):
        repos[sizes.tuned.format(task.name)] = tuned_files(clip, t)
        repos[task.data] = data_files(task, t, list(task.classes))
    return repos


def write_files(folder: Path, repos: dict[str, dict[str, bytes]]) -> None:
    """Write repositories as folders by their ids."""
    for repo, files in repos.items():
        for name, content in files.items():
            path = folder / repo / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


# --- the task_vectors family: a ViT of open_clip in plain torch, inside the module that is pickled -------------------


class QuickGelu(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), nn.MultiheadAttention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, inner))
        self.mlp.add_module("gelu", QuickGelu())
        self.mlp.add_module("c_proj", nn.Linear(inner, width))

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Tower(nn.Module):
    """The ViT of CLIP's paper: patches and a class token, blocks that normalise first, a projection of the token."""

    def __init__(self, width=16, heads=2, inner=32, layers=2, patch=4, side=SIDE, features=12):
        super().__init__()
        self.class_embedding = nn.Parameter(torch.randn(width))
        self.positional_embedding = nn.Parameter(torch.randn((side // patch) ** 2 + 1, width))
        self.proj = nn.Parameter(torch.randn(width, features))
        self.conv1 = nn.Conv2d(3, width, patch, patch, bias=False)
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.transformer = nn.Module()
        self.transformer.resblocks = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))

    def forward(self, x):
        x = self.conv1(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], 1) + self.positional_embedding
        x = self.ln_pre(x).transpose(0, 1)  # tokens first, as the attention wants them
        for block in self.transformer.resblocks:
            x = block(x)
        return self.ln_post(x[0]) @ self.proj


class ImageEncoder(nn.Module):
    """What the task_vectors family pickles: a CLIP model of which a part of the text tower is left."""

    def __init__(self, seed: int, **shape: int):
        super().__init__()
        torch.manual_seed(seed)
        self.model = nn.Module()
        self.model.visual = Tower(**shape)
        self.model.token_embedding, self.model.ln_final = nn.Embedding(5, 8), nn.LayerNorm(8)
        self.model.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.preprocess, self.cache = [QuickGelu().forward, Path("images")], None
        with torch.no_grad():  # biases and norms start as zeros and ones, which would hide a mix-up
            for W in self.parameters():
                W += 0.2 * torch.randn(W.shape)
        self.eval()
