"""Batches for models that write a text: from another text, from a recording, or (image_text.py) from images.

Rows are read one by one as dicts of [1, …] tensors, and joined into batches where only their numbers of tokens differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from epimer.errors import CheckpointError, DataError, EpimerWarning, listed, short, warn
from epimer.tasks.audio import read_recording
from epimer.tasks.batches import IGNORED
from epimer.tasks.ctc import find_ctc_loss
from epimer.tasks.tables import Table

if TYPE_CHECKING:
    from epimer.tasks.task import Task

SOURCES = ("source", "input", "text", "document", "article", "dialogue", "prompt", "instruction", "question", "context")
TARGETS = ("target", "output", "summary", "highlights", "answer", "response", "completion")
RECORDINGS = ("audio", "speech", "file", "path")
TRANSCRIPTS = ("text", "sentence", "transcription", "transcript", "normalized_text")
WRITTEN = ("decoder_input_ids", "decoder_attention_mask")
READ = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class Sample(NamedTuple):
    """One row as its model takes it; all tensors are [1, …], or lack that dimension where a batch is of one row."""

    inputs: dict[str, Tensor]
    targets: Tensor


class Reader(Protocol):
    """Reads rows of a table for a model that writes text."""

    def sample(self, i: int) -> Sample:
        """Return row `i`."""
        ...


def joined(samples: Iterable[Sample], padding: int) -> Iterator[Sample]:
    """Yield samples as batches: those in a row that have the same shapes but for tokens, which are padded on the right.

    What is not [1, …], such as the patches of an image whose number differs, stays a batch of its own.
    """
    batch = list[Sample]()
    for sample in samples:
        if batch and _fixed(batch[0]) != _fixed(sample):
            yield _stack(batch, padding)
            batch = []
        batch.append(sample)
        if any(len(value) != 1 for value in sample.inputs.values()):
            yield batch.pop()
    if batch:
        yield _stack(batch, padding)


def _fixed(sample: Sample) -> dict[str, torch.Size | None]:
    """Return input -> its shape, without that of tokens; frames are not tokens, and have a mask of their number."""
    tokens = (*READ, *WRITTEN) if "input_ids" in sample.inputs else WRITTEN
    return {name: None if name in tokens else value.shape for name, value in sample.inputs.items()}


def _stack(batch: Sequence[Sample], padding: int) -> Sample:
    def stacked(values: Sequence[Tensor], fill: int) -> Tensor:
        longest = max(value.shape[1] for value in values)
        if all(value.shape[1] == longest for value in values):
            return torch.cat(list(values))
        return torch.cat([nn.functional.pad(value, (0, longest - value.shape[1]), value=fill) for value in values])

    names = batch[0].inputs
    fills = {name: padding if name.endswith("input_ids") else 0 for name in names}
    inputs = {name: stacked([sample.inputs[name] for sample in batch], fills[name]) for name in names}
    return Sample(inputs, stacked([sample.targets for sample in batch], IGNORED))


def decoder_inputs(model: Any, targets: Tensor) -> dict[str, Tensor]:
    """Return what a decoder is given to predict targets: them, one place later, and a mask that is 0 after the last.

    Empty where the model's config does not say which token its decoder starts with.
    """
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        ids = prepare(labels=targets)
    else:
        config = model.config
        start, padding = getattr(config, "decoder_start_token_id", None), getattr(config, "pad_token_id", None)
        if start is None:
            return {}
        shifted = torch.cat([torch.full_like(targets[:, :1], start), targets[:, :-1]], 1)
        ids = shifted.masked_fill(shifted == IGNORED, start if padding is None else padding)
    counted = (targets != IGNORED).long()
    mask = counted.flip(1).cummax(1).values.flip(1)
    mask[:, 0] = 1
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask}


def decoded(task: Task, inputs: dict[str, Tensor], target: Sequence[int]) -> Sample:
    """Return a row of an encoder-decoder model; its start token is not predicted where the target begins with it."""
    model: Any = task.model
    if len(target) > 1 and target[0] == model.config.decoder_start_token_id:
        target = target[1:]
    targets = torch.tensor([list(target)])
    written = decoder_inputs(model, targets)
    if not written:
        problem = "has no decoder_start_token_id in its config, so that its decoder cannot be started"
        raise CheckpointError(f"{task.checkpoint.where} {problem}; add it.")
    return Sample({**inputs, **written}, targets)


class SourcesAndTargets:
    """Rows of a source text and the target text that an encoder-decoder model writes for it."""

    def __init__(self, task: Task, table: Table, text: str | None, longest: int) -> None:
        self.task, self.table, self.longest = task, table, longest
        self.source, self.target = source_and_target(table, text)
        columns = f"sources in {self.source!r}, targets in {self.target!r}"
        warn(EpimerWarning(f"{table.name}: {columns}; the loss is that of the targets."))

    def sample(self, i: int) -> Sample:
        source, target = (self.table.text(i, column) for column in (self.source, self.target))
        options = {"truncation": True, "max_length": self.longest}
        ids = self.task.tokenizer(source, **options)["input_ids"]
        targets = self.task.tokenizer(text_target=target, **options)["input_ids"]
        for tokens in (ids, targets):
            self.task.check_tokens(self.table, i, tokens)
        tokens = torch.tensor([ids])
        return decoded(self.task, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, targets)


def source_and_target(table: Table, text: str | None) -> tuple[str, str]:
    """Return the columns of sources and targets; refuse what can be read in several ways."""
    if text is not None:
        names = [name.strip() for name in text.split(",")]
        if len(names) != 2:
            raise DataError(f"{table.name}: --text {text} must name two columns, the source's and the target's.")
        source, target = (str(table.column(name, (), "text")) for name in names)
        return source, target
    pairs = [(a, b) for a in SOURCES for b in TARGETS if a in table.columns and b in table.columns]
    if len(pairs) > 1:
        ways = " or ".join(f"--text {a},{b}" for a, b in pairs[:4])
        problem = f"{table.name} can be read in {len(pairs)} ways: it has {listed(table.columns, 12)}"
        raise DataError(f"{problem}; choose with {ways}, or join what belongs together in one column.")
    if not pairs:
        problem = f"{table.name} has no columns for a source and its target; it has {listed(table.columns, 12)}"
        raise DataError(f"{problem}: name them with --text source,target.")
    return pairs[0]


class Speech:
    """Rows of a recording and its transcript."""

    def __init__(self, task: Task, table: Table, text: str | None, audio: str | None, longest: int) -> None:
        self.task, self.table, self.longest = task, table, longest
        found = table.column(audio, RECORDINGS, "recording"), table.column(text, TRANSCRIPTS, "transcript")
        for column, usual, option in zip(found, (RECORDINGS, TRANSCRIPTS), ("audio", "text"), strict=True):
            if column is None:
                missing, columns = " or ".join(map(repr, usual)), listed(table.columns, 12)
                raise DataError(f"{table.name} has no column {missing}; it has {columns}: name it with --{option}.")
        self.audio, self.text = map(str, found)
        self.features = task.reader.features
        columns = f"recordings in {self.audio!r}, transcripts in {self.text!r}"
        warn(EpimerWarning(f"{table.name}: {columns}; the loss is that of the transcripts."))

    def sample(self, i: int) -> Sample:
        recording, where = read_recording(self.table, i, self.audio), self.table.where(i)
        rate, most = self.features.sampling_rate, getattr(self.features, "n_samples", None)
        if recording.rate != rate:
            remedy = f"convert it (ffmpeg -i FILE -ar {rate} FILE.wav)"
            raise DataError(f"{where} is recorded at {recording.rate} Hz, but the model hears {rate} Hz; {remedy}.")
        if most is not None and len(recording.samples) > most:
            seconds = f"{len(recording.samples) / rate:.1f} s, but the model hears {most / rate:g} s"
            raise DataError(f"{where} has a recording of {seconds}; cut it into pieces, or leave the row out.")
        to_length = inspect.signature(type(self.features).__call__).parameters.get("padding")
        padding = {} if to_length is not None and to_length.default == "max_length" else {"padding": True}
        try:
            found = self.features(recording.samples, sampling_rate=rate, return_tensors="pt", **padding)
        except ValueError as error:
            raise DataError(f"{where}: the feature extractor failed: {short(str(error))}") from error
        ids = self.task.tokenizer(self.table.text(i, self.text), truncation=True, max_length=self.longest)["input_ids"]
        self.task.check_tokens(self.table, i, ids)
        dtype = next(self.task.model.parameters()).dtype
        inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.items()}
        if find_ctc_loss(self.task.model) is not None:
            return Sample(inputs, torch.tensor([ids]))
        return decoded(self.task, inputs, ids)
