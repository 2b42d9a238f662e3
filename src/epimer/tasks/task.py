"""A network loaded for a task, batches of the task's data as its inputs, and its loss."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.checkpoint import Checkpoint
from epimer.errors import (
    CheckpointError,
    CurvatureError,
    DataError,
    EpimerWarning,
    ParameterError,
    first_line,
    listed,
    nearest,
    short,
    warn,
)
from epimer.tasks.conversations import TEXTS, Layout, answer_tokens, find_layout, has_template
from epimer.tasks.ctc import find_ctc_loss
from epimer.tasks.generation import Reader, SourcesAndTargets, Speech, joined
from epimer.tasks.image_text import ImagesAndTexts
from epimer.tasks.labels import IGNORED, Loss, logits_of
from epimer.tasks.loading import (
    AUTO,
    CAUSAL_LM,
    CLASSIFIERS,
    IMAGE,
    IMAGE_TEXT,
    POOLINGS,
    SEQ2SEQ,
    SPEECH,
    Head,
    WithHead,
    explained_panics,
    load_model,
    load_reader,
    transformers,
)
from epimer.tasks.tables import Table

LABELS = ("label", "labels")
IMAGES = ("image", "img")

InputsAndTargets = tuple[dict[str, Tensor], Tensor | None]


def sample_losses(outputs: Any, targets: Tensor) -> Tensor:
    """Return each sample's cross-entropy, [N], summed over its tokens; targets of -100 count nothing."""
    logits = logits_of(outputs)
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    losses = cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(targets.shape).flatten(1).sum(1) if targets.dim() > 1 else losses


def next_tokens(ids: Tensor, mask: Tensor) -> Tensor:
    """Return the next token at each position, and -100 where there is none."""
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = torch.where(mask[:, 1:].bool(), ids[:, 1:], IGNORED)
    return targets


