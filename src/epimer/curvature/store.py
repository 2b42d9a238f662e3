"""Curvature on disk: a folder with `curvature.json` (what was measured) and `curvature.safetensors` (the numbers).

A tensor's curvature lies under its name and a letter: `.F` (diagonal), `.A` and `.G` (kronecker), `.g` and `.x`
(samples). It is read one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from epimer.checkpoints.folder import inside, read_json
from epimer.checkpoints.safetensors import SafetensorsFile
from epimer.checkpoints.writer import as_json, explained, save_tensors
from epimer.errors import CheckpointError, CurvatureError
from epimer.geometry.metric import Diagonal, Kronecker, Metric, Samples

FORMAT = 1
PARTS = {"diagonal": ("F",), "kronecker": ("A", "G"), "samples": ("g", "x")}
_KINDS: dict[str, type[Diagonal] | type[Kronecker] | type[Samples]] = {
    "diagonal": Diagonal,
    "kronecker": Kronecker,
    "samples": Samples,
}


class StoredCurvature(Mapping[str, Metric]):
    """Curvature of one model, read from its folder when it is asked for."""

    def __init__(self, folder: Path, where: str = "") -> None:
        self.where = where or str(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{self.where} is not a curvature folder: it does not exist or is not a folder.")
        about = read_json(inside(folder, "curvature.json"), f"{self.where}/curvature.json")
        kind = about.get("kind")
        if about.get("format") != FORMAT or kind not in PARTS:
            raise CurvatureError(
                f"{self.where} holds {kind!r} curvature in format {about.get('format')!r}; expected format {FORMAT} "
                f"and one of {', '.join(PARTS)}: measure it again, or update epimer."
            )
        self.kind, self.about = str(kind), about
        self.file = SafetensorsFile(inside(folder, "curvature.safetensors"), f"{self.where}/curvature.safetensors")
        self._names = dict.fromkeys(
            name for key in self.file.headers for name, _, part in [key.rpartition(".")] if part in PARTS[self.kind]
        )

    def __getitem__(self, name: str) -> Metric:
        if name not in self._names:
            raise KeyError(name)
        keys = {part: f"{name}.{part}" for part in PARTS[self.kind]}
        if self.kind == "samples" and any(key not in self.file.headers for key in keys.values()):
            raise CurvatureError(f"{self.where} has only one of g and x for {name!r}; measure it again.")
        return _KINDS[self.kind](**{p: self.file.read(key) for p, key in keys.items() if key in self.file.headers})

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def size(self, name: str) -> int:
        """Return the bytes one tensor's curvature takes."""
        keys = [f"{name}.{part}" for part in PARTS[self.kind]]
        return sum(self.file.size(key) for key in keys if key in self.file.headers)


def save_curvature(curvature: Mapping[str, Metric], folder: Path, *, fingerprint: str | None = None) -> None:
    """Write curvature of one kind into a new folder."""
    kinds = {metric.kind for metric in curvature.values()}
    if len(kinds) != 1 or not kinds <= PARTS.keys():
        raise CurvatureError(f"a curvature folder holds one kind of {', '.join(PARTS)}; got {sorted(kinds)}.")
    (kind,) = kinds
    tensors = {
        f"{name}.{part}": value.detach().cpu()
        for name, metric in curvature.items()
        for part in PARTS[kind]
        if isinstance(value := getattr(metric, part), torch.Tensor)
    }
    with explained(folder, "written"):
        folder.mkdir(parents=True)
        save_tensors(folder / "curvature.safetensors", tensors)
        (folder / "curvature.json").write_bytes(as_json({"format": FORMAT, "kind": kind, "model": fingerprint}))
