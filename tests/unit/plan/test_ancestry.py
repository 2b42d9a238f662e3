"""Models that were not fine-tuned from the base of their merge are named before anything is merged."""

import json

import pytest
import torch
import yaml
from safetensors.torch import save_file

import epimer
from epimer.api import plan_merge

SHAPES = {f"model.layers.{i}.mlp.up_proj.weight": (40, 60) for i in range(6)} | {"model.norm.weight": (60,)}


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def save(folder, state, **config):
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))


def moved(base, share, seed=1):
    """Return a model whose change is independent of the base and has this share of its norm."""
    other = weights(seed)
    return {name: W + share * W.norm() / other[name].norm() * other[name] for name, W in base.items()}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = weights(0)
    save(tmp_path / "base", base, _name_or_path="org/Llama-7B")
    save(tmp_path / "near", moved(base, 0.05))
    save(tmp_path / "far", moved(base, 3.0, seed=2))
    save(tmp_path / "other", weights(3))
    return tmp_path


def notes(models, method="task_arithmetic", **keys):
    entries = [{"model": name} for name in models]
    recipe = {"merge_method": method, "base_model": "base", "models": entries, **keys}
    return plan_merge(recipe).notes


def test_unrelated_weights_are_said_and_models_that_moved_far_are_not(here):
    (text,) = notes(["near", "far", "other"])
    assert text.startswith("other seems not to be fine-tuned from base: their matrices have a cosine of ")
    assert float(text.split("cosine of ")[1].split()[0]) == pytest.approx(0, abs=0.03)


def test_of_few_entries_nothing_is_said(here):
    for name in ("base", "other"):
        save_file(
            {"layer.weight": weights(int(name == "other"))["model.layers.0.mlp.up_proj.weight"][:16]},
            here / name / "model.safetensors",
        )
    assert not notes(["other"])


def test_the_merge_warns_of_unrelated_weights_and_its_record_says_so(here):
    recipe = {"merge_method": "ties", "base_model": "base", "models": [{"model": "near"}, {"model": "other"}]}
    with pytest.warns(epimer.EpimerWarning, match="other seems not to be fine-tuned from base"):
        record = epimer.merge(recipe, "out", progress=False)
    assert any("other seems not to be" in note for note in record.notes)
    assert any("other seems not to be" in note for note in json.loads((here / "out/epimer.json").read_text())["notes"])


@pytest.mark.parametrize("recipe", [
    {"method": "average", "base_model": None},
    {"models": ["near", "far"]},
    {"models": ["near", "base"]},
])  # fmt: skip
def test_nothing_is_said_of_related_models_or_without_a_base(here, recipe):
    assert not [text for text in notes(**{"models": ["near", "other"]} | recipe) if "seems not" in text]


ADAPTER_BASES = {
    "org/Llama-7B": False,
    "someone/llama-7b": False,
    "/home/somebody/base/": False,
    "/cache/models--org--Llama-7B/snapshots/0123": False,
    "": False,
    "org/Llama-13B": True,
    "/home/somebody/vicuna": True,
}


@pytest.mark.parametrize(("name", "differs"), ADAPTER_BASES.items())
def test_an_adapter_of_a_base_of_another_name_is_noted_and_recorded(here, name, differs):
    (here / "lora").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": name}
    (here / "lora/adapter_config.json").write_text(json.dumps(config))
    module = "base_model.model.model.layers.1.mlp.up_proj"
    factors = {f"{module}.lora_A.weight": torch.ones(2, 60), f"{module}.lora_B.weight": torch.ones(40, 2)}
    save_file(factors, here / "lora/adapter_model.safetensors")
    plan = plan_merge({"merge_method": "task_arithmetic", "base_model": "base", "models": [{"model": "base+lora"}]})
    last = name.rstrip("/").rpartition("/")[2] if name.startswith("/") else name
    said = [text for text in plan.notes if text.startswith(f"the adapter lora was trained on '{last}'")]
    assert len(said) == differs
    assert len([text for text in plan.recipe.notes if "the adapter lora" in text]) == differs
    assert "somebody" not in yaml.safe_dump(plan.recipe.notes)


@pytest.mark.parametrize(("scale", "unusual"), [(50, True), (-11, True), (3, False), (10, False)])
def test_an_unusual_scale_is_said_by_recipes_and_in_python(here, recwarn, scale, unusual):
    said = [text for text in notes(["near"], scale=scale) if text.startswith(f"scale {scale:g} is unusual")]
    assert len(said) == unusual
    base = weights(0)
    epimer.merge_state_dicts(base, [moved(base, 0.1)], "task_arithmetic", scale=scale)
    assert len([one for one in recwarn if str(one.message).startswith(f"scale {scale:g} is unusual")]) == unusual


def test_an_adapter_that_does_not_fit_the_base_says_what_it_was_trained_on(here):
    (here / "lora").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": "org/Llama-13B"}
    (here / "lora/adapter_config.json").write_text(json.dumps(config))
    module = "base_model.model.model.layers.1.mlp.up_proj"
    factors = {f"{module}.lora_A.weight": torch.ones(2, 50), f"{module}.lora_B.weight": torch.ones(40, 2)}
    save_file(factors, here / "lora/adapter_model.safetensors")
    with pytest.raises(epimer.EpimerError, match=r"is it an adapter of this base\? .* trained on 'org/Llama-13B'\.$"):
        plan_merge({"merge_method": "task_arithmetic", "base_model": "base", "models": [{"model": "base+lora"}]})