@dataclass
class Task:
    """A network on its device, in eval mode, with what reads its data and its classes."""

    kind: str
    model: nn.Module
    names: dict[str, str]  # parameter -> its tensor in the checkpoint on disk
    unmatched: list[str]  # parameters that match no tensor on disk
    checkpoint: Checkpoint
    classes: int | None  # the number of classes; None for models that write text
    reader: Any  # the checkpoint's tokenizer, image processor, or what reads both or speech
    device: torch.device
    label2id: dict[str, int] = field(default_factory=dict)
    require_labels: bool = False  # whether data without labels is an error

    @property
    def loss(self) -> Loss | None:
        """The loss per sample; None for that of a model trained by CTC, which is its own."""
        return sample_losses if find_ctc_loss(self.model) is None else None

    def batches(
        self,
        table: Table,
        rows: Sequence[int],
        *,
        batch_size: int,
        max_length: int = 512,
        text: str | None = None,
        label: str | None = None,
        image: str | None = None,
        audio: str | None = None,
    ) -> Iterator[InputsAndTargets]:
        """Return an iterator over the batches of `rows`, in their order; without names the usual columns are read.

        A language model's loss is of the answers alone where rows hold prompts with answers, instructions or chats.
        Images and recordings of different sizes come in batches of their own.
        """
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if value < 1:
                raise ParameterError(f"The {name!r} parameter of a task must be at least 1. Got {value} instead.")
        taken = inspect.signature(self._backbone.forward).parameters
        if (reader := self._generation(table, text, image, audio, self.longest(max_length), rows)) is not None:
            return self._generated(reader, rows, batch_size, taken)
        layout = self._layout(table, text, image, rows[0] if len(rows) else 0)
        labels = None if self.kind == CAUSAL_LM else table.column(label, LABELS, "label")
        if labels is None and self.require_labels and self.kind != CAUSAL_LM:
            raise _no_column(table, LABELS, "labels", "label")
        numbers = {} if labels is None else self._class_numbers(table)

        def read(rows: Sequence[int]) -> dict[str, Tensor]:
            if self.kind == IMAGE:
                return self._images(table, rows, layout.columns[0])
            return self._texts(table, rows, layout, self.longest(max_length))

        def batch(rows: Sequence[int]) -> InputsAndTargets:
            with explained_panics(self.checkpoint.where):
                inputs, targets = read(rows), None
            if self.kind == CAUSAL_LM:
                counted = inputs.get("answer_mask", inputs["attention_mask"])
                targets = next_tokens(inputs["input_ids"], counted).to(self.device)
            elif labels is not None:
                targets = torch.tensor([self._label(table, i, labels, numbers) for i in rows]).to(self.device)
            return {name: value.to(self.device) for name, value in inputs.items() if name in taken}, targets

        return (batch(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size))

    def _generation(
        self, table: Table, text: str | None, image: str | None, audio: str | None, longest: int, rows: Sequence[int]
    ) -> Reader | None:
        """Return what reads rows for a model that writes text from other things than a prompt; None for others."""
        if self.kind == SEQ2SEQ:
            return SourcesAndTargets(self, table, text, longest)
        if self.kind == SPEECH:
            return Speech(self, table, text, audio, longest)
        if self.kind == IMAGE_TEXT:
            return ImagesAndTexts(self, table, text, image, longest, rows[0] if len(rows) else 0)
        return None

    def _generated(
        self, reader: Reader, rows: Sequence[int], batch_size: int, taken: Collection[str]
    ) -> Iterator[InputsAndTargets]:
        for start in range(0, len(rows), batch_size):
            with explained_panics(self.checkpoint.where):
                samples = [reader.sample(i) for i in rows[start : start + batch_size]]
            for inputs, targets in joined(samples, self.padding):
                known = {name: value.to(self.device) for name, value in inputs.items() if name in taken}
                yield known, targets.to(self.device)

    def _layout(self, table: Table, text: str | None, image: str | None, row: int) -> Layout:
        """Return which columns are read, and how; what is not a plain text is said in a warning."""
        what, usual, chosen = ("image", IMAGES, image) if self.kind == IMAGE else ("text", TEXTS, text)
        if self.kind == CAUSAL_LM:
            layout = find_layout(table, text, row)
        else:
            column = table.column(chosen, usual, what)
            layout = None if column is None else Layout("text", (column,))
        if layout is None:
            raise _no_column(table, usual, what, what)
        if layout.kind != "text":
            warn(EpimerWarning(layout.description(table.name, template=has_template(self.reader))))
        return layout

    def _texts(self, table: Table, rows: Sequence[int], layout: Layout, longest: int) -> dict[str, Tensor]:
        """Return tokens, padded on the right to the longest text of the batch, and their attention mask.

        Where the rows have answers, `answer_mask` says which tokens are theirs.
        """
        counted, kinds = list[list[bool]](), None
        if layout.kind == "text":
            texts = [table.text(i, layout.columns[0]) for i in rows]
            encoded = self.reader(texts, truncation=True, max_length=longest, add_special_tokens=True)
            ids, kinds = encoded["input_ids"], encoded.get("token_type_ids")
        else:
            tokens = answer_tokens(self.reader, table, rows, layout, longest)
            ids, counted = [row for row, _ in tokens], [mask for _, mask in tokens]
        fewest = 2 if self.kind == CAUSAL_LM else 1
        for i, row in zip(rows, ids, strict=True):
            self.check_tokens(table, i, row, fewest)
        inputs = {"input_ids": _padded(ids, self.padding), "attention_mask": _padded([[1] * len(r) for r in ids], 0)}
        if counted:
            inputs["answer_mask"] = _padded(counted, 0)
        elif kinds is not None:
            inputs["token_type_ids"] = _padded(kinds, 0)
        return inputs

    def check_tokens(self, table: Table, i: int, tokens: Sequence[int], fewest: int = 1) -> None:
        """Refuse a row with too few tokens, or with some that the model does not know."""
        if len(tokens) < fewest:
            raise DataError(f"{table.where(i)} has {len(tokens)} token, expected at least {fewest}; leave it out.")
        if max(tokens) >= self.vocabulary:
            problem = f"has token {max(tokens)}, but the model knows {self.vocabulary} tokens"
            raise DataError(f"{table.where(i)} {problem}; is this its tokenizer?")

    @property
    def tokenizer(self) -> Any:
        """The tokenizer: the reader itself, or the one in it."""
        return self.reader.tokenizer if self.kind in (IMAGE_TEXT, SPEECH) else self.reader

    @property
    def _config(self) -> Any:
        """The config of the model, or of the part of it that writes the text."""
        config = self._backbone.config
        return config.get_text_config() if self.kind == IMAGE_TEXT else config

    @property
    def _backbone(self) -> Any:
        return self.model.backbone if isinstance(self.model, WithHead) else self.model

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        if find_ctc_loss(self.model) is not None:  # it reads sound
            return int(self._config.vocab_size)
        return int(self._backbone.get_input_embeddings().num_embeddings)

    @property
    def padding(self) -> int:
        """The token to pad with: the model's padding token, or any other, as the attention mask excludes it."""
        own = getattr(self._config, "pad_token_id", None)
        tokens = (own, self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in tokens if token is not None and 0 <= token < self.vocabulary), 0)

    def longest(self, max_length: int) -> int:
        """Return the most tokens of a text: what the model and its tokenizer take, and `max_length`."""
        if self.kind == IMAGE:
            return max_length
        limits = [max_length, self.tokenizer.model_max_length]
        if not isinstance(limits[1], int | float) or not limits[1] > 0:
            problem = f"has {short(limits[1])} as model_max_length, expected a number above 0"
            raise CheckpointError(f"{self.checkpoint.where}/tokenizer_config.json {problem}; repair it.")
        if isinstance(written := getattr(self._config, "max_target_positions", None), int):
            limits.append(written)
        places = getattr(self._config, "max_position_embeddings", None)
        if isinstance(places, int) and places > 0:
            tables = [m for name, m in self._backbone.named_modules() if name.endswith("position_embeddings")]
            skipped = [m.padding_idx + 1 for m in tables if getattr(m, "padding_idx", None) is not None]
            limits.append(places - max(skipped, default=0))  # RoBERTa's positions start after the padding's
        return int(min(limits))

    def check_inputs(self, inputs: Mapping[str, Tensor], where: str) -> None:
        """Refuse tokens that the model does not know, and texts longer than it takes; `where` they are from."""
        if "input_ids" not in inputs:
            return
        ids, longest = inputs["input_ids"], self.longest(sys.maxsize)
        kinds, known = inputs.get("token_type_ids"), getattr(self._backbone.config, "type_vocab_size", None)
        written = inputs.get("decoder_input_ids", ids)
        largest, length = max(int(ids.max()), int(written.max())), max(ids.shape[1], written.shape[1])
        problem = ""
        if largest >= self.vocabulary:
            problem = f"token {largest}, but the model knows {self.vocabulary} tokens"
        elif length > longest:
            problem = f"texts of {length} tokens, but the model takes {longest}"
        elif kinds is not None and isinstance(known, int) and int(kinds.max()) >= known:
            problem = f"token type {int(kinds.max())}, but the model knows {known}"
        if problem:
            raise DataError(f"{where} has {problem}; was it measured on {self.checkpoint.where}?")

    def _images(self, table: Table, rows: Sequence[int], column: str) -> dict[str, Tensor]:
        images = [table.image(i, column) for i in rows]
        try:
            pixels = self.reader(images=images, return_tensors="pt")["pixel_values"]
        except ValueError as error:
            raise DataError(f"{table.where(rows[0])}: the image processor failed: {short(str(error))}") from error
        return {"pixel_values": pixels.to(next(self.model.parameters()).dtype)}

    def _class_numbers(self, table: Table) -> dict[str, int]:
        """Return class name -> number: by the model's own names, or the class folders in their order."""
        folders = table.classes
        if folders is None or all(name in self.label2id for name in folders):
            return self.label2id
        if all(name.isdecimal() for name in folders):
            return {name: int(name) for name in folders}
        if len(folders) != self.classes:
            classes = f"{self.classes} classes" + (f" ({listed(self.label2id)})" if self.label2id else "")
            problem = f"{table.name} has {len(folders)} class folders ({listed(folders)}), but the model has {classes}"
            raise DataError(f"{problem}; name the folders as the model's classes, or by their numbers.")
        return {name: i for i, name in enumerate(folders)}

    def _label(self, table: Table, i: int, column: str, names: dict[str, int]) -> int:
        assert self.classes is not None
        value, where = table.row(i).get(column), table.where(i)
        if isinstance(value, str) and value.strip() in names:
            value = names[value.strip()]
        elif isinstance(value, str) and value.strip().removeprefix("-").isdecimal() and len(value) < 20:
            value = int(value)
        if value is None or value == "":
            raise DataError(f"{where} has no label in {column!r}; give every row one, or leave the row out.")
        if isinstance(value, str) and names:
            known = f"{listed(names, 6)}.{nearest(value, names)}"
            raise DataError(f"{where} has label {short(value)}, which is no class of the model: {known}")
        if isinstance(value, int) and value < 0 and not self.require_labels:
            return 0  # -1 marks a row without a label; its label is not used
        if not isinstance(value, int):
            raise DataError(f"{where} has label {short(value)}, expected a class's number or name.")
        if not 0 <= value < self.classes:
            known = f"the model's {self.classes} classes are 0 to {self.classes - 1}"
            raise DataError(f"{where} has label {value}, but {known}.")
        return int(value)


