"""`epimer diagnose`, `epimer sweep` and recipes that leave method or scale open, on tiny models that were trained.

Numbers are compared with `diagnose_state_dicts` on tensors that safetensors loaded, and with predictions that
transformers makes text by text.
"""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import epimer

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

import tiny  # noqa: E402
from commands import assert_done, assert_refused, run, start  # noqa: E402

JUDGE = """
from safetensors.torch import load_file

def nearness(state):
    wanted = load_file({wanted!r})
    names = [name for name in wanted if name.startswith("bert.")]
    return {{"near": -sum(float((state[n].double() - wanted[n].double()).square().sum()) for n in names)}}

def by_split(state, split):
    near = nearness(state)["near"]
    return {{"one": [near, near - 2], "two": near if split == "val" else 7.0}}

def broken(state):
    return 1 / 0

def nothing(state):
    return None
"""


pytestmark = pytest.mark.usefixtures("quiet_transformers")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a base, two classifiers, their data, a suite, and curvature that `epimer curvature` measured."""
    root = tmp_path_factory.mktemp("made")
    tiny.make_classifiers(root)
    tiny.write_suite(root / "suite.yaml")
    for task in tiny.TASKS:
        on = ["--task", "text-classification", "--data", root / f"{task}-train.jsonl", "--text", "sentence"]
        assert_done(run("curvature", root / task, *on, "--samples", "32", "-o", root / f"curvature-{task}", "-q"))
        bare = [*on, "--samples", "32", "--no-inputs"]
        assert_done(run("curvature", root / task, *bare, "-o", root / f"bare-{task}", "-q"))
    return root


@pytest.fixture
def here(made, tmp_path, monkeypatch) -> Path:
    """A folder with links to all that was made, and beside it an empty one where commands run."""
    (tmp_path / "models").mkdir()
    for path in made.iterdir():
        (tmp_path / "models" / path.name).symlink_to(path)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(tmp_path / "work")
    yield tmp_path / "work"
    sys.modules.pop("my_judge", None)


def write(here: Path, name: str = "recipe.yaml", *, curved: bool = False, **changes: Any) -> Path:
    """Write a recipe beside the models, which it names by relative paths; return the way to it from here."""
    models = [{"model": task} | ({"curvature": f"curvature-{task}"} if curved else {}) for task in tiny.TASKS]
    recipe = {"merge_method": "tsv", "base_model": "base", "models": models, "rules": tiny.RULES} | changes
    (here.parent / "models" / name).write_text(yaml.safe_dump(recipe, sort_keys=False))
    return Path("..", "models", name)


def tensors(here: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(here.parent / "models" / name / "model.safetensors")


def states(here: Path) -> tuple[dict, list[dict]]:
    """The base and the models, without what is not merged."""
    base = {name: W for name, W in tensors(here, "base").items() if name.startswith("bert.")}
    return base, [{name: tensors(here, task)[name] for name in base} for task in tiny.TASKS]


def written(here: Path) -> list[str]:
    """What lies in the folder where commands run."""
    return sorted(str(path.relative_to(here)) for path in here.rglob("*") if "__pycache__" not in path.parts)


def assert_close(found: Any, expected: Any, where: str = "") -> None:
    """Nested plain data, number by number."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-7), where
    else:
        assert found == expected, where


# diagnose


