"""A new checkpoint format costs one class and one entry in the table of formats: here `.npz`, added at run time."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

import epimer
from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.checkpoint import Checkpoint, Rows, header
from epimer.checkpoints.folder import FORMATS
from epimer.errors import CheckpointError
from models import make_base, make_models


class NpzFile(Checkpoint):
    """One `.npz` file of numpy arrays."""

    def __init__(self, path: Path, where: str = "") -> None:
        self.path, self.files, self.where, self.name = path, [path], where or str(path), path.stem
        with np.load(path) as arrays:
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self.headers = {name: header(W.shape, W.dtype) for name, W in tensors.items()}

    def read(self, name: str, rows: Rows = None) -> Tensor:
        with np.load(self.path) as arrays:
            W = torch.from_numpy(arrays[name])
        return W if rows is None else W[slice(*rows)].clone()


@pytest.fixture(autouse=True)
def npz(monkeypatch):
    monkeypatch.setitem(FORMATS, ".npz", NpzFile)


def save(folder: Path, state: dict[str, Tensor], suffix: str) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "test"}\n')
    if suffix == ".npz":
        np.savez(folder / "model.npz", **{name: W.numpy() for name, W in state.items()})
    else:
        safetensors.torch.save_file(state, folder / "model.safetensors")
    return str(folder)


@pytest.fixture
def folders(tmp_path):
    """Return for each format the folders of a base and two models."""
    base = make_base()
    states = [base, *make_models(base, 2)]
    suffixes = (".npz", ".safetensors")
    return {
        suffix: [save(tmp_path / suffix[1:] / str(i), W, suffix) for i, W in enumerate(states)] for suffix in suffixes
    }


@pytest.mark.parametrize("method", ["average", "ties", "epimer_free"])
def test_folders_in_a_new_format_merge_bit_for_bit_like_safetensors(folders, tmp_path, method):
    merged = {}
    for suffix, (base, *models) in folders.items():
        out = tmp_path / f"out{suffix}"
        recipe = {"merge_method": method, "base_model": base, "models": [{"model": model} for model in models]}
        epimer.merge(recipe, out)
        merged[suffix] = safetensors.torch.load_file(out / "model.safetensors")
    ours, expected = merged.values()
    assert ours.keys() == expected.keys() == make_base().keys()
    for name, W in expected.items():
        assert (ours[name].dtype, ours[name].shape) == (W.dtype, W.shape)
        assert ours[name].numpy().tobytes() == W.numpy().tobytes(), name


def test_a_file_in_a_new_format_is_the_same_checkpoint(folders):
    npz, stored = (open_checkpoint(places[1]) for places in folders.values())
    assert npz.fingerprints == stored.fingerprints
    assert npz.fingerprint == stored.fingerprint == open_checkpoint(f"{folders['.npz'][1]}/model.npz").fingerprint


def test_without_its_entry_a_format_is_refused_by_name(folders, monkeypatch):
    monkeypatch.delitem(FORMATS, ".npz")
    with pytest.raises(CheckpointError, match=r"expected \.safetensors, \.bin, \.pt, \.pth or a model folder"):
        open_checkpoint(f"{folders['.npz'][0]}/model.npz")
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(folders[".npz"][0])
