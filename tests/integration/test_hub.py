"""Models by hub id, against a stand-in for the hub on this machine; epimer runs in processes of their own."""

import hashlib
import io
import json
import re
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file, save

from stand_in_hub import COMMANDS, Hub, Repo, environment

SHAPES = {"embed.weight": (7, 4), "layers.0.weight": (4, 4), "layers.0.bias": (4,)}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def model(seed: int, **more: bytes) -> dict[str, bytes]:
    """Return the files of a model repository, with much that a merge has no use for."""
    beside = {"config.json": b'{"model_type": "tiny"}', "tokenizer.json": b'{"version": "1.0"}', "merges.txt": b"a b"}
    useless = {"README.md": b"# hello", "modeling_tiny.py": b"raise SystemExit", "pytorch_model.bin": b"not a pickle"}
    return {"model.safetensors": save(tensors(seed)), **beside, **useless, "run.log": b"", **more}


def torch_model(seed: int) -> dict[str, bytes]:
    file = io.BytesIO()
    torch.save(tensors(seed), file)
    return {"pytorch_model.bin": file.getvalue(), "config.json": b"{}", "modeling_tiny.py": b"raise SystemExit"}


@pytest.fixture
def hub():
    repos = {
        "org/model": Repo([model(1), model(2)], {"main": -1, "old": 0, "refs/pr/1": 0}),
        "org/base": Repo([model(0)]),
        "org/torch": Repo([torch_model(3)]),
        "classic": Repo([model(4)]),
        "org/secret": Repo([model(5)], hidden=(401, {"X-Error-Code": "RepoNotFound"})),
        "org/gated": Repo([model(6)], hidden=(403, {"X-Error-Code": "GatedRepo"})),
        "org/listed": Repo([model(7)], gated=True),
        "org/shut": Repo([model(7)], hidden=(403, {})),
    }
    hub = Hub(repos)
    yield hub
    hub.stop()