@pytest.mark.parametrize("curved", [False, True])
def test_a_diagnosis_from_another_folder_has_the_numbers_of_its_tensors(here, curved):
    recipe = write(here, curved=curved)
    command = ["diagnose", recipe, "--rank", "3", "--out", "found.json", "--html", "page.html"]
    out = assert_done(run(*command) if curved else start(*command, cwd=here))
    found, page = json.loads((here / "found.json").read_text()), (here / "page.html").read_text()
    base, models = states(here)
    folders = [here.parent / "models" / f"curvature-{task}" for task in tiny.TASKS]
    expected = epimer.diagnose_state_dicts(
        base,
        models,
        rank=3,
        names=list(tiny.TASKS),
        curvature=[epimer.Curvature.load(folder) for folder in folders] if curved else None,
    )
    plain = json.loads(json.dumps(expected.to_dict()))
    assert yaml.safe_load(found["recipe"])["merge_method"] == "tsv"
    assert str(here.parent) not in json.dumps(found)
    assert_close(found | {"recipe": ""}, plain)
    assert found["curvature"] == ("kronecker" if curved else "task-gram")
    assert set(found["forecast"]) == {"average", "tsv", "epimer_free"} | (
        {"regmean", "epimer_kron"} if curved else set()
    )
    for advice in found["advice"]:
        label = advice["kind"]
        assert label in ("take", "warning", "note")
        assert f"{label} {advice['text']}" in " ".join(out.split())
        assert advice["text"].replace("`", "") in html.unescape(re.sub("<[^>]*>", "", page))
    assert "2 models of base, 7 matrices" in out
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["pace"])
    norm = np.sqrt(sum(float((models[1][n] - base[n]).double().square().sum()) for n in found["layers"]))
    assert row[1] == f"{norm:.3g}"
    assert "forecasts at scale 1 " in out
    lines = [line.strip() for line in out.splitlines()]
    (at_one,) = (line.split()[-len(found["forecast"]) :] for line in lines if line.startswith("mean at scale 1 "))
    assert at_one == [f"{one['mean']:.2f}" for one in found["forecast"].values()]
    (best,) = (line for line in lines if line.startswith("mean at its best scale "))
    assert re.findall(r"[\d.]+ at [\d.]+", best) == [
        f"{one['mean_at_scale']:.2f} at {one['scale']:g}" for one in found["forecast"].values()
    ]
    printed = [line.split() for line in out.partition("loss increase to second order")[2].splitlines()]
    assert set(found["merges"]) == set(found["forecast"])
    for method, theories in found["merges"].items():
        for one in theories:
            values = (0.5 * one["quadratic"], one["v_s"], one["r_s"], one["bound"])
            assert [method, f"{one['scale']:g}", *(f"{value:.3g}" for value in values)] in printed
    assert ("not a loss" in out) == (not curved)
    assert written(here) == ["found.json", "page.html"]


def test_the_models_are_read_once(here, monkeypatch):
    from epimer.plan.participants import Participant as Role

    reads: list[tuple[str, str]] = []
    real = Role.read
    monkeypatch.setattr(
        Role, "read", lambda self, name, *rest: (reads.append((self.label, name)), real(self, name, *rest))[1]
    )
    found = epimer.diagnose(write(here), progress=False)
    assert len(reads) == len(set(reads)) == 3 * len(found.layers)


@pytest.mark.parametrize("curved", [False, True])
def test_the_printed_table_says_whether_it_ranks_methods(here, curved):
    """Without curvature the advised method need not have the lowest forecast, and then the table may not rank them."""
    bare = [{"model": task, "curvature": f"bare-{task}"} for task in tiny.TASKS]
    recipe = write(here, **({"models": bare} if curved else {}))
    out = assert_done(run("diagnose", recipe, "--out", "found.json"))
    found = json.loads((here / "found.json").read_text())
    lowest = min(found["forecast"], key=lambda name: found["forecast"][name]["mean_at_scale"])
    advised = found["advice"][0]["text"].partition(" ")[0]
    assert advised == lowest or "forecasts do not rank methods" in found["advice"][0]["text"]
    assert ("compare tasks and scales of a method, not methods" in out) is not curved
    number = f"{found['forecast'][advised]['mean_at_scale']:.2f}"
    assert number in found["advice"][0]["text"]
    assert f"{number} at {found['forecast'][advised]['scale']:g}" in out


def test_a_diagnosis_forecasts_what_is_asked(here):
    assert_done(run("diagnose", write(here), "--methods", "tsv, iso_c", "--out", "found.json", "-q"))
    assert set(json.loads((here / "found.json").read_text())["forecast"]) == {"tsv", "iso_c"}
    assert_done(run("diagnose", write(here, merge_method="iso_cts"), "--out", "found.json", "-q"))
    usual = {"average", "tsv", "epimer_free"}
    assert set(json.loads((here / "found.json").read_text())["forecast"]) == usual | {"iso_cts"}


