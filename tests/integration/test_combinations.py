"""Features together: each pair works, or is refused in one line before anything is written."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import epimer
from commands import run
from epimer.diagnosis.sweep import as_adapters
from epimer.methods.registry import describe_method
from epimer.plan.adapter import plan_adapter
from epimer.plan.merge import open_models, plan_recipe
from epimer.recipe.load import load_recipe

LAYERS, WIDTH, RANK = 3, 8, 2
WORDS = ["<s>", "a", "b", "c"]
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def save_tokenizer(folder, added):
    entries = [{"id": len(WORDS) + i, "content": word, "special": True} for i, word in enumerate(added)]
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    content = {"added_tokens": entries, "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 16}))


def save_model(folder, state, added=()):
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    config = {"model_type": "llama", "vocab_size": len(state[TABLES[0]]), "num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder, added)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A base, two models, one with added tokens, two adapters, and the models that these make of the base."""
    monkeypatch.chdir(tmp_path)
    draw = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=draw)

    base = {name: random(6, WIDTH) for name in TABLES}
    for i in range(LAYERS):
        base[f"model.layers.{i}.self_attn.q_proj.weight"] = random(WIDTH, WIDTH)
        base[f"model.layers.{i}.norm.weight"] = random(WIDTH)
    save_model(tmp_path / "base", base)
    for name in ("one", "two"):
        save_model(tmp_path / name, {key: W + 0.1 * random(*W.shape) for key, W in base.items()})
    longer = {key: torch.cat([W, random(2, WIDTH)]) if key in TABLES else W + 0.1 for key, W in base.items()}
    save_model(tmp_path / "added", longer, ["<im>", "<x>", "<y>", "<z>"])
    for name in ("x", "y"):
        factors, dense = {}, dict(base)
        for i in range(LAYERS):
            layer = f"model.layers.{i}.self_attn.q_proj"
            A, B = random(RANK, WIDTH), 0.1 * random(WIDTH, RANK)
            factors |= {f"base_model.model.{layer}.lora_{part}.weight": W for part, W in (("A", A), ("B", B))}
            dense[f"{layer}.weight"] = base[f"{layer}.weight"] + B @ A
        (tmp_path / name).mkdir()
        save_file(factors, tmp_path / name / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
        save_model(tmp_path / f"dense-{name}", dense)
    return tmp_path


def recipe(*models, method="task_arithmetic", **more):
    return {"merge_method": method, "base_model": "base", "models": [{"model": one} for one in models], **more}


def merged(given):
    epimer.merge(given, "out", progress=False, overwrite=True)
    return load_file("out/model.safetensors")


def assert_close(found, expected):
    for name, W in expected.items():
        torch.testing.assert_close(found[name], W, rtol=1e-5, atol=1e-5)


ADAPTERS, DENSE = ("base+x", "base+y"), ("dense-x", "dense-y")


@pytest.mark.parametrize("kind", ["tagged", "tensor"])
def test_adapters_merge_in_a_basis_as_the_models_they_make(here, kind):
    results = []
    for names in (ADAPTERS, DENSE):
        given = recipe(*names, method="epimer_free", parameters={"rank": RANK})
        epimer.make_basis(given, "basis", kind=kind, rank=RANK, progress=False, overwrite=True)
        results.append(merged(given | {"basis": "basis"}))
    assert_close(*results)
    base, name = load_file("base/model.safetensors"), "model.layers.0.self_attn.q_proj.weight"
    assert not torch.allclose(results[0][name], base[name], rtol=0, atol=1e-2)


def test_a_sweep_of_adapters_is_that_of_the_models_they_make(here):
    (here / "judge.py").write_text(
        "def score(state, split):\n    return {'size': -float(sum(W.double().norm() for W in state.values()))}\n"
    )
    scores = []
    for names in (ADAPTERS, DENSE):
        found = epimer.sweep(recipe(*names, method="tsv"), "judge:score", scales=[1.0], progress=False)
        scores.append({one.method: one.validation.trusted.average for one in found.tried})
    assert scores[0].keys() == {"average", "tsv", "iso_c", "epimer_free"}
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)


def test_a_sweep_into_an_adapter_is_refused_before_it_scores(here):
    """ties has no exact adapter: named it is refused at once, by default it would be left out; a rank serves all."""
    (here / "counting.py").write_text(
        "calls = []\ndef score(state, split):\n    calls.append(split)\n    return {'a': 1.0}\n"
    )
    given = recipe(*ADAPTERS, method="tsv", output="lora")
    how = {"methods": ["tsv", "ties"], "scales": [1.0], "progress": False}
    with pytest.raises(epimer.EpimerError, match="ties does not keep the rank of adapters"):
        epimer.sweep(given, "counting:score", keep_best="best", **how)
    import counting

    assert counting.calls == []
    epimer.sweep(given | {"lora_rank": 2}, "counting:score", keep_best="best", **how)
    assert counting.calls
    assert (here / "best" / "adapter_config.json").exists()