@pytest.fixture
def epimer(hub, tmp_path):
    """Return a function that runs commands with a cache of this test's own: the code, stdout and stderr of each."""

    def run(*commands: list[str], **settings: str) -> list[tuple[int, str, str]]:
        argv = json.dumps([["epimer", *command] for command in commands])
        command = [sys.executable, "-c", COMMANDS, argv]
        made = subprocess.run(
            command, env=environment(hub, tmp_path / "home", **settings), cwd=tmp_path, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr
        return json.loads(made.stdout)

    return run


def inspected(answer: tuple[int, str, str]) -> str:
    """Return the name of a checkpoint that was inspected, after a look at its tensors."""
    code, out, err = answer
    assert code == 0, err
    found = json.loads(out)
    assert {row["name"]: tuple(row["shape"]) for row in found["tensors"]} == SHAPES
    return found["name"]


def inspect(name: str) -> list[str]:
    return ["inspect", name, "--json"]


def test_what_is_fetched(hub, epimer):
    old, new = hub.repos["org/model"].shas
    names = [inspected(answer) for answer in epimer(inspect("org/model"), inspect("org/model@main"))]
    assert names == [f"org/model@{new}"] * 2
    needed = ["README.md", "config.json", "merges.txt", "model.safetensors", "tokenizer.json"]
    assert hub.files() == [f"org/model:{name}" for name in needed]
    hub.asked.clear()
    commands = [inspect(f"org/model@{revision}") for revision in ("main", new, "old", "refs/pr/1", old)]
    assert [inspected(answer) for answer in epimer(*commands)] == [
        f"org/model@{sha}" for sha in (new, new, old, old, old)
    ]
    assert hub.files() == ["org/model:model.safetensors"]  # the old one; all else is in the cache


def test_other_weights_are_not_fetched(hub, epimer):
    """Repositories of large models hold the weights a second time, and what training left behind."""
    others = ("consolidated.safetensors", "checkpoint-10/model.safetensors", "onnx/model.safetensors")
    useless = {name: save({"w": torch.full((3,), i)}) for i, name in enumerate(others)}
    hub.repos["org/crowded"] = Repo([model(8, **useless)])
    (answer,) = epimer(inspect("org/crowded"))
    inspected(answer)
    assert [file for file in hub.files() if file.endswith("safetensors")] == ["org/crowded:model.safetensors"]


def test_without_the_hub(hub, epimer):
    old, new = hub.repos["org/model"].shas
    assert all(code == 0 for code, _, _ in epimer(*map(inspect, ("org/model", "org/model@old", "org/torch"))))
    hub.stop()
    cached = {
        "org/model": new,
        "org/model@main": new,
        "org/model@old": old,
        f"org/model@{new}": new,
        f"org/model@{old}": old,
        "org/torch": hub.repos["org/torch"].shas[0],
    }
    for settings in ({}, {"HF_HUB_OFFLINE": "1"}):
        *answers, lost = epimer(*map(inspect, cached), inspect("org/base"), **settings)
        assert lost[0] == 2
        assert re.fullmatch(
            r"error: org/base is neither a path here nor in the hub's cache, and the hub cannot be reached "
            r"\(.+\); download it where there is a network: hf download org/base\n",
            lost[2],
        )
        names = [inspected(answer) for answer in answers]
        assert names == [f"{name.split('@')[0]}@{sha}" for name, sha in cached.items()]


FAULTS = {
    "org/nothing": "org/nothing is neither a path here nor a model on the hub (a private one needs `hf auth login`).",
    "nothing": "nothing is neither a path here nor a model on the hub (a private one needs `hf auth login`).",
    "org/secret": "org/secret is neither a path here nor a model on the hub (a private one needs `hf auth login`).",
    "org/model@v9": "org/model has no revision 'v9' on the hub; see its page for branches.",
    f"org/model@{'0' * 40}": f"org/model has no revision '{'0' * 40}' on the hub; see its page for branches.",
    "org/gated": "org/gated is gated; accept its terms on HUB/org/gated and log in: hf auth login",
    "org/listed": "org/listed is gated; accept its terms on HUB/org/listed and log in: hf auth login",
    "org/shut": "org/shut: the hub refused it (403); ask for access on HUB/org/shut and log in: hf auth login",
}


def test_faults(hub, epimer, tmp_path):
    recipe = {"merge_method": "linear", "models": [{"model": "org/nothing"}, {"model": "org/gated"}]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    *answers, merge = epimer(*map(inspect, FAULTS), ["merge", "recipe.yaml", "out"])
    page = f"http://127.0.0.1:{hub.server_port}/"
    assert {name: (code, err) for name, (code, _, err) in zip(FAULTS, answers, strict=True)} == {
        name: (2, f"error: {message.replace('HUB/', page)}\n") for name, message in FAULTS.items()
    }
    code, _, err = merge
    assert (code, err.count("\n")) == (2, 1), err
    assert "models[0]: org/nothing is neither" in err
    assert "models[1]: org/gated is gated" in err
    assert not (tmp_path / "out").exists()
    assert hub.files() == []


def test_merge(hub, epimer, tmp_path):
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": "org/base",
        "models": [
            {"model": "org/model@old", "parameters": {"weight": 0.5}},
            {"model": "org/torch", "parameters": {"weight": 0.25}},
            {"model": "classic", "parameters": {"weight": -0.5}},
        ],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    ((code, _, err),) = epimer(["merge", "recipe.yaml", "out", "--quiet"])
    assert code == 0, err
    assert err == ""
    torch_files = [file for file in hub.files() if file.startswith("org/torch:")]
    assert torch_files == ["org/torch:config.json", "org/torch:pytorch_model.bin"]
    base, *models = (tensors(seed) for seed in (0, 1, 3, 4))
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == base.keys()
    for name, W in base.items():
        delta = sum(w * (one[name].double() - W) for w, one in zip((0.5, 0.25, -0.5), models, strict=True))
        torch.testing.assert_close(merged[name].double(), W + delta, rtol=1e-6, atol=1e-6)
    shas = {name: repo.shas[0] for name, repo in hub.repos.items()}
    names = [f"{name}@{shas[name]}" for name in ("org/base", "org/model", "org/torch", "classic")]
    record = json.loads((tmp_path / "out" / "epimer.json").read_text())
    assert [name for name, _ in record["models"]] == names
    card = (tmp_path / "out" / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["base_model"] == ["org/base", "org/model", "org/torch", "classic"]
    assert head["base_model_relation"] == "merge"
    shown = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert [shown["base_model"], *(entry["model"] for entry in shown["models"])] == names
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        *("README.md", "config.json", "epimer.json", "merges.txt", "model.safetensors", "recipe.yaml", "tokenizer.json")
    }


def write_recipe(folder, *models, **more):
    recipe = {"merge_method": "task_arithmetic", "base_model": "org/base", "models": [{"model": one} for one in models]}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, **more}))