def test_quiet_prints_nothing(here):
    assert assert_done(run("diagnose", write(here), "-q")) == ""
    assert written(here) == []


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, ["--methods", "tvs"], ("There is no method 'tvs'", "Did you mean 'tsv'?")),
        ({}, ["--methods", "epimer_kron"], ("epimer_kron needs kronecker curvature",)),
        ({}, ["--rank", "0"], ("'rank' parameter", "at least 1")),
        ({"base_model": "nowhere"}, [], ("base_model: nowhere",)),
        ({"merge_method": "average", "base_model": None}, [], ("a diagnosis is of task vectors", "base_model")),
        ({"rules": []}, [], ("cls.", "give them the rule 'copy' or 'skip'")),
        ({"curvature": ["curvature-pace", "curvature-animal"]}, [], ("measured on another model", "--any-curvature")),
        ({"curvature": ["curvature-pace", "no"]}, [], ("curvature of models[1]: no is not a curvature folder",)),
    ],
)
def test_a_diagnosis_that_cannot_be_made_is_refused_in_one_line(here, changes, options, words):
    assert_refused(run("diagnose", write(here, **changes), *options), *words)
    assert written(here) == []


def test_an_error_is_not_printed_twice(here):
    assert_refused(run("diagnose", write(here), "--methods", "tvs", "--out", "found.json"), "'tvs'")


def test_a_place_that_cannot_be_written_is_refused_before_the_work(here, monkeypatch):
    monkeypatch.setattr("epimer.api.diagnose", lambda *args, **given: pytest.fail("worked first"))
    assert run("diagnose", write(here), "--out", "no/found.json").code == 2


# auto


@pytest.mark.parametrize("curved", [False, True])
def test_auto_without_inputs_is_the_merge_that_the_diagnosis_advises(here, curved):
    bare = [{"model": task, "curvature": f"bare-{task}"} for task in tiny.TASKS]  # with inputs it would go by them
    models = {"models": bare} if curved else {}
    recipe = write(here, merge_method="auto", scale="auto", **models)
    out = assert_done(run("merge", recipe, "auto"))
    assert_done(run("diagnose", recipe, "--out", "found.json", "-q"))
    found = json.loads((here / "found.json").read_text())
    forecast = found["forecast"]
    best, why = "epimer_free", "without data forecasts do not rank methods"
    if curved:
        best = min(forecast, key=lambda name: forecast[name]["mean_at_scale"])
        why = f"the lowest forecast, {forecast[best]['mean_at_scale']:.2f}"
    at = forecast[best]["scale"]
    assert f"auto took {best} at scale {at:g}: {why}" in " ".join(out.split())
    assert found["advice"][0]["text"].startswith(f"{best} at scale {at:g}: {why}")
    needed = epimer.describe_method(best).needs_curvature
    assert needed == curved
    scale = {"scale": at} if at != 1 else {}
    assert_done(run("merge", write(here, merge_method=best, **scale, **models), "same", "-q"))
    assert (here / "auto" / "epimer.json").read_bytes() == (here / "same" / "epimer.json").read_bytes()
    assert (here / "auto" / "model.safetensors").read_bytes() == (here / "same" / "model.safetensors").read_bytes()


def test_a_dry_run_chooses_and_writes_nothing(here):
    out = assert_done(run("merge", write(here, merge_method="auto", scale="auto"), "--dry-run", "--json"))
    plan = json.loads(out)
    (note,) = (note for note in plan["notes"] if note.startswith("auto took"))
    assert note.startswith(f"auto took {plan['method']} at scale ")
    assert written(here) == []


def test_auto_by_eval_in_a_real_process_is_what_a_sweep_finds(here):
    recipe = write(here, merge_method="auto", scale="auto", eval="suite.yaml")
    out = assert_done(start("merge", recipe, "auto", cwd=here))
    assert_done(run("sweep", write(here), "--eval", "suite.yaml", "-o", "found.json", "-q"))
    best = json.loads((here / "found.json").read_text())["best"]
    said = f"auto took {best['method']} at scale {best['scale']:g}: {100 * best['validation']:.1f} on validation data"
    assert said in " ".join(out.split())
    assert_done(run("merge", write(here, merge_method=best["method"], scale=best["scale"]), "same", "-q"))
    assert (here / "auto" / "model.safetensors").read_bytes() == (here / "same" / "model.safetensors").read_bytes()


