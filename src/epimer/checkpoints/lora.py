"""A LoRA adapter over a base model: W + scaling·B·A, kept as factors until a dense tensor is read.

DoRA also gives every output (row of W) a length m: V = W + scaling·B·A becomes m V / ‖V‖, which has no factors.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import Checkpoint, Rows, is_embedding
from epimer.checkpoints.expert_factors import ExpertPart, stored_parts
from epimer.checkpoints.folder import inside, open_file, read_json
from epimer.checkpoints.name_patterns import NamePatterns
from epimer.checkpoints.token_rows import STORED, TokenRows, indices_problem, token_indices
from epimer.errors import CheckpointError, listed, short
from epimer.geometry.linalg import LowRank, as_compute_dtype

PREFIX = "base_model.model."
PARTS = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")
INNER = (".modules_to_save.default.", ".modules_to_save.", ".token_adapter.base_layer.", ".base_layer.")
MAGNITUDES = (".lora_magnitude_vector", ".lora_magnitude_vector.weight")
UNSUPPORTED = ("use_qalora", "use_bdlora", "kasa_config", "layer_replication", "monteclora_config")
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that also change the base's weights
CONV1D = ("gpt2", "imagegpt", "openai-gpt", "decision_transformer")  # models whose linear layers are stored transposed

HEADS = ("lm_head.weight", "embed_out.weight")
RENAMED = {"block_sparse_moe": "mlp"}  # words of a file -> what transformers calls them in a network (Mixtral)
MOVED = ("model", "language_model", "text_model")  # words of names that a network and its file have in different places


class Update(NamedTuple):
    """What an adapter adds to one tensor: scaling·B·A, or its transpose; A and B are names in the adapter's file."""

    A: str
    B: str
    scaling: float
    transposed: bool
    magnitude: str | None = None
    """the name of DoRA's lengths of the outputs"""
    expert: ExpertPart | None = None
    """which part of A and B, where those are of stacked experts"""
    parameter: str = ""
    """the network's name of the stack, then"""

    @property
    def module(self) -> str:
        """The name of the module that it belongs to, as PEFT has it."""
        part = next(part for part in PARTS if self.A.endswith(part))
        return self.A.removeprefix(PREFIX).removesuffix(part)


