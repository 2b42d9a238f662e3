"""A task's images, decoded when they are needed and prepared by the model's image processor; names of its labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epimer.errors import DataError, short
from epimer.json_values import json_value
from epimer.tasks.tables import Table
from epimer.tasks.task import IMAGES, LABELS
from epimer.yaml_values import yaml_value

VALIDATION = 500  # samples of the training split that are set aside, at most a tenth of it
CACHE_BYTES = 1 << 27  # of pixels up to which a split is kept in memory once decoded


@dataclass(frozen=True)
class ImageSplit:
    """Rows of a table of images; see `epimer.evaluation.suite.Data`."""

    table: Table
    rows: Sequence[int]
    processor: Any
    numbers: dict[str, int]
    """class name -> its number, where labels are names"""
    classes: int
    device: torch.device
    cache: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield (pixels, labels) on the device, of all rows or of those in `order`."""
        rows = self.rows if order is None else [self.rows[i] for i in order.tolist()]
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            labels = torch.tensor([self._label(i) for i in batch])
            yield {"pixel_values": self._pixels(batch)}, labels.to(self.device)

    def _pixels(self, rows: Sequence[int]) -> Tensor:
        """Return the pixels of rows: resized and cropped as bytes, which may be cached, then scaled for the model."""
        missing = [i for i in rows if i not in self.cache]
        decoded = dict(zip(missing, self._bytes(missing), strict=True))
        if decoded and len(self) * next(iter(decoded.values())).numel() <= CACHE_BYTES:
            self.cache.update(decoded)
        stacked = torch.stack([decoded[i] if i in decoded else self.cache[i] for i in rows])
        pixels = stacked.to(self.device).float()
        if self.processor.do_rescale:
            pixels = pixels * self.processor.rescale_factor
        if self.processor.do_normalize:
            moments = torch.tensor([self.processor.image_mean, self.processor.image_std], device=self.device)
            mean, std = moments[:, :, None, None]
            pixels = (pixels - mean) / std
        return pixels

    def _bytes(self, rows: Sequence[int]) -> list[Tensor]:
        if not rows:
            return []
        column = self.table.column(None, IMAGES, "image")
        if column is None:
            raise DataError(f"{self.table.name} has no column 'image' of images; it has {self.table.columns}.")
        images = [self.table.image(i, column) for i in rows]
        try:
            prepared = self.processor(images=images, do_rescale=False, do_normalize=False, return_tensors="pt")
        except ValueError as error:
            raise DataError(f"{self.table.where(rows[0])}: the image processor failed: {short(str(error))}") from error
        return list(prepared["pixel_values"])

    def _label(self, i: int) -> int:
        column = self.table.column(None, LABELS, "label")
        value = None if column is None else self.table.row(i).get(column)
        number = self.numbers.get(value) if isinstance(value, str) else value
        if not isinstance(number, int) or not 0 <= number < self.classes:
            raise DataError(
                f"{self.table.name}, {self.table.where(i)}, has label {short(value)}; expected 0 to {self.classes - 1} "
                "or the name of a class."
            )
        return number


def split_rows(train: int, test: int, *, limit: int | None, seed: int) -> dict[str, list[int]]:
    """Return the rows of train and val, both of the training split, and of test; no row is in two of them.

    val is the end of the training split, shuffled by the seed; `limit` takes so many of each at random. Rows are in
    ascending order, so that files are read from front to back.
    """
    if train < 2:
        raise DataError(f"{train} sample cannot be trained and validated on; expected at least 2 in the train split.")
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(train, generator=generator).tolist()
    held = max(1, min(VALIDATION, train // 10))
    tested = torch.randperm(test, generator=generator).tolist()
    rows = {"train": shuffled[:-held], "val": shuffled[-held:], "test": tested}
    return {split: sorted(indices[:limit]) for split, indices in rows.items()}


def label_names(table: Table) -> list[str] | None:
    """Return the names of a table's labels: its class folders, or those in the schema of the hub's parquet files."""
    if table.classes is not None:
        return list(table.classes)
    file = getattr(getattr(table, "parts", [table])[0], "file", None)
    metadata = (file.schema_arrow.metadata if file is not None else None) or {}
    try:
        features = json_value(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        return _texts(next(features[name]["names"] for name in LABELS if name in features))
    except (ValueError, KeyError, TypeError, StopIteration):
        return None


def card_names(readme: Path) -> list[str] | None:
    """Return the label names in the header of a dataset card: dataset_info.features[label].dtype.class_label.names."""
    try:
        info = yaml_value(readme.read_text(encoding="utf-8").split("---\n")[1])["dataset_info"]
        features = (info[0] if isinstance(info, list) else info)["features"]
        names = next(f["dtype"]["class_label"]["names"] for f in features if f["name"] in LABELS)
        return _texts([names[key] for key in sorted(names, key=int)] if isinstance(names, dict) else names)
    except (OSError, ValueError, LookupError, AttributeError, TypeError, StopIteration):
        return None


def _texts(names: Any) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(name, str | int) for name in names):
        raise ValueError("names of labels are texts")
    return [str(name) for name in names]