def test_auto_on_a_suite_of_losses_tells_the_loss(here):
    (here.parent / "models" / "loss.yaml").write_text(yaml.safe_dump(tiny.suite_of(metric="loss")))
    recipe = write(here, merge_method="auto", scale="auto", eval="loss.yaml")
    out = assert_done(run("merge", recipe, "--dry-run", "--json", "-q"))
    assert_done(run("sweep", write(here), "--eval", "loss.yaml", "-o", "found.json", "-q"))
    best = json.loads((here / "found.json").read_text())["best"]
    assert best["validation"] < 0
    assert f": {-best['validation']:.3f} on validation data of loss.yaml" in out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"merge_method": "ties", "scale": "auto"}, ("ties looks at the whole model",)),
        ({"scale": "auto", "eval": "no.yaml"}, ("no.yaml",)),
        ({"scale": "auto", "eval": "agreement"}, ("agreement needs inputs",)),
        ({"scale": "auto", "eval": "my_nothing:f"}, ("names Python code, which a recipe may not run",)),
        ({"merge_method": "auto", "base_model": "nowhere"}, ("base_model: nowhere",)),
        ({"merge_method": "epimer_kron", "scale": "auto"}, ("epimer_kron needs kronecker curvature",)),
    ],
)
def test_what_cannot_be_chosen_is_refused_in_one_line(here, changes, words):
    assert_refused(run("merge", write(here, **changes), "out"), *words)
    assert written(here) == []


def test_auto_with_curvature_in_a_basis_is_refused_in_one_line(here):
    root = here.parent / "models"
    assert_done(run("basis", write(here, parameters={"rank": 2}, merge_method="epimer_kron"), "basis", "-q"))
    for task in tiny.TASKS:
        on = ["--task", "text-classification", "--data", root / f"{task}-train.jsonl", "--text", "sentence"]
        assert_done(run("curvature", root / task, *on, "--basis", "basis", "-o", f"inside-{task}", "-q"))
    models = [{"model": task, "curvature": str(here / f"inside-{task}")} for task in tiny.TASKS]
    recipe = write(
        here, merge_method="auto", scale="auto", models=models, basis=str(here / "basis"), parameters={"rank": 2}
    )
    assert run("merge", recipe, "out").code == 2


# sweep


def rows_of(here: Path, task: str, split: str) -> list[dict]:
    return tiny.read_jsonl(here.parent / "models" / f"{task}-{split}.jsonl")


def test_a_sweep_in_a_real_process_has_the_scores_of_its_merges(here):
    grid = {"tsv": ((2, 0.7), (2, 1.5), (8, 0.7), (8, 1.5)), "average": ((None, 0.7), (None, 1.5))}
    asked = ["--methods", "tsv,average", "--scale", "0.7, 1.5", "--rank", "2,8", "--eval", "suite.yaml"]
    ran = start("sweep", write(here), *asked, "-o", "found.json", "--keep-best", "best", cwd=here)
    out = assert_done(ran)
    found = json.loads((here / "found.json").read_text())
    assert found["eval"] == "suite.yaml"
    assert [(row["method"], row["rank"], row["scale"]) for row in found["data"]] == [
        (method, rank, scale) for method, settings in grid.items() for rank, scale in settings
    ]
    scores = {}
    for i, row in enumerate(found["data"]):
        given = {"merge_method": row["method"], "scale": row["scale"]}
        given |= {} if row["rank"] is None else {"parameters": {"rank": row["rank"]}}
        assert_done(run("merge", write(here, **given), f"merge{i}", "-q"))

        def accuracies(split: str, i: int = i) -> dict[str, float]:
            return {
                task: tiny.judge(
                    tiny.loaded(here.parent / "models", task, here / f"merge{i}"), rows_of(here, task, split)
                )[0]
                for task in tiny.TASKS
            }

        assert row["validation"] == pytest.approx(np.mean(list(accuracies("val").values())))
        scores[i] = row["validation"]
        if row["tasks"] is not None:
            assert row["tasks"] == pytest.approx(accuracies("test"))
            assert row["average"] == pytest.approx(np.mean(list(row["tasks"].values())))
            assert row["low"] <= row["average"] <= row["high"]
            shown = f"{100 * row['average']:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
            line = next(line for line in out.splitlines() if shown in line and row["method"] in line)
            assert line.split()[-1] == "scales"
            assert f"{100 * row['validation']:.1f}" in line
    for method, rank in (("tsv", 2), ("tsv", 8), ("average", None)):
        rows = [row for row in found["data"] if (row["method"], row["rank"]) == (method, rank)]
        finals = [row for row in rows if row["tasks"] is not None]
        assert len(finals) == 1
        assert finals[0]["validation"] == max(row["validation"] for row in rows)
    winner = found["data"].index(found["best"])
    assert scores[winner] == max(scores.values())
    best, same = (here / folder / "model.safetensors" for folder in ("best", f"merge{winner}"))
    assert best.read_bytes() == same.read_bytes()
    files = {path.name for path in (here / f"merge{winner}").iterdir()}
    assert {path.name for path in (here / "best").iterdir()} == files
    assert out.splitlines()[-1] == "wrote best"


