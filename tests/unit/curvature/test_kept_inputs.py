"""Inputs kept with curvature: what is kept, the same through files, and damaged files refused in one line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from epimer.checksums import sealed
from epimer.curvature.format import Provenance
from epimer.curvature.kept_inputs import InputKeeper
from epimer.errors import CurvatureError

PADDING = 7
HEAD = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}


def text_batches():
    """Two batches of texts, of 3 and of 2 tokens at most, and their next tokens."""
    first = {
        "input_ids": torch.tensor([[1, 2, 3], [4, 5, PADDING]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    }
    second = {"input_ids": torch.tensor([[8, 9]]), "attention_mask": torch.tensor([[1, 1]])}
    return [
        (first, torch.tensor([[2, 3, -100], [5, -100, -100]])),
        (second, torch.tensor([[9, -100]])),
    ]


def kept(task="causal-lm", most=256, head=None):
    keeper = InputKeeper(task, "mean", PADDING, head or {}, most)
    batches = text_batches()
    seen = list(keeper.watch(batches))
    assert all(one[0] is other[0] and one[1] is other[1] for one, other in zip(seen, batches, strict=True))
    return keeper.kept


def curvature(inputs):
    return epimer.Curvature({"w": epimer.Diagonal(torch.ones(2, 2))}, Provenance("diagonal", samples=3), inputs=inputs)


def assert_same(found, expected):
    assert (found.task, found.pooling, len(found)) == (expected.task, expected.pooling, len(expected))
    for one, other in ((found.tensors, expected.tensors), (found.head, expected.head)):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name].dtype == value.dtype
            assert torch.equal(one[name], value)
    assert (found.counted is None) is (expected.counted is None)
    assert found.counted is None or torch.equal(found.counted, expected.counted)


def test_batches_are_padded_to_the_longest():
    inputs = kept()
    ids, mask = inputs.tensors["input_ids"], inputs.tensors["attention_mask"]
    assert (ids.dtype, mask.dtype) == (torch.int32, torch.uint8)
    assert ids.tolist() == [[1, 2, 3], [4, 5, PADDING], [8, 9, PADDING]]
    assert mask.tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]
    assert inputs.counted.tolist() == [[True, True, False], [True, False, False], [True, False, False]]
    assert kept("text-classification").counted is None


def translated():
    """Sources of 3 and 2 tokens at most, with targets of 1 and 4."""
    keeper = InputKeeper("seq2seq-lm", "auto", PADDING, {})
    targets = [torch.tensor([[5], [6]]), torch.tensor([[1, 2, 3, 4]])]
    batches = []
    for (inputs, _), labels in zip(text_batches(), targets, strict=True):
        written = {"decoder_input_ids": labels - 1, "decoder_attention_mask": torch.ones_like(labels)}
        batches.append(({**inputs, **written}, labels))
    list(keeper.watch(batches))
    return keeper.kept


def test_sources_and_targets_are_padded_each_to_their_longest(tmp_path):
    inputs = translated()
    assert inputs.tensors["input_ids"].tolist() == [[1, 2, 3], [4, 5, PADDING], [8, 9, PADDING]]
    ids = inputs.tensors["decoder_input_ids"]
    assert ids.tolist() == [[4, PADDING, PADDING, PADDING], [5, PADDING, PADDING, PADDING], [0, 1, 2, 3]]
    assert inputs.tensors["decoder_attention_mask"].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert inputs.counted.tolist() == [[True, False, False, False]] * 2 + [[True] * 4]
    curvature(inputs).save(tmp_path / "c")
    assert_same(epimer.Curvature.load(tmp_path / "c").inputs, inputs)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("decoder_attention_mask", lambda mask: 1 - mask, "decoder_attention_mask must be 1 at the tokens"),
        ("decoder_input_ids", lambda ids: ids - 9, "decoder_input_ids hold -9"),
        ("decoder_input_ids", lambda ids: ids[:, :3].contiguous(), "all inputs alike"),
        ("counted", lambda counted: torch.ones_like(counted), "counted must be true at one token of each text"),
    ],
)
def test_damaged_targets_are_refused(tmp_path, name, change, said):
    curvature(translated()).save(tmp_path / "c")
    tensors = load_file(tmp_path / "c" / "inputs.safetensors")
    save_file({**tensors, name: change(tensors[name])}, tmp_path / "c" / "inputs.safetensors")
    with pytest.raises(CurvatureError, match=said):
        _ = epimer.Curvature.load(tmp_path / "c").inputs


def test_at_most_so_many_samples():
    assert kept(most=1).tensors["input_ids"].tolist() == [[1, 2, 3]]
    assert len(kept(most=2)) == 2


def test_images_are_kept_in_float16_and_of_one_size():
    keeper = InputKeeper("image-classification", "auto", 0, {})
    pixels = [torch.full((2, 3, 4, 4), 0.1), torch.full((1, 3, 4, 5), 0.1), torch.full((1, 3, 4, 4), 1e6)]
    list(keeper.watch(({"pixel_values": value}, None) for value in pixels))
    found = keeper.kept.tensors["pixel_values"]
    assert (found.dtype, tuple(found.shape)) == (torch.float16, (3, 3, 4, 4))
    assert torch.equal(found[:2], pixels[0].half())
    assert (found[2] == torch.finfo(torch.float16).max).all()


@pytest.mark.parametrize(("task", "head"), [("causal-lm", None), ("text-classification", HEAD)])
def test_the_same_through_files(tmp_path, task, head):
    inputs = kept(task, head=head)
    curvature(inputs).save(tmp_path / "c")
    names = {"curvature.json", "curvature.safetensors", "inputs.safetensors"}
    assert {path.name for path in (tmp_path / "c").iterdir()} == names | ({"head.safetensors"} if head else set())
    header = json.loads((tmp_path / "c" / "curvature.json").read_text())
    checksums = header["inputs"].pop("checksums")
    assert checksums.keys() == load_file(tmp_path / "c" / "inputs.safetensors").keys() | (head or {}).keys()
    assert header["inputs"] == {"task": task, "pooling": "mean", "samples": 3}
    loaded = epimer.Curvature.load(tmp_path / "c")
    assert_same(loaded.inputs, inputs)
    assert_same(loaded.renamed({"w": "v"}).inputs, inputs)
    loaded.save(tmp_path / "c", overwrite=True)  # onto itself
    assert_same(epimer.Curvature.load(tmp_path / "c").inputs, inputs)
    assert (loaded + curvature(None)).inputs is None


def test_folders_without_inputs(tmp_path):
    curvature(None).save(tmp_path / "c")
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"curvature.json", "curvature.safetensors"}
    assert epimer.Curvature.load(tmp_path / "c").inputs is None


def changed(name, value):
    def change(folder, tensors, header):
        tensors[name] = value(tensors[name]) if callable(value) else value
        save_file(tensors, folder / "inputs.safetensors")

    return change


def without(name):
    def change(folder, tensors, header):
        del tensors[name]
        save_file(tensors, folder / "inputs.safetensors")

    return change


def in_header(value):
    def change(folder, tensors, header):
        (folder / "curvature.json").write_text(json.dumps(sealed(header | {"inputs": value})))

    return change


def set_to(index, number):
    def change(W):
        W = W.clone()
        W[index] = number
        return W

    return change


DAMAGED = {
    "cut": (lambda folder, *_: (folder / "inputs.safetensors").write_bytes(b"12"), "not a whole safetensors file"),
    "gone": (lambda folder, *_: (folder / "inputs.safetensors").unlink(), "does not exist"),
    "no ids": (without("input_ids"), "expected attention_mask, counted, input_ids"),
    "not counted": (without("counted"), "expected attention_mask, counted, input_ids"),
    "foreign": (changed("other", torch.ones(3)), "holds"),
    "dtype": (changed("input_ids", lambda W: W.float()), "is torch.float32 of shape (3, 3), expected torch.int32"),
    "fewer": (changed("attention_mask", lambda W: W[:2].contiguous()), "expected torch.uint8 with 2 dimensions"),
    "dimensions": (changed("counted", lambda W: W[0].clone()), "is torch.bool of shape (3,)"),
    "negative": (changed("input_ids", set_to((0, 1), -1)), "input_ids hold -1"),
    "mask": (changed("attention_mask", set_to((0, 1), 0)), "attention_mask must be 1 at the tokens"),
    "mask 2": (changed("attention_mask", set_to((0, 0), 2)), "attention_mask must be 1 at the tokens"),
    "padding counts": (changed("counted", set_to((1, 2), True)), "counted must be true"),
    "none counts": (changed("counted", set_to(2, False)), "counted must be true"),
    "task": (in_header({"task": "chess", "pooling": "auto", "samples": 3}), "'inputs' of its header cannot be"),
    "count": (in_header({"task": "causal-lm", "pooling": "auto", "samples": 4}), "the first 4"),
    "type": (in_header([3]), "'inputs' of its header cannot be"),
    "number": (in_header({"task": "causal-lm", "pooling": "auto", "samples": True}), "'inputs' of its header"),
    "head": (lambda folder, *_: save_file({"w": torch.ones(2)}, folder / "head.safetensors"), "expected 'weight'"),
    "head NaN": (
        lambda folder, *_: save_file({"weight": torch.full((2, 3), torch.nan)}, folder / "head.safetensors"),
        "head.safetensors holds NaN or Inf",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_inputs_are_refused_when_they_are_opened(tmp_path, case):
    curvature(kept()).save(tmp_path / "c")
    folder = tmp_path / "c"
    damage, expected = DAMAGED[case]
    header = json.loads((folder / "curvature.json").read_text())
    damage(folder, load_file(folder / "inputs.safetensors"), header)
    loaded = epimer.Curvature.load(folder, "here.curv")
    assert torch.equal(loaded["w"].F, torch.ones(2, 2))  # the curvature itself can be used
    with pytest.raises(CurvatureError) as error:
        _ = loaded.inputs
    said = str(error.value)
    assert expected in said
    assert "here.curv" in said
    assert "measure it again with `epimer curvature`" in said
    assert "\n" not in said


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    curvature(kept()).save(tmp_path / "c")
    (tmp_path / "c" / "inputs.safetensors").rename(tmp_path / "elsewhere")
    (tmp_path / "c" / "inputs.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CurvatureError, match="leads out of the folder"):
        _ = epimer.Curvature.load(tmp_path / "c").inputs
