"""The unlabelled inputs that curvature was measured on, kept with it so that merges can be judged without labels.

A curvature folder holds them in `inputs.safetensors`, with the weights of a head outside the model in
`head.safetensors`. docs/curvature.md specifies the format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epimer.checkpoints.folder import inside
from epimer.checkpoints.safetensors import SafetensorsFile
from epimer.checkpoints.tensor_parts import CHECKSUMS, check_files
from epimer.checkpoints.writer import save_tensors
from epimer.errors import CheckpointError, CurvatureError, listed, short
from epimer.geometry.linalg import nonfinite
from epimer.tasks.labels import IGNORED
from epimer.tasks.loading import CAUSAL_LM, CLASSIFIERS, IMAGE, POOLINGS, SEQ2SEQ, read_head
from epimer.tasks.task import InputsAndTargets

KEPT = 256  # samples
INPUTS, HEAD = "inputs.safetensors", "head.safetensors"
TASKS = (CAUSAL_LM, *CLASSIFIERS, SEQ2SEQ)
"""the tasks whose inputs are kept"""
IDS, MASK, PIXELS, COUNTED = "input_ids", "attention_mask", "pixel_values", "counted"
WRITTEN_IDS, WRITTEN_MASK = "decoder_input_ids", "decoder_attention_mask"
WRITTEN = (WRITTEN_IDS, WRITTEN_MASK, COUNTED)
"""what has a place for every token that an encoder-decoder writes, not for those that it reads"""
DTYPES = {
    IDS: torch.int32,
    MASK: torch.uint8,
    "token_type_ids": torch.uint8,
    WRITTEN_IDS: torch.int32,
    WRITTEN_MASK: torch.uint8,
    PIXELS: torch.float16,
}
"""input of a network -> dtype on disk"""
NEEDED = {CAUSAL_LM: {IDS, MASK, COUNTED}, IMAGE: {PIXELS}, SEQ2SEQ: {IDS, MASK, *WRITTEN}}
"""task -> what is stored, for others tokens and their mask"""
REMEDY = "measure it again with `epimer curvature`"


@dataclass(frozen=True)
class KeptInputs:
    """Unlabelled samples of one task, as its network takes them."""

    task: str
    """causal-lm, text-classification, image-classification or seq2seq-lm"""
    pooling: str
    """how features for `head` were pooled: auto, pooler, cls or mean"""
    tensors: Mapping[str, Tensor]
    """input of the network -> [N, …]; tokens [N, longest], padded on the right"""
    counted: Tensor | None = None
    """[N, longest], True where the prediction of a token counts; None for classifiers"""
    head: Mapping[str, Tensor] = field(default_factory=dict)
    """`weight` [classes, features] and `bias` [classes] of a head outside the model; empty where there is none"""

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the samples and the head into a folder; return what its JSON header says of them."""
        counted = {} if self.counted is None else {COUNTED: self.counted}
        checksums = save_tensors(folder / INPUTS, {**self.tensors, **counted})
        if self.head:
            checksums |= save_tensors(folder / HEAD, dict(self.head))
        return {"task": self.task, "pooling": self.pooling, "samples": len(self), CHECKSUMS: checksums}


class InputKeeper:
    """Keeps the first inputs of the batches that pass through it, in the dtypes that are stored."""

    def __init__(self, task: str, pooling: str, padding: int, head: Mapping[str, Tensor], most: int = KEPT) -> None:
        self.task, self.pooling, self.padding, self.head, self.most = task, pooling, padding, head, most
        self._parts: list[dict[str, Tensor]] = []
        self._count = 0

    def watch(self, batches: Iterable[InputsAndTargets]) -> Iterator[InputsAndTargets]:
        """Yield the batches as they are."""
        for inputs, targets in batches:
            if (room := self.most - self._count) > 0:
                self._add({name: value[:room] for name, value in inputs.items()}, targets)
            yield inputs, targets

    def _add(self, inputs: Mapping[str, Tensor], targets: Tensor | None) -> None:
        part = {name: _compact(name, value) for name, value in inputs.items()}
        if self.task == IMAGE:  # images of another size than the first cannot be stored with them
            fits = not self._parts or part[PIXELS].shape[1:] == self._parts[0][PIXELS].shape[1:]
        else:  # without a mask padding could not be told from tokens
            fits = MASK in part
        count = len(next(iter(part.values())))
        if self.task in (CAUSAL_LM, SEQ2SEQ):
            assert targets is not None
            part[COUNTED] = (targets[:count] != IGNORED).cpu()
        if fits:
            self._parts.append(part)
            self._count += count

    @property
    def kept(self) -> KeptInputs | None:
        """What was kept, padded to the longest text; None where nothing could be."""
        if not self._parts:
            return None
        tensors = {name: self._joined(name) for name in self._parts[0]}
        counted = tensors.pop(COUNTED, None)
        return KeptInputs(self.task, self.pooling, tensors, counted, self.head)

    def _joined(self, name: str) -> Tensor:
        parts = [part[name] for part in self._parts]
        if name == PIXELS:
            return torch.cat(parts)
        longest, value = max(part.shape[1] for part in parts), self.padding if name in (IDS, WRITTEN_IDS) else 0
        joined = parts[0].new_full((sum(map(len, parts)), longest), value)
        start = 0
        for part in parts:
            joined[start : start + len(part), : part.shape[1]] = part
            start += len(part)
        return joined


