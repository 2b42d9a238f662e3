"""Factors in the folders of kronfluence and bergson: the same as measured here, and what is refused.

The folders are written here as these libraries write them; in `tests/conformance/test_kronfluence_and_bergson.py` they
write their own.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import epimer
from epimer.errors import CheckpointError, CurvatureError

Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D  # stores its weight in x out
N = 7


class Net(nn.Module):
    """Three kinds of layers on N pictures of 16 places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix, self.head = nn.Conv2d(2, 3, 3, padding=1), Conv1D(3, 3), nn.Linear(3, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = self.conv(x).tanh().flatten(2).movedim(1, 2).contiguous()
        return self.head(self.mix(places).tanh()).sum(1)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(N, 2, 4, 4, generator=generator, dtype=torch.float64)
    return pictures, torch.randint(0, 4, (N,), generator=generator)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def sums(net: Net) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, int]]:
    """Return the sums over places of xxᵀ, with a 1 for the bias, and of ggᵀ, by hooks and autograd."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in net.named_children():
        layer.register_forward_hook(lambda _, args, out, name=name: seen.update({name: (args[0], out)}))
    pictures, labels = batch()
    total = loss(net(pictures), labels).sum()
    gradients = torch.autograd.grad(total, [out for _, out in seen.values()])
    A, G, counts = {}, {}, {}
    for (name, (x, _)), g in zip(seen.items(), gradients, strict=True):
        if name == "conv":
            x, g = nn.functional.unfold(x, 3, padding=1).movedim(1, 2), g.flatten(2).movedim(1, 2)
        x, g = x.detach().flatten(0, 1), g.flatten(0, 1)
        if getattr(net, name).bias is not None:
            x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
        A[name], G[name], counts[name] = x.T @ x, g.T @ g, len(x)
    return A, G, counts


def write_kronfluence(folder: Path, net: Net, prefix: str = "") -> Path:
    folder.mkdir()
    A, G, counts = sums(net)
    numbers = {prefix + name: torch.tensor([count]) for name, count in counts.items()}
    for side, factors in (("activation", A), ("gradient", G)):
        named = {prefix + name: factor for name, factor in factors.items()}
        save_file(named, folder / f"{side}_covariance.safetensors", metadata={"strategy": "kfac"})
        save_file(numbers, folder / f"num_{side}_covariance_processed.safetensors")
    about = {"type": "TensorDataset", "dataset_size": 50, "indices": None}
    (folder / "covariance_dataset_metadata.json").write_text(json.dumps(about))
    (folder / "factor_arguments.json").write_text(json.dumps({"strategy": "kfac", "covariance_max_examples": N}))
    return folder


def write_bergson(folder: Path, net: Net, method: str = "kfac") -> Path:
    """Write rows in two shards, the first of which has the remainder."""
    A, G, counts = sums(net)
    for side, factors in (("activation", A), ("gradient", G)):
        (folder / f"{side}_sharded").mkdir(parents=True)
        for rank in (0, 1):
            rows = {name: torch.tensor_split(M.flip(0), 2)[1 - rank].flip(0).clone() for name, M in factors.items()}
            save_file(rows, folder / f"{side}_sharded" / f"shard_{rank}.safetensors")
    torch.save(torch.tensor(counts["conv"]), folder / "total_processed.pt")
    step = {"hessian": {"hessian_cfg": {"method": method, "hessian_dtype": "fp64"}, "index_cfg": {"method": "other"}}}
    (folder / "config.yaml").write_text(json.dumps({"steps": [step]}))
    return folder


def assert_as_measured(found: epimer.Curvature, net: Net, scale: float = 1.0) -> None:
    for layer in net.children():
        layer._forward_hooks.clear()
    measured = epimer.estimate_curvature(net, [batch()], loss, labels="true", progress=False)
    assert set(found) == set(measured) == {"conv.weight", "mix.weight", "head.weight"}
    for name, metric in measured.items():
        assert found[name].inputs == metric.inputs == (0 if name == "mix.weight" else 1)
        ours, theirs = torch.kron(metric.G, metric.A), torch.kron(found[name].G, found[name].A)
        assert torch.allclose(theirs * scale, ours, rtol=1e-10, atol=1e-14), name


@pytest.mark.parametrize("prefix", ["", "module."])
def test_kronfluence(net, tmp_path, prefix):
    """Samples are the examples it took; names may have the prefix of a wrapped model."""
    found = epimer.Curvature.from_factors(write_kronfluence(tmp_path / "factors_x", net, prefix), net)
    assert (found.kind, found.provenance.samples, found.provenance.tokens) == ("kronecker", N, 16 * N)
    assert found.provenance.source == "factors of kronfluence"
    assert_as_measured(found, net)


@pytest.mark.parametrize("samples", [N, None])
def test_bergson(net, tmp_path, samples):
    """Without the number of samples G is a mean over places: 16 in a picture."""
    found = epimer.Curvature.from_factors(write_bergson(tmp_path / "run", net), net, samples=samples)
    assert found.provenance.samples == samples
    assert_as_measured(found, net, 1.0 if samples else 16.0)


def test_a_saved_folder_serves_a_merge(net, tmp_path):
    found = epimer.Curvature.from_factors(write_kronfluence(tmp_path / "factors_x", net), net)
    found.save(tmp_path / "x.curv")
    base = {name: torch.zeros_like(W) for name, W in net.state_dict().items()}
    loaded = [epimer.Curvature.load(tmp_path / "x.curv")]
    merged = epimer.merge_state_dicts(base, [net.state_dict()], "mats", curvature=loaded, damping=0.0)
    assert torch.allclose(merged["head.weight"], net.head.weight, rtol=1e-6)


def refused(folder: Path, model: nn.Module) -> str:
    with pytest.raises((CheckpointError, CurvatureError)) as error:
        epimer.Curvature.from_factors(folder, model)
    return str(error.value)


def test_folders_that_are_refused(net, tmp_path):
    assert "is no folder" in refused(tmp_path / "gone", net)
    assert "expected activation_covariance.safetensors" in refused(tmp_path, net)
    whole = write_kronfluence(tmp_path / "factors_x", net)
    assert "holds 'factors_x'; give one of these folders" in refused(tmp_path, net)
    (whole / "gradient_covariance.safetensors").rename(whole / "kept")
    assert "gradient_covariance.safetensors" in refused(whole, net)
    (whole / "kept").rename(whole / "gradient_covariance.safetensors")
    assert "are of another model" in refused(whole, nn.Sequential(nn.Linear(3, 4)))
    other = Net()
    other.head = nn.Linear(3, 5)
    assert "'head'; were they measured on this model?" in refused(whole, other)
    bad = torch.eye(3)
    bad[0, 0] = -1
    save_file({"conv": bad, "mix": bad.clone(), "head": torch.eye(4)}, whole / "gradient_covariance.safetensors")
    assert "cannot be used" in refused(whole, net)
    (whole / "activation_covariance.safetensors").rename(
        whole / "activation_covariance_data_partition0_module_partition0.safetensors"
    )
    assert "let kronfluence aggregate them first" in refused(whole, net)


def test_runs_that_are_refused(net, tmp_path):
    assert "bergson's method shampoo" in refused(write_bergson(tmp_path / "s", net, "shampoo"), net)
    run = write_bergson(tmp_path / "run", net)
    (run / "gradient_sharded" / "shard_0.safetensors").unlink()
    assert "shards [1], expected all from 0 on" in refused(run, net)
    (run / "gradient_sharded" / "shard_1.safetensors").rename(run / "gradient_sharded" / "shard_0.safetensors")
    assert "were they measured on this model?" in refused(run, net)
    (run / "total_processed.pt").unlink()
    assert "lacks total_processed.pt" in refused(run, net)


@pytest.mark.parametrize(
    ("file", "tensor", "said"),
    [
        ("activation_covariance", torch.tensor(1.0), "expected two matrices"),
        ("gradient_covariance", torch.eye(4, dtype=torch.int64), "expected two matrices"),
        ("activation_covariance", torch.full((3, 3), float("nan")), "cannot be used"),
        ("num_activation_covariance_processed", torch.tensor([1.5]), "expected a number"),
        ("num_gradient_covariance_processed", torch.tensor([1, 2]), "expected a number"),
        ("num_activation_covariance_processed", torch.tensor([0]), "fit the covariances again"),
        ("num_gradient_covariance_processed", torch.tensor([5]), "differently"),
    ],
)
def test_damaged_folders_are_refused_in_one_line(net, tmp_path, file, tensor, said):
    folder = write_kronfluence(tmp_path / "factors_x", net)
    path = folder / f"{file}.safetensors"
    save_file({**load_file(path), "head": tensor}, path)
    message = refused(folder, net)
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize("total", [torch.tensor([1, 2]), torch.tensor(float("nan")), {"a": 1}, 0])
def test_a_damaged_total_is_refused(net, tmp_path, total):
    run = write_bergson(tmp_path / "run", net)
    torch.save(total, run / "total_processed.pt")
    assert "says that 0 tokens were read" in refused(run, net)


def test_damaged_runs_are_refused(net, tmp_path):
    run = write_bergson(tmp_path / "run", net)
    shard = run / "gradient_sharded" / "shard_1.safetensors"
    whole = load_file(shard)
    for odd in (torch.zeros(()), whole["mix"][:, :1].clone(), whole["mix"][None].clone()):
        save_file({**whole, "mix": odd}, shard)
        assert "has parts of 'mix' of shapes" in refused(run, net)
    save_file(whole, shard)
    for total in (torch.tensor([1, 2]), torch.tensor(float("nan")), torch.tensor(float("inf")), 2**60, "many"):
        torch.save(total, run / "total_processed.pt")
        assert "says that 0 tokens were read" in refused(run, net)
    for text in ("a: !!bool maybe", "a: !!int ''", "[" * 3000):
        (run / "config.yaml").write_text(text)
        assert "config.yaml cannot be read" in refused(run, net)
    torch.save(torch.tensor(7), run / "total_processed.pt")
    levels = [f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]" for a, b in pairwise("abcdefghijklmnop")]
    (run / "config.yaml").write_text("\n".join(["a: &a [1, *a]", *levels]))  # 10^15 places, and itself
    assert len(epimer.Curvature.from_factors(run, net)) == 3


def test_sizes_that_no_float_holds_are_refused(net, tmp_path):
    whole = write_kronfluence(tmp_path / "factors_x", net)
    used = whole / "factor_arguments.json"
    for size, most in ((10**299, None), (5, -(10**299)), (5, -1)):
        (whole / "covariance_dataset_metadata.json").write_text(json.dumps({"dataset_size": size}))
        used.write_text(json.dumps({"covariance_max_examples": most}))
        assert "samples; fit it again" in refused(whole, net)
