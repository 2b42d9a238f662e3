"""Factors that kronfluence and bergson measured themselves, read and compared with ours in float64 to 1e-10.

kronfluence is there under `make conformance`; bergson, which imports much else, is skipped where it is not installed
(2.5.1 was compared). bergson counts the places that have a loss, so all but a text's last token; ours are given texts
without it.
"""

import warnings

import pytest
import torch
from torch import nn

import epimer


def assert_same(found: epimer.Curvature, measured: epimer.Curvature, names: dict[str, str]) -> None:
    for name, own in names.items():
        for side in ("A", "G"):
            ours, theirs = getattr(measured[own], side), getattr(found[name], side)
            assert torch.allclose(theirs, ours, rtol=1e-10, atol=1e-13), (name, side)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.a, self.b = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(48, 6), nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(self.conv(x).tanh().flatten(1)).tanh())


def test_kronfluence(tmp_path):
    pytest.importorskip("kronfluence")
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments
    from kronfluence.task import Task

    class Classification(Task):
        def compute_train_loss(self, batch, model, sample=False):
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

        def compute_measurement(self, batch, model):
            return self.compute_train_loss(batch, model)

    torch.manual_seed(0)
    net = Net().double()
    x, y = torch.randn(11, 2, 4, 4, dtype=torch.float64), torch.randint(0, 4, (11,))
    measured = epimer.estimate_curvature(
        net, [(x, y)], lambda out, y: nn.functional.cross_entropy(out, y, reduction="none"), labels="true"
    )
    shapes = {name: W.clone() for name, W in net.state_dict().items()}
    wide = {f"{side}_covariance_dtype": torch.float64 for side in ("activation", "gradient")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = prepare_model(net, Classification())
        analyzer = Analyzer("toy", model, Classification(), cpu=True, output_dir=str(tmp_path), disable_tqdm=True)
        analyzer.fit_covariance_matrices(
            "one",
            torch.utils.data.TensorDataset(x, y),
            per_device_batch_size=4,
            factor_args=FactorArguments(strategy="kfac", use_empirical_fisher=True, **wide),
        )
    plain = Net().double()
    plain.load_state_dict(shapes)
    found = epimer.Curvature.from_factors(tmp_path / "toy" / "factors_one", plain)
    assert found.provenance.samples == len(x)
    assert_same(found, measured, {name: name for name in ("conv.weight", "a.weight", "b.weight")})


def test_bergson(tmp_path):
    pytest.importorskip("bergson")
    transformers, datasets = pytest.importorskip("transformers"), pytest.importorskip("datasets")
    from bergson.config.config import HessianConfig, IndexConfig
    from bergson.data import allocate_batches
    from bergson.hessians.hessian_approximations import fit_factored_hessians

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=15, max_position_embeddings=16)
    model = transformers.LlamaForCausalLM(config).double().eval()
    texts = [torch.randint(0, 15, (length,)).tolist() for length in (5, 7, 4, 6)]
    data = datasets.Dataset.from_dict({"input_ids": texts, "labels": texts, "length": list(map(len, texts))})
    where = IndexConfig(run_path=str(tmp_path / "run"), token_batch_size=64, projection_dim=0)
    where.partial_run_path.mkdir(parents=True)
    fit_factored_hessians(
        model,
        data,
        where,
        HessianConfig(method="kfac", hessian_dtype="fp64", use_dataset_labels=True),
        target_modules=None,
        attention_cfgs={},
        batches=allocate_batches(data["length"][:], 64),
        path=str(where.partial_run_path),
        do_eigendecomposition=True,
    )
    found = epimer.Curvature.from_factors(where.partial_run_path, model, samples=len(texts))
    batches = [({"input_ids": torch.tensor([text[:-1]])}, torch.tensor([text[1:]])) for text in texts]
    measured = epimer.estimate_curvature(
        model,
        batches,
        lambda out, y: nn.functional.cross_entropy(out.logits.movedim(2, 1), y, reduction="none").sum(1),
        labels="true",
    )
    assert len(found) == 14
    assert_same(found, measured, {name: name for name in found})
