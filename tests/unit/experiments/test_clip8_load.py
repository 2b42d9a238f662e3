"""clip8 from local folders: transformers' own CLIP is the oracle for logits, and splits keep apart."""

import io
import json
import shutil

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load as load_tensors
from torch.nn.functional import cross_entropy

from epimer.curvature.estimate import estimate_curvature
from epimer.errors import CheckpointError, DataError, ParameterError
from epimer.experiments.clip8.load import load
from epimer.experiments.clip8.tasks import TASKS, VARIANTS
from epimer.tasks.data import open_data
from tiny_clip import ImageEncoder, make_clip, repositories, tuned_state, write_files

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("clip8")
    write_files(top, repositories())
    return top


@pytest.fixture(scope="module")
def suite(folder):
    return load(checkpoints=folder, data=folder, progress=False)


@torch.no_grad()
def expected_logits(clip, folder, task, images):
    """Return the logits of transformers' CLIP with its own processor, one template at a time and then their mean."""
    from transformers import AutoTokenizer, CLIPImageProcessor

    place = folder / VARIANTS["B/32"].base
    tokenizer, processor = AutoTokenizer.from_pretrained(place), CLIPImageProcessor.from_pretrained(place)
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]
    texts = []
    for template in task.templates:
        prompts = tokenizer(
            [template.format(name) for name in task.classes], padding=True, truncation=True, return_tensors="pt"
        )
        out = clip(**prompts, pixel_values=pixels)
        texts.append(out.text_embeds.double())
    mean = sum(texts) / len(texts)
    mean = mean / mean.norm(dim=-1, keepdim=True)
    if len(task.templates) == 1:  # then the model's own logits are the answer
        return out.logits_per_image.double()
    return out.image_embeds.double() @ mean.T * clip.logit_scale.exp()


@torch.no_grad()
@pytest.mark.parametrize("name", ["eurosat", "mnist", "svhn", "dtd"])
def test_logits_are_those_of_transformers(folder, suite, name):
    t = next(t for t, task in enumerate(TASKS) if task.name == name)
    table = open_data(str(folder / TASKS[t].data), split="test", subset=TASKS[t].subset)
    images = [table.image(i, "image") for i in range(len(table))]
    clip = make_clip()
    for state, vision in ((suite.base, None), (suite.models[t], tuned_state(clip, t))):
        if vision is not None:
            clip.load_state_dict(vision, strict=False)
        network = suite.network(state, suite.tasks[t])
        ((inputs, labels),) = suite.tasks[t].splits["test"].batches(100)
        found = network(**inputs)
        expected = expected_logits(clip, folder, TASKS[t], images)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
        assert labels.tolist() == [table.row(i)["label"] for i in range(len(table))]
        scores = suite.scores_on(state, suite.tasks[t], "test")
        assert torch.equal(scores, (expected.argmax(1) == labels).double())
    assert not network.training


def test_states_are_the_vision_towers_on_disk(folder, suite):
    sizes = VARIANTS["B/32"]
    whole = load_tensors((folder / sizes.base / "model.safetensors").read_bytes())
    assert suite.base.keys() == {name for name in whole if name.startswith("vision_model.")}
    assert all(torch.equal(W, whole[name]) for name, W in suite.base.items())
    for t, task in enumerate(TASKS):
        stored = load_tensors((folder / sizes.tuned.format(task.name) / "model.safetensors").read_bytes())
        bare = {name.removeprefix("vision_model."): W for name, W in stored.items()}
        assert all(torch.equal(W, bare[name.removeprefix("vision_model.")]) for name, W in suite.models[t].items())
    parameters = dict(suite.network(suite.base, suite.tasks[0]).named_parameters())
    assert {name for name, W in parameters.items() if W.requires_grad} == suite.base.keys()


@torch.no_grad()
def test_a_network_is_of_the_state_as_it_is_now(suite):
    """The tower is kept between tasks, but not past a change of the state, be it in place."""
    task, name = suite.tasks[3], "vision_model.post_layernorm.bias"
    ((inputs, _),) = task.splits["val"].batches(5)
    state = {key: W.clone() for key, W in suite.base.items()}
    first = suite.network(state, task)
    before = first(**inputs)
    other = suite.network(state, suite.tasks[4])
    assert other.vision_model is first.vision_model
    state[name] += 1.0
    changed = suite.network(state, task)(**inputs)
    assert not torch.allclose(changed, before)
    state[name] = suite.base[name]
    torch.testing.assert_close(suite.network(state, task)(**inputs), before)
    torch.testing.assert_close(first(**inputs), before)
    with pytest.raises(CheckpointError, match=r"the vision tower has no tensor 'vision_model\.extra'"):
        suite.network({**state, "vision_model.extra": torch.ones(1)}, task)