def wide(seed: int, shards: int = 1) -> dict[str, bytes]:
    """Return the files of a model with a tensor of 4 MB, in one file or in shards with an index."""
    draw = torch.Generator().manual_seed(seed)
    state = {"wide.weight": torch.randn(1000, 1000, generator=draw), "last.bias": torch.randn(5, generator=draw)}
    config = {"config.json": b'{"model_type": "tiny"}', "README.md": b"---\nlicense: mit\n---\n"}
    if shards == 1:
        return {"model.safetensors": save(state), **config}
    files = {f"model-0000{t}-of-00002.safetensors": save({name: W}) for t, (name, W) in enumerate(state.items(), 1)}
    index = {"weight_map": dict(zip(state, files, strict=True))}
    return {**files, "model.safetensors.index.json": json.dumps(index).encode(), **config}


def test_a_dry_run_fetches_headers_and_configs_and_plans_as_after_a_download(hub, epimer, tmp_path):
    models = {"org/base": wide(0), "org/model": wide(1), "org/sharded": wide(2, shards=2)}
    hub.repos |= {name: Repo([files]) for name, files in models.items()}
    write_recipe(tmp_path, "org/model", "org/sharded")
    planned, shown = epimer(
        ["merge", "recipe.yaml", "--dry-run", "--json"], ["merge", "recipe.yaml", "out", "--dry-run"]
    )
    assert planned[0] == shown[0] == 0, planned
    assert not [file for file in hub.files() if "safetensors" in file and not file.endswith("index.json")]
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    sizes = {
        name: sum(len(data) for file, data in files.items() if file.endswith(".safetensors"))
        for name, files in models.items()
    }
    plan = json.loads(planned[1])
    assert plan["totals"].pop("downloads") == sum(sizes.values())
    listing = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items())
    assert f"to be downloaded from the hub: {sum(sizes.values()) / 1e6:.1f} MB ({listing})" in shown[1].splitlines()
    fetched = sum(stop - start for _, start, stop in hub.parts)
    assert 0 < fetched < 0.8 * sum(sizes.values())  # 1 MB a file for its header, and three samples a tensor
    merged, after = epimer(["merge", "recipe.yaml", "out"], ["merge", "recipe.yaml", "--dry-run", "--json"])
    assert merged[0] == 0, merged
    assert merged[2].startswith(f"downloading {sum(sizes.values()) / 1e6:.1f} MB ({listing}) from the hub\n")
    assert {file for file in hub.files() if file.endswith(".safetensors")} == {
        f"{name}:{file}" for name, files in models.items() for file in files if file.endswith(".safetensors")
    }
    known = json.loads(after[1])
    assert known["totals"].pop("downloads") == 0
    for one in (plan, known):  # an estimate that is measured anew each time
        del one["totals"]["seconds"], one["totals"]["starting"]
        for tensor in one["tensors"]:
            del tensor["seconds"]
    assert plan == known
    assert "license: mit" in (tmp_path / "out" / "README.md").read_text()