class Adapted(Checkpoint):
    """A base checkpoint with one PEFT adapter on it."""

    def __init__(self, base: Checkpoint, folder: Path, where: str, name: str) -> None:
        self.base, self.where, self.name = base, where, name
        self.folder, self.headers, self.ties = base.folder, dict(base.headers), base.ties
        self.config = read_json(inside(folder, "adapter_config.json"), f"{where}/adapter_config.json")
        weights = f"adapter_model.{'safetensors' if (folder / 'adapter_model.safetensors').exists() else 'bin'}"
        self.adapter = open_file(inside(folder, weights), f"{where}/{weights}")
        self.files, self.downloads = [*base.files, *self.adapter.files], base.downloads
        self._check_config()
        self.updates: dict[str, Update] = {}
        self.replaced: dict[str, str] = {}
        self.brought: dict[str, str] = {}
        """name -> the tensor of the adapter that stands for it, even where it equals the base's"""
        self.tokens: dict[str, TokenRows] = {}
        """name of a table, or of a head that is a copy of it -> the rows of it that the adapter has"""
        self._match()

    def read(self, name: str, rows: Rows = None) -> Tensor:
        W = self.adapter.read(self.replaced[name], rows) if name in self.replaced else self.base.read(name, rows)
        if (tokens := self.tokens.get(self.ties.get(name, name))) is not None:
            return tokens.put_into(as_compute_dtype(W), self.adapter, rows)
        update = self.updates.get(self.ties.get(name, name))
        if update is None:
            return W
        if update.magnitude is not None and update.transposed and rows is not None:
            return self.read(name)[slice(*rows)].clone()  # the length of an output is that of a whole column
        W = as_compute_dtype(W)
        if update.expert is not None and update.expert.number is None:
            A, B = self._read_factors(update)
            return W + update.scaling * update.expert.stack(A, B, rows).to(W.dtype)
        factors = self._factors(name, rows)
        assert factors is not None
        W = W + factors.dense().to(W.dtype).reshape(W.shape)
        return W if update.magnitude is None else self._with_magnitude(W, update, rows)

    @property
    def tokenizer_folder(self) -> Path | None:
        own = self.adapter.files[0].parent
        return own if (own / "tokenizer_config.json").exists() else self.base.tokenizer_folder

    @property
    def state(self) -> list[tuple[str, int, int | str]]:
        return [*self.base.state, *self.adapter.state]

    def delta(self, name: str, base: Checkpoint, rows: Rows = None) -> LowRank | None:
        if name in self.replaced or not self.has_factors(name, rows):
            return None
        update = self._factors(name, rows)
        if base.fingerprint != self.base.fingerprint:  # an adapter on an adapter, or on another model
            under = self.base.delta(name, base, rows)
            return under if under is None or update is None else _sum(under, update)
        if update is not None:
            return update
        W = self.headers[name] if rows is None else self.headers[name][slice(*rows)]
        size = W.shape[0] if W.dim() else 1
        return LowRank(torch.zeros(size, 0), torch.zeros(0, W.numel() // size if size else 0))

    def delta_rank(self, name: str, base: Checkpoint) -> int | None:
        """Return the rank of what the adapter adds to a tensor, of a stack to every expert."""
        if name in self.replaced or self.ties.get(name, name) in self.tokens or self.has_magnitude(name):
            return None
        update = self.updates.get(self.ties.get(name, name))
        own = 0 if update is None else self.adapter.headers[update.A].shape[0]
        own = own if update is None or update.expert is None else own // update.expert.experts
        under = 0 if base.fingerprint == self.base.fingerprint else self.base.delta_rank(name, base)
        return None if under is None else under + own

    def _factors(self, name: str, rows: Rows) -> LowRank | None:
        """Return what the adapter adds to a tensor or its rows; None if it adds nothing."""
        update = self.updates.get(self.ties.get(name, name))
        if update is None:
            return None
        A, B = self._read_factors(update)
        if update.expert is not None and update.expert.number is None:
            assert rows is not None
            return update.expert.member(rows[0], A, update.scaling * B)
        if update.expert is None:
            factors = LowRank(update.scaling * B.flatten(1), A.flatten(1))
        else:
            factors = update.expert.factors(A, update.scaling * B)
        factors = factors.T if update.transposed else factors
        return factors if rows is None else LowRank(factors.B[slice(*rows)], factors.A)

    def _read_factors(self, update: Update) -> tuple[Tensor, Tensor]:
        """Return A and B in one precision, the wider of theirs."""
        A, B = (as_compute_dtype(self.adapter.read(part)) for part in (update.A, update.B))
        dtype = torch.promote_types(A.dtype, B.dtype)
        return A.to(dtype), B.to(dtype)

    def has_factors(self, name: str, rows: Rows) -> bool:
        """Whether what the adapter adds to a tensor or its rows is one matrix of low rank, or nothing."""
        update = self.updates.get(self.ties.get(name, name))
        stack = update is not None and update.expert is not None and update.expert.number is None
        several = stack and (rows is None or rows[1] - rows[0] != 1)
        return not several and not self.has_magnitude(name) and self.ties.get(name, name) not in self.tokens

    def has_magnitude(self, name: str) -> bool:
        """Whether a tensor is DoRA's, so that its difference from the base has no factors."""
        update = self.updates.get(self.ties.get(name, name))
        return update is not None and update.magnitude is not None

    def _with_magnitude(self, W: Tensor, update: Update, rows: Rows) -> Tensor:
        """Return W with the lengths of its outputs, rows or columns, that the adapter has."""
        assert update.magnitude is not None
        m = self.adapter.read(update.magnitude).flatten().double()
        V = W.flatten(1)
        if update.transposed:
            factor = (m / torch.linalg.vector_norm(V, dim=0, dtype=torch.float64))[None, :]
        else:
            m = m if rows is None else m[slice(*rows)]
            factor = (m / torch.linalg.vector_norm(V, dim=1, dtype=torch.float64))[:, None]
        return (V * factor.to(V.dtype)).reshape(W.shape)

    def sample(self, name: str) -> bytes:
        W = self.adapter.sample(self.replaced[name]) if name in self.replaced else self.base.sample(name)
        if (tokens := self.tokens.get(self.ties.get(name, name))) is not None:
            return W + repr(tokens.indices).encode() + self.adapter.sample(tokens.key)
        update = self.updates.get(self.ties.get(name, name))
        if update is None:
            return W
        lengths = b"" if update.magnitude is None else self.adapter.sample(update.magnitude)
        factors = self.adapter.sample(update.A) + self.adapter.sample(update.B)
        part = b"" if update.expert is None else repr(tuple(update.expert)).encode()
        return W + repr((update.scaling, update.transposed)).encode() + part + factors + lengths

    @property
    def _other_base(self) -> str:
        """A question about the base, for errors that another base would explain."""
        named = self.config.get("base_model_name_or_path")
        says = f" It says that it was trained on {short(named)}." if isinstance(named, str) and named else ""
        return f"is it an adapter of this base?{says}"

    def _refuse(self, problem: str) -> CheckpointError:
        remedy = "merge it into its base with PEFT's merge_and_unload() and give the saved model"
        return CheckpointError(f"{self.where} {problem}; {remedy}.")

    def _check_config(self) -> None:
        if (kind := self.config.get("peft_type")) != "LORA":
            raise self._refuse(f"is a {kind} adapter, and only LORA is read")
        if used := [key for key in UNSUPPORTED if self.config.get(key)]:
            raise self._refuse(f"uses {', '.join(used)}, which is not plain LoRA")
        start = self.config.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
            raise self._refuse(f"was started by {start}, which also changes the base's weights")
        if not isinstance(self.config.get("alpha_pattern") or {}, dict):
            raise CheckpointError(f"{self.where}/adapter_config.json: alpha_pattern must map names to numbers.")

    def _match(self) -> None:
        """Match every tensor of the adapter with one of the base."""
        factors: dict[str, dict[str, str]] = {}
        magnitudes: dict[str, str] = {}
        for key in self.adapter.headers:
            part = next((part for part in PARTS if key.endswith(part)), None)
            module = key.removeprefix(PREFIX)
            if part is not None:
                factors.setdefault(module.removesuffix(part), {})[part] = key
            elif self.config.get("use_dora") and key.endswith(MAGNITUDES):
                magnitudes[module.partition(MAGNITUDES[0])[0]] = key
            elif key.endswith(STORED):
                self._match_tokens(module.removesuffix(STORED), key)
            elif ".lora_" in key:
                raise self._refuse(f"has {key!r}, which is not plain LoRA")
            elif ".original_module." not in key:
                self._replace(self._resolve(network_name(key), key), key)
        for module, parts in sorted(factors.items(), key=lambda item: -item[0].count(".base_layer")):
            embedding = ".lora_embedding_A" in parts
            A, B = (".lora_embedding_A", ".lora_embedding_B") if embedding else PARTS[:2]
            if A not in parts or B not in parts:
                raise CheckpointError(f"{self.where} has only one of lora_A and lora_B for {module!r}; save it again.")
            for key in (parts[A], parts[B]):
                if not (dtype := self.adapter.headers[key].dtype).is_floating_point:
                    raise self._refuse(f"has {key!r} in {dtype}, and factors are floating-point numbers")
            if self._experts(module, parts[A], parts[B]):
                continue
            name = self._untied(self._resolve(f"{module}.weight", parts[A]))
            if name in self.tokens:
                raise self._refuse(f"has both factors and rows (trainable_token_indices) of {name!r}")
            update = self._update(module, name, parts[A], parts[B], embedding=embedding)
            self.updates[name] = self._with_lengths(module, update, magnitudes.get(module))
        self._check_tokens()
        if not self.updates and not self.replaced and not self.tokens:
            raise CheckpointError(f"{self.where} changes nothing: it holds no LoRA factors; save the adapter again.")
        self._untie()

    def _untied(self, name: str) -> str:
        """Return the name under which a changed tensor is kept: of a table that is also the head, the first."""
        if name not in {*self.base.ties, *self.base.ties.values()}:
            return name
        if any(word in name for word in ("lm_head", "embed_out", "decoder.weight")):
            raise self._refuse(f"changes {name!r}, which the base shares with its embeddings")
        return self.base.ties.get(name, name)

    def _match_tokens(self, module: str, key: str) -> None:
        """Note the rows that an adapter has of a table, and of a head that is a copy of it."""
        name = self._untied(self._resolve(f"{module}.weight", key))
        indices = token_indices(self.config, module)
        problem = indices_problem(indices, self.adapter.headers[key], self.base.headers[name])
        if problem is not None:
            raise CheckpointError(f"{self.where}: of {module!r} {problem}; {self._other_base}")
        assert isinstance(indices, list)
        self.tokens[name] = TokenRows(key, tuple(indices))
        if self.model_config.get("tie_word_embeddings") and is_embedding(name):
            heads = [head for head in self.base.headers if head.endswith(HEADS) and self.base.ties.get(head) != name]
            self.tokens |= {head: self.tokens[name] for head in heads if self.base.equal(head, self.base, name)}

    def _check_tokens(self) -> None:
        """Refuse an adapter whose file lacks rows that its config names, other than those of a head that follows."""
        given = self.config.get("trainable_token_indices") or {}
        modules = [rows.key.removesuffix(STORED) for rows in self.tokens.values()]
        shared = {*self.base.ties, *self.tokens}
        for name in given if isinstance(given, dict) else [""]:
            own = [W for W in self.base.headers if W.endswith(f"{name}.weight") and W not in shared]
            if not any(module.endswith(name) for module in modules) and (own or not modules):
                raise self._refuse(f"has trainable_token_indices, but no rows of {name or 'a table'} in its file")

    def _experts(self, module: str, A: str, B: str) -> bool:
        """Note the factors of a parameter that `target_parameters` names; return whether they are of one.

        PEFT wraps a module once per parameter and does not store which is which; their shapes tell.
        """
        outer, depth = re.subn(r"\.base_layer\b", "", module)
        given = self.config.get("target_parameters")
        targets = [str(target) for target in given] if isinstance(given, list) else []
        words = dict.fromkeys(target.rpartition(".")[2] for target in targets)
        named = [word for word in words if any(f".{outer}.{word}".endswith(f".{target}") for target in targets)]
        if not named or (named == ["weight"] and not depth):
            return False
        first, second = self.adapter.headers[A], self.adapter.headers[B]
        others = [u.expert for u in self.updates.values() if u.expert and u.parameter.startswith(f"{outer}.")]
        inputs_first = others[0].inputs_first if others else None  # one answer for all stacks of a module
        flat = first.dim() == second.dim() == 2
        fitting: list[tuple[str, dict[str, ExpertPart]]] = []
        for word in named if flat else ():
            parts = stored_parts(outer, word, first.shape[-1], second.shape[0], self.base.headers, inputs_first)
            if parts and not self.updates.keys() & parts.keys():
                fitting.append((word, parts))
        count = next(iter(fitting[0][1].values())).experts if fitting else 1
        if len(fitting) != 1 or first.shape[0] != second.shape[1] or not first.shape[0] or first.shape[0] % count:
            shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
            several = "several" if len(fitting) > 1 else "none"
            problem = f"has factors {shapes} of stacked experts in {outer!r} (target_parameters)"
            raise self._refuse(f"{problem}, which fit {several} of the base's tensors")
        word, parts = fitting[0]
        scaling = self._scaling(f"{outer}.{word}", first.shape[0] // count)
        whole = f"{outer}.{word}"
        self.updates |= {name: Update(A, B, scaling, False, None, part, whole) for name, part in parts.items()}
        return True

    def _replace(self, name: str, key: str) -> None:
        """Read a tensor from the adapter instead of the base, unless they are the same."""
        self.brought[name] = key
        own, W = self.adapter.headers[key], self.base.headers[name]
        if own.shape != W.shape or own.is_floating_point() != W.is_floating_point():
            raise CheckpointError(
                f"{self.where} brings its own {name!r}, {own.dtype} of shape {tuple(own.shape)}, but the base's is "
                f"{W.dtype} of shape {tuple(W.shape)}; {self._other_base}"
            )
        if not self.adapter.equal(key, self.base, name):
            self.replaced[name], self.headers[name] = key, own

    def _untie(self) -> None:
        """Drop ties of which only one side is replaced; refuse where the other side is not stored."""
        self.ties = {n: t for n, t in self.ties.items() if self.replaced.get(n) == self.replaced.get(t)}
        for name, twin in self.base.ties.items():
            if name not in self.ties and (name in self.tokens or twin in self.tokens):
                raise self._refuse(f"has rows of {twin!r} (trainable_token_indices) and a {name!r} of its own")
        tables = [name for name in self.replaced if is_embedding(name)]
        if tables and head_is_table(self.base):
            raise self._refuse(f"brings its own {tables[0]!r}, which the base also uses as its head")

    @cached_property
    def model_config(self) -> dict[str, object]:
        """The base's config.json, if it has one."""
        return model_config(self)

    def _update(self, module: str, name: str, A: str, B: str, *, embedding: bool) -> Update:
        first, second = self.adapter.headers[A], self.adapter.headers[B]
        if first.dim() < 2 or second.dim() < 2 or first.shape[0] != second.shape[1] or not first.shape[0]:
            raise CheckpointError(
                f"{self.where}: the factors of {module!r} have shapes {tuple(first.shape)} and {tuple(second.shape)}, "
                "expected (r, in) and (out, r); save the adapter again."
            )
        m, n, rank = second.shape[0], first.flatten(1).shape[1], first.shape[0]
        shape = tuple(self.base.headers[name].flatten(1).shape) if self.base.headers[name].dim() > 1 else ()
        if shape not in ((m, n), (n, m)) or (embedding and shape != (n, m)):
            raise CheckpointError(
                f"{self.where} changes {name!r} by a {m} x {n} matrix, but the base's has shape {shape}; "
                f"{self._other_base}"
            )
        return Update(
            A, B, self._scaling(module, rank), embedding or self._transposed(module, shape == (m, n), shape == (n, m))
        )

    def _scaling(self, module: str, rank: int) -> float:
        """Return what B A of this rank is multiplied by."""
        alpha = self._alphas.value(module, self.config.get("lora_alpha", rank))
        if not isinstance(alpha, int | float) or isinstance(alpha, bool):
            raise CheckpointError(f"{self.where}/adapter_config.json has lora_alpha {alpha!r}, expected a number.")
        return alpha / (rank**0.5 if self.config.get("use_rslora") else rank)

    def _with_lengths(self, module: str, update: Update, key: str | None) -> Update:
        """Return what an adapter adds to a tensor with the name of DoRA's lengths, where it has use_dora."""
        if not self.config.get("use_dora"):
            return update
        if key is None:
            raise self._refuse(f"has use_dora, but no lora_magnitude_vector for {module!r}")
        outputs, lengths = self.adapter.headers[update.B].shape[0], self.adapter.headers[key].numel()
        if lengths != outputs:
            raise CheckpointError(
                f"{self.where} has {lengths} lengths (lora_magnitude_vector) for the {outputs} outputs of {module!r}; "
                "save the adapter again."
            )
        return update._replace(magnitude=key)

    def _transposed(self, module: str, fits: bool, fits_transposed: bool) -> bool:
        """Whether the base stores a layer as (in, out); PEFT notes one answer for all layers, so shapes go first."""
        if fits != fits_transposed:
            return fits_transposed
        if self.model_config.get("model_type") in CONV1D:
            return module.rpartition(".")[2] in ("c_attn", "c_proj", "c_fc", "q_attn")
        return bool(self.config.get("fan_in_fan_out"))

    @cached_property
    def _alphas(self) -> NamePatterns:
        """The alphas of modules by the ends of their names."""
        where = f"{self.where}/adapter_config.json"
        try:
            return NamePatterns(self.config.get("alpha_pattern") or {})
        except ValueError as error:
            raise CheckpointError(f"{where}: alpha_pattern: {error}; name the modules.") from error

    @cached_property
    def _by_layer(self) -> dict[str, list[str]]:
        """The base's names by what is left of them without the words in which a network and its file differ."""
        found: dict[str, list[str]] = {}
        for name in self.base.headers:
            found.setdefault(_layer_name(name), []).append(name)
        return found

    def _resolve(self, wanted: str, key: str) -> str:
        """Return the base's name for an adapter's: the same, or the only one that ends with it (or it with that).

        Networks of transformers with a language model inside are saved under older names than their modules have:
        `language_model.model.layers` or `model.layers` for `model.language_model.layers`.
        """
        if wanted in self.base.headers:
            return wanted
        fits = [name for name in self.base.headers if name.endswith(f".{wanted}") or wanted.endswith(f".{name}")]
        fits = fits if len(fits) == 1 else self._by_layer.get(_layer_name(wanted), fits)
        if len(fits) != 1:
            raise CheckpointError(
                f"{self.where}: {key!r} belongs to no tensor of {self.base.where}, which has "
                f"{listed(self.base.headers)}; {self._other_base}"
            )
        return fits[0]


def _sum(first: LowRank, second: LowRank) -> LowRank:
    """Return the sum of two matrices as factors, whose ranks add up."""
    return LowRank(torch.cat([first.B, second.B], dim=1), torch.cat([first.A, second.A]))


def _layer_name(name: str) -> str:
    """Return a tensor's name without the words that transformers puts elsewhere when it saves a network."""
    return ".".join(RENAMED.get(part, part) for part in name.split(".") if part not in MOVED)


def network_name(key: str) -> str:
    """Return the network's name of a tensor that an adapter brings."""
    for inner in INNER:
        key = key.replace(inner, ".")
    return key.removeprefix(PREFIX)


def model_config(checkpoint: Checkpoint) -> dict[str, object]:
    """Return a checkpoint's config.json, if it has one."""
    folder = checkpoint.folder
    if folder is None or not (folder / "config.json").is_file():
        return {}
    return read_json(inside(folder, "config.json"), str(folder / "config.json"))


def head_is_table(base: Checkpoint) -> bool:
    """Whether a language model uses its table of embeddings as its head too, and so stores no head."""
    if any(name.endswith(HEADS) for name in base.headers):
        return False
    config = model_config(base)
    names = config.get("architectures")
    kinds = " ".join(map(str, names)) if isinstance(names, list) else ""
    speaks = any(word in kinds for word in ("LMHead", "CausalLM", "ConditionalGeneration", "MaskedLM"))
    return speaks and config.get("tie_word_embeddings") is not False