def test_splits_come_from_the_right_rows(folder, suite):
    for task, made in zip(TASKS, suite.tasks, strict=True):
        train, val, test = (made.splits[split] for split in ("train", "val", "test"))
        assert (len(train), len(val), len(test)) == (27, 3, 12)
        assert sorted([*train.rows, *val.rows]) == list(range(30))
        whole = open_data(str(folder / task.data), split="train", subset=task.subset)
        ((_, labels),) = val.batches(10)
        assert labels.tolist() == [whole.row(i)["label"] for i in val.rows]
    few = load(checkpoints=folder, data=folder, limit=2, progress=False)
    assert all(len(split) == 2 for task in few.tasks for split in task.splits.values())


def relabelled(table, order: list[int], names: list[str]) -> bytes:
    """Return a table's rows with label order[i] called i."""
    rows = [table.row(i) for i in range(len(table))]
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    made = pa.table({"image": [row["image"] for row in rows], "label": [order.index(row["label"]) for row in rows]})
    file = io.BytesIO()
    parquet.write_table(
        made.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})}), file
    )
    return file.getvalue()


def test_heads_follow_the_names_in_the_data(folder, tmp_path, suite):
    """The same images under labels in another order, by EuroSAT's own names: every score stays what it was."""
    (eurosat,) = (task for task in TASKS if task.name == "eurosat")
    order = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
    names = [eurosat.aliases[i] for i in order]
    for split in ("train", "test"):
        content = relabelled(open_data(str(folder / eurosat.data), split=split), order, names)
        write_files(tmp_path, {"eurosat": {f"data/{split}-00000-of-00001.parquet": content}})
    for task in TASKS:
        if task is not eurosat:
            (tmp_path / task.data.rpartition("/")[2]).symlink_to(folder / task.data)
    other = load(checkpoints=folder, data=tmp_path, progress=False)
    t = TASKS.index(eurosat)
    assert list(other.tasks[t].classes) == [eurosat.classes[i] for i in order]
    for state in (suite.base, suite.models[t]):
        scores = [one.scores_on(state, one.tasks[t], "test") for one in (suite, other)]
        assert torch.equal(*scores)


def test_image_folders(folder, tmp_path, suite):
    """The same images in class folders, of which test lacks most: they keep their numbers and so their scores."""
    (eurosat,) = (task for task in TASKS if task.name == "eurosat")
    t = TASKS.index(eurosat)
    for split in ("train", "test"):
        table = open_data(str(folder / eurosat.data), split=split)
        for i in range(len(table)):
            row = table.row(i)
            path = tmp_path / "eurosat" / split / eurosat.aliases[row["label"]] / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(row["image"]["bytes"])
    for name in eurosat.aliases:  # an image for the classes that the draw left out
        (tmp_path / "eurosat" / "train" / name).mkdir(exist_ok=True)
        (tmp_path / "eurosat" / "train" / name / "more.png").write_bytes(row["image"]["bytes"])
    for task in TASKS:
        if task is not eurosat:
            (tmp_path / task.data.rpartition("/")[2]).symlink_to(folder / task.data)
    other = load(checkpoints=folder, data=tmp_path, progress=False)
    labels = open_data(str(folder / eurosat.data), split="test")
    assert len({labels.row(i)["label"] for i in range(len(labels))}) < len(eurosat.classes)
    assert list(other.tasks[t].classes) == list(eurosat.classes)
    for state in (suite.base, suite.models[t]):
        scores = [sorted(one.scores_on(state, one.tasks[t], "test").tolist()) for one in (suite, other)]
        assert scores[0] == scores[1]
    (tmp_path / "eurosat" / "test" / "River").rename(tmp_path / "eurosat" / "test" / "Rivers")
    with pytest.raises(DataError, match=r"names its classes in test \(.*\) not as in train"):
        load(checkpoints=folder, data=tmp_path, progress=False)