def test_models_that_do_not_fit_are_not_downloaded(hub, epimer, tmp_path):
    other = {name: W for name, W in tensors(9).items() if name != "layers.0.bias"}
    hub.repos["org/other"] = Repo([model(9, **{"model.safetensors": save(other)})])
    write_recipe(tmp_path, "org/model", "org/other")
    ((code, _, err),) = epimer(["merge", "recipe.yaml", "out"])
    assert code == 2
    assert "org/other) lacks 1 tensors that base has: 'layers.0.bias'" in err
    assert not [file for file in hub.files() if file.endswith("safetensors")]


def test_weights_of_a_gated_model_are_refused_before_any_download(hub, epimer, tmp_path):
    """The hub lists the files of such a model to everyone."""
    hub.repos["org/listed"].commits[0] = {"model.safetensors": save(tensors(7)), ".gitattributes": b""}
    write_recipe(tmp_path, "org/model", "org/listed")
    ((code, _, err),) = epimer(["merge", "recipe.yaml", "--dry-run"])
    page = f"http://127.0.0.1:{hub.server_port}/org/listed"
    assert (code, err.count("\n")) == (2, 1), err
    assert f"models[1]: org/listed is gated; accept its terms on {page} and log in: hf auth login" in err
    assert not [file for file in hub.files() if file.endswith("safetensors")]


def test_of_a_tokenizers_model_no_weights_are_fetched(hub, epimer, tmp_path):
    write_recipe(tmp_path, "org/model", tokenizer_source="classic")
    ((code, _, err),) = epimer(["merge", "recipe.yaml", "out", "--quiet"])
    assert code == 0, err
    assert [file for file in hub.files() if file.startswith("classic:")] == [
        *("classic:README.md", "classic:config.json", "classic:merges.txt", "classic:tokenizer.json")
    ]


def test_code_is_fetched_for_who_trusts_it_and_for_no_one_else(hub, epimer, tmp_path):
    config = json.dumps({"model_type": "tiny", "auto_map": {"AutoModel": "modeling_tiny.Tiny"}}).encode()
    hub.repos["org/base"] = Repo([model(0, **{"config.json": config, "sub/other.py": b""})])
    write_recipe(tmp_path, "org/model")
    plain, trusting = epimer(["merge", "recipe.yaml", "plain"], ["merge", "recipe.yaml", "code", "--copy-code"])
    assert plain[0] == trusting[0] == 0, (plain, trusting)
    assert [file for file in hub.files() if file.endswith(".py")] == ["org/base:modeling_tiny.py"]
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == {"model_type": "tiny"}
    assert json.loads((tmp_path / "code" / "config.json").read_bytes()) == json.loads(config)
    assert (tmp_path / "code" / "modeling_tiny.py").read_bytes() == b"raise SystemExit"
    assert not list((tmp_path / "plain").glob("*.py"))
    assert "note: auto_map of config.json is dropped, as the Python files are not copied" in plain[1]


def test_a_finished_merge_is_pushed_file_by_file(hub, epimer, tmp_path):
    write_recipe(tmp_path, "org/model")
    command = ["merge", "recipe.yaml", "out", "--push-to-hub", "org/merged"]
    first, second = epimer(command, command, HF_TOKEN="good")
    assert first[0] == second[0] == 0, (first, second)
    page = f"http://127.0.0.1:{hub.server_port}/org/merged"
    assert first[1].splitlines()[-1] == second[1].splitlines()[-1] == f"uploaded to {page}"
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "README.md", "recipe.yaml", "epimer.json", "config.json"} <= files.keys()
    assert hub.repos["org/merged"].commits[1] == files
    ((code, out, err),) = epimer(inspect("org/merged"))
    assert code == 0, err
    assert {row["name"]: tuple(row["shape"]) for row in json.loads(out)["tensors"]} == SHAPES


