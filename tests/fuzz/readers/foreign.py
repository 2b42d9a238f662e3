"""What other libraries measured or recorded: factors of kronfluence and bergson, recordings of sound."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from random import Random

import torch
import yaml
from safetensors.torch import save_file
from torch import nn

import epimer
from epimer.tasks.audio import read_recording
from epimer.tasks.data import open_data
from fuzz.harness import Reader
from fuzz.mutations import damage_content, damage_files
from fuzz.readers.checkpoints import damaged_torch_file
from fuzz.readers.models import damage_numbers
from fuzz.readers.texts import yaml_text

CONFIG = [{"hessian": {"method": "kfac", "hessian_dtype": "float32"}, "runs": [1, 2]}]
SIDES = ("activation", "gradient")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2, bias=False)


def _build_factors(folder: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = {"activation": {"one": 4, "two": 4}, "gradient": {"one": 4, "two": 2}}
    (folder / "kronfluence").mkdir()
    for side in SIDES:
        sums = {}
        for name, size in sizes[side].items():
            x = torch.randn(9, size, generator=draw)
            sums[name] = x.T @ x
        save_file(sums, folder / "kronfluence" / f"{side}_covariance.safetensors")
        counts = {name: torch.tensor([9]) for name in sums}
        save_file(counts, folder / "kronfluence" / f"num_{side}_covariance_processed.safetensors")
        (folder / "bergson" / f"{side}_sharded").mkdir(parents=True)
        for i in (0, 1):
            part = {name: W.chunk(2)[i].contiguous() for name, W in sums.items()}
            save_file(part, folder / "bergson" / f"{side}_sharded" / f"shard_{i}.safetensors")
    (folder / "kronfluence" / "covariance_dataset_metadata.json").write_text(json.dumps({"dataset_size": 3}))
    (folder / "kronfluence" / "factor_arguments.json").write_text(json.dumps({"covariance_max_examples": None}))
    torch.save(torch.tensor(9), folder / "bergson" / "total_processed.pt")
    (folder / "bergson" / "config.yaml").write_text(yaml.safe_dump(CONFIG[0]))


def _damage_factors(rng: Random, folder: Path) -> None:
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    if rng.random() < 0.05:
        damage_files(rng, path)
    elif path.suffix == ".yaml":
        path.write_bytes(yaml_text(rng, CONFIG))
    elif path.suffix == ".pt":
        path.write_bytes(damaged_torch_file(rng, path.read_bytes()))
    elif path.suffix == ".safetensors" and rng.random() < 0.5:
        damage_numbers(rng, path)
    else:
        damage_content(rng, path)


def _read_factors(folder: Path) -> None:
    for name in ("kronfluence", "bergson"):
        curvature = epimer.Curvature.from_factors(folder / name, Net(), samples=None if name == "kronfluence" else 3)
        for key in curvature:
            metric = curvature[key]
            assert bool(torch.isfinite(metric.A).all()), f"A of {key!r} is not finite"
            assert bool(torch.isfinite(metric.G).all()), f"G of {key!r} is not finite"


# recordings


def _build_recordings(folder: Path) -> None:
    for i, (width, channels) in enumerate(((1, 1), (2, 2), (3, 1), (4, 1))):
        made = io.BytesIO()
        with wave.open(made, "wb") as file:
            file.setparams((channels, width, 8000, 0, "NONE", ""))
            file.writeframes(bytes(range(48)) * channels)
        (folder / f"{i}.wav").write_bytes(made.getvalue())
    rows = [{"audio": f"{i}.wav", "label": i % 2} for i in range(4)]
    rows.append({"audio": {"array": [0.0, 0.5], "sampling_rate": 8000}, "label": 1})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _damage_recordings(rng: Random, folder: Path) -> None:
    damage_content(rng, rng.choice(sorted(folder.iterdir())))


def _read_recordings(folder: Path) -> None:
    table = open_data(str(folder / "rows.jsonl"))
    for i in range(len(table)):
        recording = read_recording(table, i, "audio")
        assert len(recording.samples) > 0
        assert recording.rate > 0, f"a rate of {recording.rate}"
        assert abs(recording.samples).max() < 1e38


READERS = [
    Reader("imported-factors", _build_factors, _damage_factors, _read_factors, share=3),
    Reader("recordings", _build_recordings, _damage_recordings, _read_recordings, share=2),
]
