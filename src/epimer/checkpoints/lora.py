"""A LoRA adapter over a base model: W + scaling·B·A, kept as factors until something dense is asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from epimer.checkpoints.checkpoint import Checkpoint, Rows
from epimer.checkpoints.folder import inside, open_file, read_json
from epimer.errors import CheckpointError, listed
from epimer.geometry.linalg import LowRank, working

PREFIX = "base_model.model."
PARTS = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")
UNSUPPORTED = ("use_dora", "use_qalora", "use_bdlora", "kasa_config", "layer_replication", "monteclora_config")


class Update(NamedTuple):
    """What an adapter does to one tensor: the names of its factors, their factor, and which way round."""

    A: str
    B: str
    scaling: float
    transposed: bool


class Adapted(Checkpoint):
    """A base checkpoint with one PEFT adapter on it."""

    def __init__(self, base: Checkpoint, folder: Path, where: str, name: str) -> None:
        self.base, self.where, self.name = base, where, name
        self.folder, self.headers, self.ties = base.folder, dict(base.headers), base.ties
        self.config = read_json(inside(folder, "adapter_config.json"), f"{where}/adapter_config.json")
        weights = "adapter_model.safetensors"
        if not (folder / weights).exists():
            weights = "adapter_model.bin"
        self.adapter = open_file(inside(folder, weights), f"{where}/{weights}")
        self._check_config()
        self.updates: dict[str, Update] = {}
        self.replaced: dict[str, str] = {}
        self._match()

    @property
    def files(self) -> list[Path]:
        return [*self.base.files, *self.adapter.files]

    def read(self, name: str, rows: Rows = None) -> Tensor:
        if name in self.replaced:
            return self.adapter.read(self.replaced[name], rows)
        W = self.base.read(name, rows)
        delta = self.delta(name, rows)
        return W if delta is None else working(W) + delta.dense().to(working(W).dtype).reshape(W.shape)

    def delta(self, name: str, rows: Rows = None) -> LowRank | None:
        """Return what the adapter adds to a tensor or its rows, as factors; None if it leaves or replaces it."""
        update = self.updates.get(self.ties.get(name, name))
        if update is None:
            return None
        A, B = (working(self.adapter.read(part)) for part in (update.A, update.B))
        delta = LowRank(update.scaling * B.flatten(1), A.flatten(1))
        delta = delta.T if update.transposed else delta
        return delta if rows is None else LowRank(delta.B[slice(*rows)], delta.A)

    def replaces(self, name: str) -> bool:
        """Whether the adapter brings its own copy of a tensor."""
        return name in self.replaced

    def sample(self, name: str) -> bytes:
        if name in self.replaced:
            return self.adapter.sample(self.replaced[name])
        update = self.updates.get(name)
        parts = b"" if update is None else self.adapter.sample(update.A) + self.adapter.sample(update.B)
        return self.base.sample(name) + (f"{update.scaling!r}".encode() + parts if update else b"")

    def _check_config(self) -> None:
        kind = self.config.get("peft_type")
        if kind != "LORA":
            raise CheckpointError(f"{self.where} is a {kind} adapter; only LORA can be merged: save the merged model.")
        used = [key for key in UNSUPPORTED if self.config.get(key)]
        if used:
            raise CheckpointError(
                f"{self.where} uses {', '.join(used)}, which is not plain LoRA; merge it into its base with PEFT's "
                "merge_and_unload() and give the saved model."
            )

    def _match(self) -> None:
        """Find the base's tensor for every tensor of the adapter."""
        factors: dict[str, dict[str, str]] = {}
        for key in self.adapter.headers:
            part = next((part for part in PARTS if key.endswith(part)), None)
            module = key.removeprefix(PREFIX)
            if part is not None:
                factors.setdefault(module.removesuffix(part), {})[part] = key
            elif ".lora_" in key:
                raise CheckpointError(f"{self.where} has {key!r}, which is not plain LoRA; merge it with PEFT first.")
            else:
                module = module.replace(".modules_to_save.default.", ".").replace(".base_layer.", ".")
                self.replaced[self._resolve(module, key)] = key
        for module, parts in factors.items():
            embedding = ".lora_embedding_A" in parts
            A, B = (".lora_embedding_A", ".lora_embedding_B") if embedding else PARTS[:2]
            if A not in parts or B not in parts:
                raise CheckpointError(f"{self.where} has only one of lora_A and lora_B for {module!r}; save it again.")
            name = self._resolve(f"{module}.weight", parts[A])
            self.updates[name] = self._update(module, name, parts[A], parts[B], embedding=embedding)

    def _update(self, module: str, name: str, A: str, B: str, *, embedding: bool) -> Update:
        rank = self.adapter.headers[A].shape[0]
        alpha = _by_pattern(self.config.get("alpha_pattern"), module, self.config.get("lora_alpha", rank))
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not rank:
            raise CheckpointError(f"{self.where}/adapter_config.json has lora_alpha {alpha!r}, expected a number.")
        scaling = alpha / (rank**0.5 if self.config.get("use_rslora") else rank)
        m, n = self.adapter.headers[B].flatten(1).shape[0], self.adapter.headers[A].flatten(1).shape[1]
        shape = self.base.headers[name].flatten(1).shape if self.base.headers[name].dim() > 1 else ()
        transposed = embedding or bool(self.config.get("fan_in_fan_out"))
        if tuple(shape) != ((n, m) if transposed else (m, n)):
            raise CheckpointError(
                f"{self.where} changes {name!r} by a {m} x {n} matrix, but the base's is {tuple(shape)}; "
                "is it an adapter of this base?"
            )
        return Update(A, B, scaling, transposed)

    def _resolve(self, wanted: str, key: str) -> str:
        """Return the base's name for an adapter's: the same, or the only one that ends with it (or it with that)."""
        if wanted in self.base.headers:
            return wanted
        found = [name for name in self.base.headers if name.endswith(f".{wanted}") or wanted.endswith(f".{name}")]
        if len(found) != 1:
            raise CheckpointError(
                f"{self.where}: {key!r} belongs to no tensor of {self.base.where}, which has "
                f"{listed(self.base.headers)}; is it an adapter of this base?"
            )
        return found[0]


def _by_pattern(patterns: Any, module: str, default: Any) -> Any:
    """Return the value of the pattern that matches the end of a module's name, as PEFT does."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