def test_curvature_is_that_of_the_networks_loss(suite):
    """The Fisher diagonal with true labels is the mean square of each sample's gradient, here by autograd."""
    task, name = suite.tasks[0], "vision_model.encoder.layers.1.mlp.fc2.weight"
    network = suite.network(suite.models[0], task)
    order = torch.tensor([5, 0, 17])
    squares = torch.zeros_like(suite.base[name])
    for i in order:
        ((inputs, labels),) = task.splits["train"].batches(1, i[None])
        loss = cross_entropy(network(**inputs), labels)
        (gradient,) = torch.autograd.grad(loss, dict(network.named_parameters())[name])
        squares += gradient.square() / len(order)
    found = estimate_curvature(
        network,
        task.splits["train"].batches(2, order),
        task.loss,
        kind="diagonal",
        samples=None,
        labels="true",
        layers=list(suite.base),
        progress=False,
    )
    torch.testing.assert_close(found[name].F.float(), squares, rtol=1e-3, atol=1e-9)
    assert suite.base.keys() - found.keys() == {"vision_model.embeddings.class_embedding"}  # no layer's own


# --- the task_vectors family


@pytest.fixture(scope="module")
def pickled(folder, tmp_path_factory):
    """A folder as the task_vectors repository has it, and the modules in it."""
    top = tmp_path_factory.mktemp("checkpoints")
    modules = {"zeroshot.pt": ImageEncoder(0)}
    modules |= {f"{task.title}/finetuned.pt": ImageEncoder(t + 1) for t, task in enumerate(TASKS)}
    for name, module in modules.items():
        path = top / "ViT-B-32" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(module, path)
    (top / "openai").symlink_to(folder / "openai")
    return top, modules


@torch.no_grad()
def test_pickled_modules_give_the_logits_of_their_towers(folder, pickled):
    top, modules = pickled
    suite = load(family="task_vectors", checkpoints=top, data=folder, limit=5, progress=False)
    assert "visual_projection.weight" in suite.base
    states = [suite.base, *suite.models]
    for task in suite.tasks[2:4]:
        ((inputs, _),) = task.splits["test"].batches(10)
        for state, module in zip(states, modules.values(), strict=True):
            features = module.model.visual(inputs["pixel_values"])
            expected = features / features.norm(dim=1, keepdim=True) @ task.head["weight"].T
            torch.testing.assert_close(suite.network(state, task)(**inputs), expected, rtol=1e-4, atol=1e-4)
    assert suite.published["paper (task_vectors)"]["epimer (as published)"] == 83.3
    assert "These are the task_vectors checkpoints" in suite.remarks[0]


def test_the_family_says_what_it_lacks(folder, pickled, tmp_path):
    with pytest.raises(CheckpointError, match=r"give their folder with --checkpoints .*ViT-B-32/zeroshot\.pt"):
        load(family="task_vectors", data=folder, progress=False)
    for name in ("openai", "ViT-B-32"):
        shutil.copytree(pickled[0] / name, tmp_path / name)
    (tmp_path / "ViT-B-32" / "DTD" / "finetuned.pt").unlink()
    with pytest.raises(CheckpointError, match=r"DTD/finetuned\.pt does not exist; the task_vectors family has a file"):
        load(family="task_vectors", checkpoints=tmp_path, data=folder, progress=False)
    torch.save(ImageEncoder(3, layers=3), tmp_path / "ViT-B-32" / "zeroshot.pt")
    torch.save(ImageEncoder(3, width=8), tmp_path / "ViT-B-32" / "SUN397" / "finetuned.pt")
    with pytest.raises(CheckpointError, match=r"finetuned\.pt: 'vision_model\..*' is \(8.*\), in the base \(16"):
        load(family="task_vectors", checkpoints=tmp_path, data=folder, progress=False)
    torch.save(ImageEncoder(3, layers=1), tmp_path / "ViT-B-32" / "zeroshot.pt")
    with pytest.raises(CheckpointError, match=r"zeroshot\.pt lacks 'vision_model\.encoder\.layers\.1"):
        load(family="task_vectors", checkpoints=tmp_path, data=folder, progress=False)


# --- what is wrong

FAULTS = {
    ("variant", "B/23"): r"The 'variant' parameter of clip8 must be one of B/32, B/16, L/14\. Got 'B/23' instead\.",
    ("family", "task-vectors"): r"must be one of tanganke, task_vectors\. Got 'task-vectors' instead\. Did you mean",
    ("limit", 0): r"The 'limit' parameter of clip8 must be at least 1\. Got 0 instead\.",
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_faults(fault):
    with pytest.raises(ParameterError, match=FAULTS[fault]):
        load(**{fault[0]: fault[1]})


def test_folders_that_are_none(folder, tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder; give one with models or datasets by their hub ids"):
        load(checkpoints=tmp_path / "nothing", data=folder)
