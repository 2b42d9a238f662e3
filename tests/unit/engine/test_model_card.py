"""The card of a merged model and the files beside it: what inputs agree on, no markup of strangers, no code."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import epimer
from epimer.api import plan_merge


def write(folder: Path, seed: int, head: str | None = None, **configs: object) -> Path:
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    save_file({"layer.weight": torch.randn(4, 3, generator=draw)}, folder / "model.safetensors")
    for name, config in {"config": {"model_type": "tiny"}, **configs}.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    if head is not None:
        (folder / "README.md").write_text(f"---\n{head}\n---\n# A model\n")
    return folder


def merged(tmp_path: Path, *folders: Path, **options: object) -> tuple[dict, list[str], Path]:
    """Merge folders, the first as the base; return the head of the card, the notes and the output."""
    base, *models = map(str, folders)
    recipe = {"merge_method": "average", "base_model": base, "models": [{"model": one} for one in models]}
    out = tmp_path / "out"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epimer.merge(recipe, out, progress=False, **options)
    start, head, _ = (out / "README.md").read_text().split("---\n", 2)
    assert start == ""
    return yaml.safe_load(head), [str(one.message) for one in caught], out


def three(tmp_path: Path, *heads: str | None) -> list[Path]:
    return [write(tmp_path / name, t, head) for t, (name, head) in enumerate(zip("abc", heads, strict=True))]


def test_license_and_pipeline_tag_where_the_inputs_agree(tmp_path):
    same = "license: apache-2.0\npipeline_tag: text-generation\nlibrary_name: transformers\ntags: [x]"
    head, notes, _ = merged(tmp_path, *three(tmp_path, same, same, same))
    assert head["license"] == "apache-2.0"
    assert head["pipeline_tag"] == "text-generation"
    assert head["library_name"] == "transformers"
    assert head["tags"] == ["merge", "epimer", "average"]
    assert notes == []


def test_a_license_of_its_own_keeps_its_name_and_its_link(tmp_path):
    own = "license: other\nlicense_name: tiny-1\nlicense_link: https://example.org/tiny"
    head, notes, _ = merged(tmp_path, *three(tmp_path, own, own, own))
    assert [head[key] for key in ("license", "license_name", "license_link")] == [
        *("other", "tiny-1", "https://example.org/tiny")
    ]
    assert notes == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("license: mit", "mit"),
        ("pipeline_tag: text-generation", "none"),
        (None, "none"),
        ("license: other\nlicense_name: own", "other (own)"),
    ],
)
def test_licenses_that_do_not_agree_are_one_note_and_none_is_claimed(tmp_path, other, said):
    first = "license: apache-2.0\npipeline_tag: text-generation"
    a, b, c = three(tmp_path, first, first, other)
    head, notes, _ = merged(tmp_path, a, b, c)
    assert "license" not in head
    assert head["pipeline_tag"] == "text-generation"  # all that name one do
    expected = (
        f"the model card names no license, as the inputs do not agree: base apache-2.0, models[0] ({b}) apache-2.0, "
        f"models[1] ({c}) {said}; write it there yourself."
    )
    assert notes == [expected]
    recipe = {"merge_method": "average", "base_model": str(a), "models": [{"model": str(b)}, {"model": str(c)}]}
    assert expected in plan_merge(recipe).notes  # before anything is merged


def test_an_adapters_card_counts_too(tmp_path):
    base, one, _ = three(tmp_path, "license: mit", "license: mit", None)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["layer"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    factors = {"lora_A.weight": torch.ones(1, 3), "lora_B.weight": torch.ones(4, 1)}
    names = {f"base_model.model.layer.{name}": W for name, W in factors.items()}
    save_file(names, adapter / "adapter_model.safetensors")
    (adapter / "README.md").write_text("---\nlicense: gpl-3.0\n---\n")
    head, notes, _ = merged(tmp_path, base, one, Path(f"{base}+{adapter}"))
    assert "license" not in head
    assert len(notes) == 1
    assert "gpl-3.0" in notes[0]


def merge_bomb(levels: int) -> str:
    """Return YAML whose merge keys stand for ten to the power of `levels` pairs."""
    lines = [f"k{i}: &k{i} {{<<: [{', '.join([f'*k{i - 1}'] * 10)}]}}" for i in range(1, levels)]
    return "\n".join(["k0: &k0 {x: 1}", *lines, "license: mit"])


HOSTILE = [
    merge_bomb(20),
    "license: [[[[",
    "license: !!python/object/apply:os.system ['touch pwned']",
    "license: 'mit\\n# owned'",
    "license: 'mit)](javascript:x)'",
    "license: " + "x" * 500,
    "license: {mit: 1}",
    "- license",
    "a: &a [x, x]\nb: &b [*a, *a]\nlicense: *b",
    "[" * 5000,
]


@pytest.mark.parametrize("head", HOSTILE, ids=range(len(HOSTILE)))
def test_what_strangers_write_into_a_card_goes_no_further(tmp_path, head):
    found, notes, out = merged(tmp_path, *three(tmp_path, head, head, head))
    assert found.keys() == {"library_name", "tags"}
    assert notes == []
    assert "owned" not in (out / "README.md").read_text()


def test_names_and_recipes_are_no_markup(tmp_path):
    name = "<img src=x onerror=alert(1)> [a](javascript:x) `b` ```"
    a, b = write(tmp_path / name, 0), write(tmp_path / f"b{name}", 1)
    _, _, out = merged(tmp_path, a, b, b)
    body = (out / "README.md").read_text().split("---\n", 2)[2]
    before, fence, recipe, after = re.fullmatch(r"(.*?)\n(`{4,})yaml\n(.*)\n\2\n(.*)", body, re.DOTALL).groups()
    assert fence not in recipe
    shown = "<img src=x onerror=alert(1)> [a](javascript:x) `b` ```"
    assert (
        (before + after).count(shown) == (before + after).count(f"{shown} ````") == 4
    )  # as code, which ends behind it
    assert not re.search(r"<img|\]\(|`b`", re.sub(r"````.*?````", "", before + after))
    assert yaml.safe_load(recipe)["base_model"] == name


def test_the_recipe_is_a_file_that_runs(tmp_path, monkeypatch):
    a, b, c = three(tmp_path, None, None, None)
    _, _, out = merged(tmp_path, a, b, c)
    text = (out / "recipe.yaml").read_text()
    assert str(tmp_path) not in text
    assert text == json.loads((out / "epimer.json").read_text())["recipe"]
    monkeypatch.chdir(tmp_path)
    epimer.merge(out / "recipe.yaml", tmp_path / "again", progress=False)
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "out"))
    assert found["layer.weight"].equal(expected["layer.weight"])


AUTO = {"auto_map": {"AutoModel": "modeling_own.Own"}}


def with_code(tmp_path: Path) -> list[Path]:
    configs = {
        "config": {"model_type": "tiny", **AUTO, "vision_config": {"size": 3, **AUTO}},
        "tokenizer_config": {"model_max_length": 9, **AUTO},
        "preprocessor_config": {"size": 8, **AUTO},
    }
    folders = [write(tmp_path / name, t, **configs) for t, name in enumerate("abc")]
    (folders[0] / "modeling_own.py").write_text("raise SystemExit\n")
    return folders


def configs_of(out: Path) -> dict[str, dict]:
    names = ("config.json", "tokenizer_config.json", "preprocessor_config.json")
    return {name: json.loads((out / name).read_text()) for name in names}


def test_code_is_neither_copied_nor_named(tmp_path):
    _, notes, out = merged(tmp_path, *with_code(tmp_path))
    assert configs_of(out) == {
        "config.json": {"model_type": "tiny", "vision_config": {"size": 3}},
        "tokenizer_config.json": {"model_max_length": 9},
        "preprocessor_config.json": {"size": 8},
    }
    assert not list(out.glob("*.py"))
    assert notes == [
        "auto_map of config.json and tokenizer_config.json is dropped, as the Python files (modeling_own.py) are not "
        "copied; pass --copy-code if you trust them."
    ]


def test_code_is_copied_for_who_trusts_it(tmp_path):
    folders = with_code(tmp_path)
    _, notes, out = merged(tmp_path, *folders, copy_code=True)
    assert configs_of(out) == configs_of(folders[0])
    assert (out / "modeling_own.py").read_text() == "raise SystemExit\n"
    assert notes == ["copied, not run: modeling_own.py; who loads the model with trust_remote_code runs them."]


def test_a_config_without_code_keeps_its_bytes(tmp_path):
    folders = three(tmp_path, None, None, None)
    (folders[0] / "preprocessor_config.json").write_text('{"size":   8}')
    _, _, out = merged(tmp_path, *folders)
    assert (out / "preprocessor_config.json").read_text() == '{"size":   8}'