def test_methods_without_an_adapter_are_left_out_of_a_default_sweep_with_a_note(here):
    loaded = load_recipe(recipe(*ADAPTERS, method="tsv", output="lora"))
    rows = [describe_method(name) for name in ("tsv", "ties", "average")]
    kept, notes = as_adapters(loaded, open_models(loaded), rows, None, required=False)
    assert [row.name for row in kept] == ["tsv", "average"]
    assert notes == ["left out, as their merges have no exact adapter: ties; give lora_rank to try them."]


def test_auto_takes_a_method_that_has_an_adapter(here):
    """Whatever a diagnosis would advise, the merge is written; the methods without an adapter are not forecast."""
    epimer.merge(recipe(*ADAPTERS, method="auto", output="lora"), "best", progress=False)
    assert (here / "best" / "adapter_config.json").exists()


def test_adapters_that_are_kept_in_memory_are_planned_as_those_on_disk(here):
    loaded = load_recipe(recipe(*ADAPTERS, method="tsv", output="lora"))
    opened = open_models(loaded)
    kept = replace(opened, participants=opened.participants.kept_in_memory(1 << 30))  # as `rounds` keeps them
    plans = [plan_adapter(plan_recipe(loaded, one)) for one in (opened, kept)]
    assert not plans[1].problems
    assert [job.lora for job in plans[0].jobs] == [job.lora for job in plans[1].jobs]
    assert len(plans[0].jobs) == LAYERS


@pytest.mark.parametrize("method", ["slerp", "arcee_fusion", "nearswap", "multislerp"])
def test_methods_that_look_at_the_base_write_adapters(here, method):
    models = ADAPTERS[: describe_method(method).models[1] or 2]
    given = recipe(*models, method=method, parameters={"t": 0.3} if method in ("slerp", "nearswap") else {})
    epimer.merge(given | {"output": "lora", "lora_rank": WIDTH}, "adapter", progress=False)
    assert_close(merged(recipe("base+adapter", method="average")), merged(given))


@pytest.mark.parametrize(
    ("method", "more"), [("passthrough", {}), ("average", {"parameters": {"normalize": False}})]
)  # fmt: skip
def test_a_merge_without_the_base_is_no_adapter(here, method, more):
    with pytest.raises(epimer.EpimerError, match="does not start from the base here"):
        epimer.merge(recipe("base+x", method=method, output="lora", **more), "out", progress=False)


@pytest.mark.parametrize("more", [{}, {"tokenizer_source": "union"}, {"tokenizer_source": "added"}])
def test_an_adapter_cannot_have_other_tokens_than_its_base(here, more):
    with pytest.raises(epimer.EpimerError, match="an adapter has the base's tokens"):
        epimer.merge(recipe("base+x", "added", output="lora", lora_rank=2, **more), "out", progress=False)
    assert not (here / "out").exists()


def test_an_adapter_is_written_with_the_chat_template_of_its_recipe(here):
    given = recipe(*ADAPTERS, output="lora")
    epimer.merge(given, "plain", progress=False)
    assert not (here / "plain" / "tokenizer.json").exists()  # the base's serves
    epimer.merge(given | {"chat_template": "{{ messages }}"}, "out", progress=False)
    assert (here / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    config = json.loads((here / "out" / "tokenizer_config.json").read_text())
    assert config == {"model_max_length": 16, "chat_template": "{{ messages }}"}
    assert (here / "out" / "tokenizer.json").read_bytes() == (here / "base" / "tokenizer.json").read_bytes()


def several(here):
    """Write a file whose first recipe goes to OUT, builds on the second, and has nothing to do with the third."""
    documents = [
        recipe("first", "two", method="average"),
        recipe("one", "two", method="tsv", name="first"),
        recipe("one", "two", name="apart"),
    ]
    (here / "several.yaml").write_text("---\n".join(map(yaml.safe_dump, documents)))
    return "several.yaml"


def test_the_record_of_several_recipes_is_that_of_the_output(here):
    printed = run("merge", several(here), "out", "--json", "--record", "record.json")
    record = json.loads(printed.out)
    assert record["method"] == "average"
    assert record == json.loads((here / "record.json").read_text())
    assert {path.name for path in (here / "out.parts").iterdir()} == {"first", "apart"}


def test_an_adapter_of_several_recipes_is_the_output(here):
    documents = [recipe(*ADAPTERS, method="average"), recipe("one", "two", name="apart")]
    (here / "several.yaml").write_text("---\n".join(map(yaml.safe_dump, documents)))
    assert run("merge", "several.yaml", "out", "--lora").code == 0
    assert (here / "out" / "adapter_config.json").exists()
    assert (here / "out.parts" / "apart" / "model.safetensors").exists()


def test_a_plan_of_several_recipes_is_no_json(here):
    found = run("merge", several(here), "out", "--json", "--dry-run")
    assert found.code == 2
    assert json.loads(found.out)["error"].endswith("several.yaml holds 3 recipes; leave out --json.")


def test_slices_have_no_basis(here):
    sources = [{"model": name, "layer_range": [0, 2]} for name in ("one", "two")]
    given = {"merge_method": "epimer_kron", "base_model": "base", "slices": [{"sources": sources}]}
    with pytest.raises(epimer.ParameterError, match="not to slices"):
        epimer.make_basis(given, "basis", progress=False)