def _compact(name: str, value: Tensor) -> Tensor:
    """Return an input in the dtype that is stored; pixels beyond float16 are clipped to its range."""
    value = value.detach().cpu()
    if name == PIXELS:
        limit = torch.finfo(torch.float16).max
        value = value.float().clamp(-limit, limit)
    return value.to(DTYPES[name])


def read_inputs(folder: Path, header: Any, where: str) -> KeptInputs | None:
    """Read and check the inputs that a curvature folder keeps, as its JSON header describes them; None without any."""
    if header is None:
        return None
    values = header if isinstance(header, dict) else {}
    task, pooling, samples = (values.get(key) for key in ("task", "pooling", "samples"))
    if task not in TASKS or pooling not in POOLINGS or type(samples) is not int or samples < 1:
        raise CurvatureError(f"{where}: 'inputs' of its header cannot be {short(header)}; {REMEDY}.")
    try:
        file = SafetensorsFile(inside(folder, INPUTS), f"{where}/{INPUTS}")
        _check_headers(file, task, samples)
        tensors = {name: file.read(name) for name in file.headers}
        files, head = [file], dict[str, Tensor]()
        if (folder / HEAD).exists():
            head = dict(read_head(inside(folder, HEAD), torch.float32).state_dict())
            files.append(SafetensorsFile(inside(folder, HEAD), f"{where}/{HEAD}"))
    except CheckpointError as error:
        raise CurvatureError(f"{where}: its kept inputs are damaged: {error} Or {REMEDY}.") from error
    if any(nonfinite(value) for value in head.values()):
        raise CurvatureError(f"{where}/{HEAD} holds NaN or Inf; {REMEDY}.")
    if problem := _problem(tensors):
        raise CurvatureError(f"{where}/{INPUTS}: {problem}; {REMEDY}.")
    check_files(files, values.get(CHECKSUMS), REMEDY)
    counted = tensors.pop(COUNTED, None)
    return KeptInputs(task, pooling, tensors, counted, head)


def _check_headers(file: SafetensorsFile, task: str, samples: int) -> None:
    """Refuse tensors of other names, dtypes or shapes than a task's inputs have."""
    needed = NEEDED.get(task, {IDS, MASK})
    allowed = needed if task == IMAGE else needed | {"token_type_ids"}
    if not needed <= file.headers.keys() <= allowed or file.ties:
        expected = ", ".join(sorted(needed))
        raise CurvatureError(f"{file.where} holds {listed(file.headers)}, expected {expected}; {REMEDY}.")
    sides = 4 if task == IMAGE else 2
    read, written = PIXELS if task == IMAGE else IDS, WRITTEN_IDS if task == SEQ2SEQ else IDS
    for name, W in file.headers.items():
        dtype, first = DTYPES.get(name, torch.bool), file.headers[written if name in WRITTEN else read].shape
        if W.dtype != dtype or W.shape != first or len(first) != sides or first[0] != samples or not W.numel():
            raise CurvatureError(
                f"{file.where}: {name!r} is {W.dtype} of shape {tuple(W.shape)}, expected {dtype} with {sides} "
                f"dimensions, the first {samples}, all inputs alike; {REMEDY}."
            )


def _problem(tensors: Mapping[str, Tensor]) -> str | None:
    """Say which values cannot be those of inputs, if any."""
    if PIXELS in tensors:
        return "pixel_values hold NaN or Inf" if nonfinite(tensors[PIXELS]) else None
    for name in (IDS, WRITTEN_IDS):
        if name in tensors and int(tensors[name].min()) < 0:
            return f"{name} hold {int(tensors[name].min())}, expected numbers of tokens"
    for name in (MASK, WRITTEN_MASK):
        mask = tensors.get(name, tensors[MASK])
        if int(mask.max()) > 1 or not bool(mask[:, 0].all()) or bool((mask[:, 1:] > mask[:, :-1]).any()):
            return f"{name} must be 1 at the tokens of each text and 0 after them"
    counted = tensors.get(COUNTED)
    if counted is not None and not (bool((counted <= mask.bool()).all()) and bool(counted.any(1).all())):
        return "counted must be true at one token of each text at least, and at no padding"
    return None
