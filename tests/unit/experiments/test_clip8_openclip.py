"""Vision towers of open_clip: the same outputs by transformers' names, against a tower written here in plain torch."""

import pytest
import torch

from epimer.errors import CheckpointError
from epimer.experiments.clip8.openclip import to_transformers
from tiny_clip import ImageEncoder

SHAPE = {"width": 24, "heads": 3, "inner": 80, "layers": 2, "patch": 4, "side": 12, "features": 10}


@pytest.fixture
def encoder():
    return ImageEncoder(0, **SHAPE)


def vision_model():
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=SHAPE["width"],
        intermediate_size=SHAPE["inner"],
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"],
        image_size=SHAPE["side"],
        patch_size=SHAPE["patch"],
        projection_dim=SHAPE["features"],
        hidden_act="quick_gelu",
    )
    return CLIPVisionModelWithProjection(config).eval()


@torch.no_grad()
def test_outputs_are_the_same(encoder):
    state = to_transformers(encoder.state_dict(), "zeroshot.pt")
    model = vision_model()
    assert state.keys() == model.state_dict().keys()
    model.load_state_dict(state)
    images = torch.randn(3, 3, SHAPE["side"], SHAPE["side"])
    expected = encoder.model.visual(images)
    torch.testing.assert_close(model(images).image_embeds, expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.1


def test_half_precision_becomes_float32_and_memory_is_not_shared(encoder):
    half = to_transformers(encoder.half().state_dict(), "x.pt")
    assert {W.dtype for W in half.values()} == {torch.float32}
    whole = encoder.float().state_dict()
    for W in to_transformers(whole, "x.pt").values():
        W.zero_()
    assert all(float(W.detach().abs().sum()) > 0 for W in encoder.parameters())


def test_other_models_are_refused():
    with pytest.raises(CheckpointError, match=r"x\.pt holds no vision tower of open_clip \(visual\.conv1\.weight\)"):
        to_transformers({"weight": torch.ones(2)}, "x.pt")
    odd = {"visual.conv1.weight": torch.ones(2), "visual.layer1.0.bn1.weight": torch.ones(2)}
    with pytest.raises(CheckpointError, match=r"x\.pt has 'layer1\.0\.bn1\.weight' in its vision tower"):
        to_transformers(odd, "x.pt")
