"""Merged parts of a pipeline load in diffusers, and do what weights merged by hand do.

Runs in an environment of its own: `make conformance`.
"""

from pathlib import Path

import pytest
import torch

import epimer

diffusers = pytest.importorskip("diffusers")

SHARD = "20KB"  # several shards


def unet() -> torch.nn.Module:
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    sizes = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    sizes |= {"cross_attention_dim": 8, "attention_head_dim": 4}
    return diffusers.UNet2DConditionModel(down_block_types=down, up_block_types=up, **sizes)


def transformer() -> torch.nn.Module:
    sizes = {"sample_size": 8, "num_layers": 1, "attention_head_dim": 4, "num_attention_heads": 2}
    return diffusers.DiTTransformer2DModel(
        **sizes, in_channels=4, out_channels=4, num_embeds_ada_norm=10, norm_num_groups=4
    )


def run(model: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    image = torch.randn(1, 4, 8, 8, generator=generator)
    with torch.no_grad():
        if isinstance(model, diffusers.UNet2DConditionModel):
            return model(image, 3, encoder_hidden_states=torch.randn(1, 5, 8, generator=generator)).sample
        return model(image, timestep=torch.tensor([3]), class_labels=torch.tensor([1])).sample


@pytest.mark.parametrize("shard", [None, SHARD])
@pytest.mark.parametrize(("build", "part"), [(unet, "unet"), (transformer, "transformer")])
def test_a_merged_part_loads_and_runs(build, part, shard, tmp_path):
    states = []
    for t in range(3):
        torch.manual_seed(0)
        model = build().eval()
        noise = torch.Generator().manual_seed(t)
        with torch.no_grad():
            for W in model.parameters():
                W += 0.05 * t * torch.randn(W.shape, generator=noise)
        model.save_pretrained(tmp_path / f"pipeline{t}" / part, **({} if shard is None else {"max_shard_size": shard}))
        states.append({name: W.double() for name, W in model.state_dict().items()})
    paths = [tmp_path / f"pipeline{t}" / part for t in range(3)]
    entries = [{"model": str(path), "parameters": {"weight": 0.5}} for path in paths[1:]]
    recipe = {"merge_method": "task_arithmetic", "base_model": str(paths[0]), "models": entries}
    out = Path(tmp_path / "out")
    epimer.merge(recipe, out, progress=False)
    loaded, info = type(model).from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    expected = {name: (W + 0.5 * sum(one[name] - W for one in states[1:])).float() for name, W in states[0].items()}
    for name, W in loaded.state_dict().items():
        assert torch.allclose(W, expected[name], rtol=1e-6, atol=1e-6), name
    model.load_state_dict(expected)
    assert torch.allclose(run(loaded.eval()), run(model), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(run(loaded), run(type(model).from_pretrained(paths[0]).eval()), atol=1e-2)