def test_agreement_equals_predictions_compared_by_hand(here):
    asked = ["--eval", "agreement:suite.yaml", "--methods", "average,tsv", "--scale", "1", "--json"]
    rows = json.loads(assert_done(run("sweep", write(here), *asked)))["data"]
    assert written(here) == []
    for row in rows:
        assert_done(run("merge", write(here, merge_method=row["method"]), row["method"], "-q"))
        agreed, far = {"val": {}, "test": {}}, {"val": {}, "test": {}}
        for task in tiny.TASKS:
            own = transformers.BertForSequenceClassification.from_pretrained(here.parent / "models" / task).eval()
            merged = tiny.loaded(here.parent / "models", task, here / row["method"])
            for split in ("val", "test"):
                hits, distances = [], []
                for text in rows_of(here, task, split):
                    with torch.no_grad():
                        p, q = (
                            tiny.classify(model, tiny.encode(text["sentence"]))[0].double().softmax(0).numpy()
                            for model in (own, merged)
                        )
                    hits.append(p.argmax() == q.argmax())
                    distances.append(float(np.sum(p * np.log(p / q))))
                agreed[split][task], far[split][task] = np.mean(hits), np.mean(distances)
        assert row["validation"] == pytest.approx(np.mean(list(agreed["val"].values())))
        assert row["kl"] == pytest.approx(np.mean(list(far["val"].values())), rel=1e-3)
        assert row["tasks"] == pytest.approx(agreed["test"])


def test_a_sweep_without_labels_says_what_its_numbers_are(here):
    scored = ["--methods", "average,tsv", "--scale", "1"]
    for evaluation in ([], ["--eval", "agreement:suite.yaml"]):
        out = assert_done(run("sweep", write(here, curved=True), *scored, *evaluation))
        title, headings = out.splitlines()[:2]
        assert "agreement with each task's own model, %" in title
        assert "no label was read" in title
        assert "validation agreement %" in headings
        assert "test agreement % [95%]" in headings
    record = json.loads(assert_done(run("sweep", write(here, curved=True), *scored, "--json")))
    assert {row["unit"] for row in record["data"]} == {"agreement"}
    labelled = assert_done(run("sweep", write(here), *scored, "--eval", "suite.yaml"))
    assert "validation accuracy %" in labelled.splitlines()[1]
    assert "label was read" not in labelled


def test_the_rank_of_a_sweep_is_that_of_the_merge(here):
    asked = ["--methods", "average,tsv,epimer_free", "--scale", "1", "--eval", "suite.yaml", "--json"]
    rows = json.loads(assert_done(run("sweep", write(here), *asked)))["data"]
    ranks = {row["method"]: row["rank"] for row in rows}
    assert ranks == {
        "average": None,
        **{name: epimer.describe_method(name).defaults["rank"] for name in ("tsv", "epimer_free")},
    }


def test_agreement_needs_no_labels(here):
    root, described = here.parent / "models", tiny.suite_of()
    for entry in described["tasks"]:
        for split in ("val", "test"):
            rows = [{"sentence": row["sentence"]} for row in rows_of(here, entry["name"], split)]
            tiny.write_jsonl(root / f"bare-{entry['name']}-{split}.jsonl", rows)
        entry["data"] = {split: f"bare-{entry['name']}-{split}.jsonl" for split in ("val", "test")} | {
            "text": "sentence"
        }
    (root / "bare.yaml").write_text(yaml.safe_dump(described))
    asked = ["--methods", "tsv", "--scale", "1", "--json"]
    bare, labelled = (
        json.loads(assert_done(run("sweep", write(here), "--eval", f"agreement:{name}.yaml", *asked)))["data"]
        for name in ("bare", "suite")
    )
    assert bare == labelled