def load_task(
    model: str,
    task: str,
    *,
    head: Head | None = None,
    pooling: str = "auto",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    progress: bool = False,
) -> Task:
    """Load a model folder, a hub id or `base+adapter` for a task; `head` replaces the head it may have."""
    for name, value, known in (("task", task, tuple(AUTO)), ("pooling", pooling, POOLINGS)):
        if value not in known:
            problem = f"The {name!r} parameter must be one of {', '.join(known)}. Got {value!r} instead."
            raise ParameterError(problem + nearest(str(value), known))
    transformers()
    checkpoint = open_checkpoint(model, progress=progress)
    loaded, names, unmatched = load_model(checkpoint, task, head, pooling, dtype, progress=progress)
    reader = load_reader(checkpoint, task)
    label2id, classes = dict[str, int](), None
    if isinstance(loaded, WithHead):
        classes = loaded.head.out_features
    elif task in CLASSIFIERS:
        config: Any = loaded.config
        classes, label2id = int(config.num_labels), {str(name): int(i) for name, i in config.label2id.items()}
        if task != IMAGE and getattr(config, "pad_token_id", None) is None:  # a decoder finds a text's end by it
            config.pad_token_id = next((t for t in (reader.pad_token_id, reader.eos_token_id) if t is not None), None)
    try:
        loaded = loaded.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise CurvatureError(f"device {device!r} cannot hold the model: {first_line(error)}") from error
    return Task(task, loaded, names, unmatched, checkpoint, classes, reader, torch.device(device), label2id)


def _no_column(table: Table, usual: Sequence[str], what: str, option: str) -> DataError:
    """Return the error for a table without any of the usual columns."""
    missing, columns = " or ".join(map(repr, usual)), listed(table.columns, 12)
    remedy = f"name the one for the {what} with --{option}"
    return DataError(f"{table.name} has no column {missing}; it has {columns}: {remedy}.")


def _padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])