@pytest.mark.parametrize("chunk", [None, 64])
def test_large_files_are_pushed_to_the_store_for_large_files(hub, epimer, tmp_path, chunk):
    """By LFS, whole or in parts; a second push of the same sends none of them again."""
    hub.large, hub.chunk = 200, chunk
    write_recipe(tmp_path, "org/model")
    command = ["merge", "recipe.yaml", "out", "--push-to-hub", "org/merged"]
    first, second = epimer(command, command, HF_TOKEN="good", HF_HUB_DISABLE_XET="1")
    assert first[0] == second[0] == 0, (first, second)
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.repos["org/merged"].commits[1] == files
    large = {hashlib.sha256(data).hexdigest(): data for data in files.values() if len(data) >= hub.large}
    assert files["model.safetensors"] in large.values()
    assert hub.stored == large
    parts = sum(1 if chunk is None else -(-len(data) // chunk) for data in large.values())
    assert sum(verb == "PUT" for verb, _ in hub.asked) == parts > len(large) - (chunk is None)


def test_an_upload_of_large_files_that_fails_is_told_in_one_line(hub, epimer, tmp_path):
    hub.large, hub.full = 200, True
    write_recipe(tmp_path, "org/model")
    command = ["merge", "recipe.yaml", "out", "--push-to-hub", "org/merged", "--quiet"]
    ((code, _, err),) = epimer(command, HF_TOKEN="good", HF_HUB_DISABLE_XET="1")
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith(f"error: you may not write to {hub.address}/org/merged (403); log in")
    assert err.endswith("; out is complete: hf upload org/merged out\n")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == SHAPES.keys()
    assert len(hub.repos["org/merged"].commits) == 1


def test_a_merge_goes_to_the_hub_as_to_a_folder(hub, epimer, tmp_path):
    write_recipe(tmp_path, "org/model")
    command = ["merge", "recipe.yaml", "hf://org/merged", "--quiet"]
    local, refused, first, second = (
        *epimer(["merge", "recipe.yaml", "out", "--quiet"], command),
        *epimer(command, command, HF_TOKEN="good"),
    )
    assert local[0] == first[0] == second[0] == 0, (local, first, second)
    assert refused[0] == 2
    assert refused[2].endswith("org/merged; log in with a token that may: hf auth login; nothing was merged\n")
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.repos["org/merged"].commits[-1] == files
    assert not list(tmp_path.glob(".merged-*")), "what was staged is gone"
    (wrong,) = epimer(["merge", "recipe.yaml", "hf://merged", "--quiet"], HF_TOKEN="good")
    assert "error: merged is no repository to push to; expected ORG/NAME" in wrong[2]


def test_who_may_not_push_is_told_to_log_in(hub, epimer, tmp_path):
    write_recipe(tmp_path, "org/model")

    def push(name: str, *more: str, **settings: str) -> str:
        ((code, _, err),) = epimer(["merge", "recipe.yaml", "out", "--push-to-hub", name, "--quiet", *more], **settings)
        assert (code, err.count("\n")) == (2, 1), err
        return err

    page = f"http://127.0.0.1:{hub.server_port}"
    login = "log in with a token that may: hf auth login"
    expected = f"error: you may not write to {page}/org/merged; {login}; nothing was merged\n"
    assert push("org/merged") == expected
    expected = f"error: you may not write to {page}/org/merged (401); {login}; nothing was merged\n"
    assert push("org/merged", HF_TOKEN="wrong") == expected
    assert push("merged", HF_TOKEN="good").startswith("error: merged is no repository to push to; expected ORG/NAME")
    assert not (tmp_path / "out").exists()
    assert not hub.files()
    expected = f"error: you may not write to {page}/theirs/merged (403); {login}; "
    assert push("theirs/merged", HF_TOKEN="good") == expected + "out is complete: hf upload theirs/merged out\n"
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == SHAPES.keys()


def test_an_answer_that_names_no_commit_is_refused_in_one_line(hub, epimer, tmp_path):
    write_recipe(tmp_path, "org/model")
    hub.silent = True
    ((code, _, err),) = epimer(["merge", "recipe.yaml", "out", "--quiet"])
    assert (code, err.count("\n")) == (2, 1), err
    assert "org/model: the hub's answer is not about a repository" in err