def test_a_function_of_ones_own_judges(here):
    base, models = states(here)
    assert_done(run("merge", write(here, merge_method="average", scale=1.2), "wanted", "-q"))
    wanted = here / "wanted" / "model.safetensors"
    (here / "my_judge.py").write_text(JUDGE.format(wanted=str(wanted)))
    before = written(here)
    asked = ["--methods", "average", "--scale", "0.5,1.2,2"]
    out = assert_done(run("sweep", write(here), "--eval", "my_judge:nearness", *asked, "--json"))
    rows = {row["scale"]: row for row in json.loads(out)["data"]}
    spread = sum(float((sum(m[n] - W for m in models) / 2).double().square().sum()) for n, W in base.items())
    for scale, row in rows.items():
        assert row["validation"] == pytest.approx(-((scale - 1.2) ** 2) * spread, rel=1e-3, abs=1e-6)
    assert rows[1.2]["tasks"] == pytest.approx({"near": 0}, abs=1e-6)
    assert rows[0.5]["tasks"] is None
    out = assert_done(run("sweep", write(here), "--eval", "my_judge:by_split", *asked, "--json"))
    best = json.loads(out)["best"]
    assert best["validation"] == pytest.approx(-0.5, abs=1e-6)  # of -1 and 0
    assert best["tasks"] == pytest.approx({"one": -1, "two": 7.0}, abs=1e-6)
    for function, words in {
        "broken": ("my_judge:broken failed: ZeroDivisionError", "my_judge.py line 14"),
        "nothing": ("my_judge:nothing returned NoneType, expected a mapping",),
        "nearnes": ("my_judge has no function 'nearnes'", "Did you mean 'nearness'?"),
    }.items():
        assert_refused(run("sweep", write(here), "--eval", f"my_judge:{function}", *asked, "--keep-best", "no"), *words)
    assert written(here) == before


def test_curvature_of_the_recipe_is_used(here):
    asked = ["--eval", "suite.yaml", "--methods", "epimer_kron,regmean", "--scale", "1", "--json"]
    rows = json.loads(assert_done(run("sweep", write(here, curved=True), *asked)))["data"]
    for row in rows:
        assert_done(run("merge", write(here, curved=True, merge_method=row["method"]), row["method"], "-q"))
        for task, score in row["tasks"].items():
            model = tiny.loaded(here.parent / "models", task, here / row["method"])
            assert score == pytest.approx(tiny.judge(model, rows_of(here, task, "test"))[0], abs=1 / 39)


OTHER = """
import torch
from torch import nn
from epimer.evaluation.suite import Split, Suite, SuiteTask

def make():
    data = Split(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
    tasks = [SuiteTask(name, ["a", "b"], {"train": data, "val": data, "test": data}) for name in "xy"]
    states = [dict(nn.Linear(2, 2).state_dict()) for _ in range(3)]
    return Suite("linear", states[0], states[1:], tasks, lambda state, task: nn.Linear(2, 2))
"""


def test_a_suite_of_other_models_is_refused(here, monkeypatch):
    (here / "my_linear.py").write_text(OTHER)
    monkeypatch.syspath_prepend(here)
    words = ("my_linear:make is of other models", "lacks 2 of its 2 tensors", "'weight'", "the same base")
    assert_refused(run("sweep", write(here), "--eval", "my_linear:make", "--methods", "average", "-q"), *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--eval", "suite.yaml", "--methods", "tvs"], ("There is no method 'tvs'", "Did you mean 'tsv'?")),
        (
            ["--eval", "suite.yaml", "--methods", "epimer_kron"],
            ("epimer_kron needs kronecker curvature", "there is none"),
        ),
        (["--eval", "suite.yaml", "--methods", ","], ("--methods names nothing",)),
        (["--eval", "suite.yaml", "--scale", "1;2"], ("--scale must be values with commas between them", "'1;2'")),
        (["--eval", "suite.yaml", "--rank", "1.5"], ("--rank must be values with commas",)),
        (["--eval", "suite.yaml", "--rank", "0", "--methods", "tsv"], ("'rank' parameter of tsv", "at least 1")),
        (["--eval", "no.yaml"], ("no.yaml",)),
        (["--eval", "agreement"], ("agreement needs inputs: write agreement:SUITE",)),
        (["--eval", "one.yaml"], ("one.yaml has 1 tasks, and 2 models are merged",)),
        (["--eval", "agreement:one.yaml"], ("one.yaml has 1 tasks, and 2 models are merged",)),
        (["--eval", "no-val.yaml", "--methods", "tsv"], ("words: task 'pace' has no val data, which a sweep needs",)),
        (["--eval", "no-test.yaml", "--methods", "tsv"], ("words: task 'pace' has no test data, which a sweep needs",)),
        ([], ("a sweep needs something to compare merges by: --eval",)),
    ],
)
def test_a_sweep_that_cannot_be_made_is_refused_in_one_line(here, options, words):
    root = here.parent / "models"
    for name, change in {
        "one": lambda suite: suite["tasks"].pop(),
        "no-val": lambda suite: suite["tasks"][1]["data"].pop("val"),
        "no-test": lambda suite: suite["tasks"][1]["data"].pop("test"),
    }.items():
        suite = tiny.suite_of()
        change(suite)
        (root / f"{name}.yaml").write_text(yaml.safe_dump(suite))
    assert_refused(run("sweep", write(here), *options, "--keep-best", "best", "-o", "found.json"), *words)
    assert written(here) == []


def test_nothing_is_replaced_that_is_not_ours(here):
    (here / "taken").mkdir()
    (here / "taken" / "thesis.txt").write_text("mine")
    asked = ["--eval", "suite.yaml", "--methods", "average", "--scale", "1"]
    assert_refused(run("sweep", write(here), *asked, "--keep-best", "taken", "-o", "found.json"), "taken", "exists")
    assert written(here) == ["taken", "taken/thesis.txt"]


@pytest.mark.parametrize("place", [("--keep-best", "taken"), ("-o", "no/found.json")])
def test_places_that_cannot_be_written_are_refused_before_the_work(here, monkeypatch, place):
    (here / "taken").mkdir()
    (here / "taken" / "thesis.txt").write_text("mine")
    monkeypatch.setattr("epimer.diagnosis.sweep.compare", lambda *args, **given: pytest.fail("worked first"))
    assert run("sweep", write(here), "--eval", "suite.yaml", "--methods", "average", *place).code == 2


def test_losses_are_shown_as_losses(here):
    root = here.parent / "models"
    (root / "loss.yaml").write_text(yaml.safe_dump(tiny.suite_of(metric="loss")))
    asked = ["--eval", "loss.yaml", "--methods", "average", "--scale", "1", "-o", "found.json"]
    out = assert_done(run("sweep", write(here), *asked))
    average = json.loads((here / "found.json").read_text())["best"]["average"]
    assert f"{abs(average):.3f}" in out


def test_tasks_of_different_metrics_are_refused(here):
    described = tiny.suite_of()
    described["tasks"][0]["metric"] = "loss"
    (here.parent / "models" / "mixed.yaml").write_text(yaml.safe_dump(described))
    assert run("sweep", write(here), "--eval", "mixed.yaml", "--methods", "average", "--scale", "1").code == 2


# adapters


def test_adapters_are_diagnosed_swept_and_merged_like_whole_models(here):
    peft = pytest.importorskip("peft")
    root = here.parent / "models"
    for seed, task in enumerate(tiny.TASKS):
        torch.manual_seed(seed)
        base = transformers.BertForPreTraining.from_pretrained(root / "base")
        config = peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
        adapted = peft.get_peft_model(base, config)
        adapted.save_pretrained(root / f"adapter-{task}")
        adapted.merge_and_unload().save_pretrained(root / f"whole-{task}")
    forms = {"adapters": "base+adapter-{}", "wholes": "whole-{}"}
    rules = {"rules": [["bert.embeddings.*", "copy"]]}
    found = {}
    for name, form in forms.items():
        models = [{"model": form.format(task)} for task in tiny.TASKS]
        recipe = write(here, f"{name}.yaml", models=models, **rules)
        assert_done(run("diagnose", recipe, "--out", f"{name}.json", "-q"))
        asked = ["--eval", "suite.yaml", "--methods", "tsv,average", "--scale", "1,2", "--keep-best", name, "--json"]
        swept = json.loads(assert_done(run("sweep", recipe, *asked)))
        found[name] = json.loads((here / f"{name}.json").read_text()), swept
    one, two = (found[name] for name in forms)
    assert [len(layer["norms"]) for layer in one[0]["layers"].values()] == [2] * len(two[0]["layers"])
    named = dict.fromkeys(("models", "recipe", "advice"), "")
    assert_close(one[0]["layers"], two[0]["layers"])
    assert_close(one[0] | named, two[0] | named)
    assert one[1]["data"] == two[1]["data"]
    first, second = (load_file(here / name / "model.safetensors") for name in forms)
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[name], W, atol=1e-5) for name, W in second.items())
