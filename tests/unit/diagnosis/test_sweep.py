"""Sweeps: every row of the table against a merge and a score made here; what is chosen, on what, what is refused."""

import json
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import epimer
import models as made
from epimer.api import sweep_state_dicts as sweep
from epimer.api.sweeping import STEPS
from epimer.diagnosis import choice as auto
from epimer.diagnosis import sweep as sweeping
from epimer.diagnosis.advice import ADVISED
from epimer.diagnosis.sweep import SCALES
from epimer.engine.options import RunOptions
from epimer.errors import EpimerError, ParameterError, RecipeError
from epimer.evaluation.judges import SplitScores, by_agreement, by_function, by_suite, evaluator
from epimer.evaluation.suite import Split, Suite, SuiteTask
from epimer.opened_files import OpenedFile
from epimer.plan.merge import open_models
from epimer.progress import Progress
from epimer.recipe.load import load_recipe, open_recipe
from trained import make_suite, network


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return make_suite(tmp_path_factory.mktemp("suite"))


def resolve(recipe):
    """What a recipe leaves open, chosen."""
    loaded, folder = open_recipe(recipe)
    judge = None if loaded.eval is None else evaluator(loaded.eval, folder)
    return auto.resolve(loaded, open_models(loaded, folder=folder), judge, RunOptions())


def steps_of(method):
    """Settings are compared after a few steps of conjugate gradients."""
    known = {parameter.name for parameter in epimer.describe_method(method).parameters}
    return {"iterations": STEPS} if "iterations" in known else {}


@torch.no_grad()
def accuracies(state, suite, split):
    """The share that each task's network gets right with this state dict."""
    found = []
    for task in suite.tasks:
        x, y = task.splits[split].x, task.splits[split].y
        found.append(float((network(state, task)(x).argmax(1) == y).double().mean()))
    return found


# -- the table


def written_trial(tried):
    """Return a trial as a sweep's file has it: without a KL where none was measured, tasks where it saw test data."""
    trial = asdict(tried.record())
    trial["tasks"] = trial["tasks"] if tried.test is not None else None
    return {name: value for name, value in trial.items() if name != "kl" or value is not None}


def test_the_table_equals_merging_and_scoring_each_setting_by_hand(suite):
    scales, ranks = (2.0, 0.5, 1.0), (1, 3)
    found = sweep(
        suite.base, suite.models, by_suite(suite), methods=["average", "tsv", "epimer_free"], scales=scales,
        ranks=ranks, weights=[1.0, 2.0, 1.0], evaluation="by labels",
    )  # fmt: skip
    wanted = [("average", None)] + [(method, rank) for method in ("tsv", "epimer_free") for rank in ranks]
    assert [(one.method, one.rank, one.scale) for one in found.tried] == [
        (method, rank, scale) for method, rank in wanted for scale in sorted(scales)
    ]
    by_hand = {}
    for one in found.tried:
        given = {} if one.rank is None else {"rank": one.rank}
        merged = epimer.merge_state_dicts(
            suite.base, suite.models, one.method, scale=one.scale, weights=[1, 2, 1], **given, **steps_of(one.method)
        )
        by_hand[one.method, one.rank, one.scale] = merged
        assert one.validation.all.average == pytest.approx(np.mean(accuracies(merged, suite, "val")), abs=1e-12)
        assert one.validation.kl == {}
    for method, rank in wanted:
        rows = [one for one in found.tried if (one.method, one.rank) == (method, rank)]
        (final,) = (one for one in rows if one.test is not None)
        assert final.validation.all.average == max(one.validation.all.average for one in rows)
        expected = accuracies(by_hand[method, rank, final.scale], suite, "test")
        plain = asdict(final.record())
        assert plain["tasks"] == pytest.approx(dict(zip(("task0", "task1", "task2"), expected, strict=True)))
        assert plain["average"] == pytest.approx(np.mean(expected))
        assert plain["worst"] == min(expected)
        spread = np.sqrt(sum(p * (1 - p) / 200 for p in expected)) / 3  # of a mean of three binomial shares
        assert plain["high"] - plain["low"] == pytest.approx(2 * 1.96 * spread, rel=0.15)
        assert all(one.record().average is None for one in rows if one is not final)
    assert found.best.validation.all.average == max(one.validation.all.average for one in found.tried)
    written = json.loads(json.dumps(found.to_dict()))
    assert written["data"] == [written_trial(one) for one in found.tried]
    assert (written["kind"], written["eval"], written["best"]) == ("sweep", "by labels", written_trial(found.best))


@pytest.mark.parametrize("kind", [None, "diagonal", "kronecker", "samples"])
def test_one_merge_at_every_scale_is_the_merge_at_that_scale(kind):
    base = made.make_base()
    models, curvature = made.make_models(base), made.make_curvature(base, kind)
    rows = [epimer.describe_method(name) for name in epimer.list_methods() if name != "greedy_soup"]
    rows = [row for row in rows if row.models[1] is None]  # there are three models
    methods = [row.name for row in rows if (row.curvature if row.needs_curvature else None) == kind]
    seen = {}

    def remember(state, split):
        if split == "val":
            seen.setdefault(len(seen), state)
        return SplitScores({"task": torch.zeros(1)})

    rules = [("conv.weight", "skip"), ("block.0.bias", "copy")]
    sweep(base, models, remember, methods=methods, scales=[0.5, 2.0], curvature=curvature, rules=rules, ranks=[2])
    states = iter(seen.values())
    for method in methods:
        known = {parameter.name for parameter in epimer.describe_method(method).parameters}
        given = steps_of(method) | ({"rank": 2} if "rank" in known else {})
        for scale in (0.5, 2.0):
            expected = epimer.merge_state_dicts(
                base, models, method, scale=scale, curvature=curvature, rules=rules, **given
            )
            state = next(states)
            assert state.keys() == expected.keys()
            for name, W in expected.items():
                assert state[name].dtype == W.dtype
                assert torch.allclose(state[name], W, atol=3e-6, rtol=1e-5), (method, scale, name)
    assert next(states, None) is None


def test_bases_are_built_once_per_rank_and_deltas_serve_every_scale(suite, monkeypatch):
    counts = {"build_bases": [], "merge_in_memory": []}
    for name, calls in counts.items():
        real = getattr(sweeping, name)
        monkeypatch.setattr(
            sweeping,
            name,
            lambda *args, real=real, calls=calls, **given: (calls.append(given), real(*args, **given))[1],
        )
    curvature = [
        {n: epimer.Kronecker(A=torch.eye(W.shape[1]), G=torch.eye(W.shape[0])) for n, W in m.items() if W.dim() == 2}
        for m in suite.models
    ]
    methods = ["epimer_free", "epimer_kron", "tsv", "average"]
    found = sweep(
        suite.base, suite.models, by_suite(suite), methods=methods, scales=SCALES, ranks=[1, 2], curvature=curvature
    )
    assert len(found.tried) == (2 + 2 + 2 + 1) * len(SCALES)
    assert [call["rank"] for call in counts["build_bases"]] == [1, 2]
    assert len(counts["merge_in_memory"]) == 2 + 2 + 2 + 1


# -- what is chosen, and on what

STEP = {"w": torch.ones(6, 6)}


def scale_of(state):
    return round(float(state["w"][0, 0]), 4)


def sweep_of(validation, test=None, **given):
    """Sweep one average whose entries are its scale; return the sweep and the scales that each split was asked for."""
    asked = {"val": [], "test": []}

    def evaluate(state, split):
        asked[split].append(scale_of(state))
        score = validation if split == "val" else test or validation
        return SplitScores({"one": torch.tensor([score(scale_of(state))])})

    base = {"w": torch.zeros(6, 6)}
    return sweep(base, [STEP, STEP], evaluate, **{"methods": ["average"]} | given), asked


def test_settings_are_chosen_on_val_and_only_finalists_see_test():
    found, asked = sweep_of(
        lambda s: -abs(s - 0.7),
        lambda s: 100 * s,
        methods=["average", "task_arithmetic"],
        scales=[2.0, 0.35, 0.7],
        weights=[1.0, 1.0],
    )
    # task_arithmetic sums the two task vectors, so that 0.35 of it is 0.7 of their mean
    assert asked["val"] == [2.0, 0.35, 0.7, 4.0, 0.7, 1.4]
    assert asked["test"] == [0.7, 0.7]
    assert [(one.method, one.scale) for one in found.finalists] == [("average", 0.7), ("task_arithmetic", 0.35)]
    assert found.best.test.all.average == pytest.approx(70.0)
    assert (found.best.method, found.best.scale) == ("average", 0.7)  # of two equals the first


def test_climbing_stops_after_two_that_are_worse_and_a_list_is_tried_whole():
    def peaked(s):
        return -abs(s - 1.75) + (10 if s == 0.3 else 0)

    found, asked = sweep_of(peaked)
    assert asked["val"] == [1.2, 1.0, 1.5, 1.75, 2.0, 2.5, 0.85, 0.7]
    assert [one.scale for one in found.tried] == [0.7, 0.85, 1.0, 1.2, 1.5, 1.75, 2.0, 2.5]
    assert found.best.scale == 1.75
    found, asked = sweep_of(peaked, scales=SCALES)
    assert asked["val"] == list(SCALES)
    assert found.best.scale == 0.3


def test_climbing_without_curvature_takes_the_data_free_methods_and_with_it_those_that_use_it(suite):
    free = ["average", "tsv", "iso_c", "epimer_free"]
    for kind, more in {None: [], "diagonal": ["fisher", "epimer"], "kronecker": ["regmean", "epimer_kron"]}.items():
        wanted = [row.name for row in sweeping.check_methods(None, kind)]
        assert wanted == free + more


# -- agreement


def log_softmax(logits):
    logits = logits.double().numpy()
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@torch.no_grad()
def agreed(own, theirs):
    """How often two predictions agree, and KL(own || theirs), in float64."""
    p, q = log_softmax(own), log_softmax(theirs)
    return np.mean(p.argmax(-1) == q.argmax(-1)), np.mean((np.exp(p) * (p - q)).sum(-1))


def unlabelled(suite):
    """The same inputs with labels that are all wrong or no class at all."""
    tasks = [
        replace(task, splits={name: Split(split.x, -split.y - 5) for name, split in task.splits.items()})
        for task in suite.tasks
    ]
    return replace(suite, tasks=tasks, batch=64)


@pytest.mark.parametrize("split", ["val", "test"])
def test_agreement_equals_softmax_and_kl_by_hand_and_reads_no_label(suite, split):
    judge = by_agreement(unlabelled(suite))
    merged = epimer.merge_state_dicts(suite.base, suite.models, "tsv", scale=0.8)
    for state in (merged, suite.base, suite.models[0]):
        judged = judge(state, split)
        for task, model in zip(suite.tasks, suite.models, strict=True):
            x = task.splits[split].x
            hits, kl = agreed(network(model, task)(x).detach(), network(state, task)(x).detach())
            assert len(judged.scores[task.name]) == len(x)
            assert float(judged.scores[task.name].mean()) == pytest.approx(hits)
            assert judged.kl[task.name] == pytest.approx(kl, rel=1e-4, abs=1e-6)
    assert (float(judged.scores["task0"].mean()), judged.kl["task0"]) == (1.0, pytest.approx(0, abs=1e-9))
    assert judged.kl["task1"] > 0.1


def test_equal_agreement_is_decided_by_closeness(suite):
    one, two = SplitScores({"a": torch.ones(3)}, {"a": 0.5}), SplitScores({"a": torch.ones(3)}, {"a": 0.25})
    assert two.order > one.order
    judge = by_agreement(replace(suite, tasks=suite.tasks[:1], models=suite.models[:1]))
    near = {n: W + 1.001 * (suite.models[0][n] - W) for n, W in suite.base.items()}
    found = sweep(suite.base, [near], judge, methods=["average"], scales=[1.02, 0.98, 0.999])
    assert {one.validation.all.average for one in found.tried} == {1.0}
    assert found.best.scale == 0.999
    kl = {one.scale: one.record().kl for one in found.tried}
    assert kl[0.999] == min(kl.values())


def test_language_models_agree_token_by_token_where_targets_count():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 7, (9, 5), generator=generator)
    targets = torch.where(torch.rand(9, 5, generator=generator) < 0.4, -100, ids)
    states = [{"weight": torch.randn(7, 7, generator=generator)} for _ in range(2)]

    class Lookup(torch.nn.Embedding):
        def forward(self, inputs):
            return super().forward(inputs)  # 9 x 5 x 7: logits of the token after each

    def lookup(state, task):
        made = Lookup(7, 7)
        made.load_state_dict(dict(state))
        return made

    splits = dict.fromkeys(("val", "test"), Split(ids, targets))
    lm = Suite("lm", states[0], [states[1]], [SuiteTask("poems", [], splits)], lookup, batch=4)
    judged = by_agreement(lm)(states[0], "val")
    counted = ids[targets != -100]
    hits, kl = agreed(states[1]["weight"][counted], states[0]["weight"][counted])
    assert len(judged.scores["poems"]) == len(counted)
    assert float(judged.scores["poems"].mean()) == pytest.approx(hits)
    assert judged.kl["poems"] == pytest.approx(kl, rel=1e-5)


# -- functions of one's own


def test_a_function_of_a_state_dict_and_of_the_split():
    seen = []

    def alone(state):
        return {"a": 0.25, "b": [1, 0, 1, 1], 3: torch.tensor([[0.5], [0.25]])}

    def with_split(state, split):
        seen.append(split)
        return {"a": scale_of(state) if split == "val" else -1.0}

    judged = by_function("m:alone", alone)(STEP, "test")
    assert {task: scores.tolist() for task, scores in judged.scores.items()} == {
        "a": [0.25], "b": [1, 0, 1, 1], "3": [0.5, 0.25],
    }  # fmt: skip
    assert judged.all.average == pytest.approx((0.25 + 0.75 + 0.375) / 3)
    found = sweep({"w": torch.zeros(6, 6)}, [STEP], by_function("m:f", with_split), methods=["average"], scales=[1, 2])
    assert seen == ["val", "val", "test"]
    assert (found.best.scale, found.best.test.all.average) == (2, -1.0)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (0.5, ("m:f returned float, expected a mapping from task to score",)),
        ({}, ("m:f returned dict",)),
        ([("a", 1.0)], ("m:f returned list",)),
        ({"a": "good"}, ("m:f scored 'a' as 'good'", "expected a number, or one per sample")),
        ({"a": 0.5, "b": None}, ("m:f scored 'b' as None",)),
        ({"a": [[1], [1, 2]]}, ("m:f scored 'a'",)),
    ],
)
def test_what_a_function_may_not_return(returned, words):
    with pytest.raises(ParameterError) as caught:
        by_function("m:f", lambda state: returned)(STEP, "val")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), []])
def test_scores_that_are_no_numbers_are_refused(score):
    with pytest.raises(EpimerError):
        by_function("m:f", lambda state: {"a": score})(STEP, "val")


def test_what_fails_in_a_function_is_said_in_one_line():
    def broken(state):
        return state["nothing"]

    with pytest.raises(ParameterError, match=r"m:f failed: KeyError: 'nothing' \(test_sweep.py line \d+\)"):
        by_function("m:f", broken)(STEP, "val")


def test_options_of_a_function_are_not_the_split():
    def scores(state, *, device="cpu"):
        return {"a": 0.5}

    assert by_function("m:f", scores)(STEP, "val").all.average == 0.5


# -- what is refused


def test_methods_that_cannot_be_tried_are_refused(suite):
    def refused(methods, curvature=None):
        with pytest.raises(ParameterError) as caught:
            sweep(suite.base, suite.models, by_suite(suite), methods=methods, scales=[1], curvature=curvature)
        return str(caught.value)

    every = f"`epimer methods` lists all {len(epimer.list_methods())}"
    assert refused(["tvs"]) == f"There is no method 'tvs'. Did you mean 'tsv'? {every}."
    assert refused(["greedy_soup"]) == "greedy_soup chooses by a function of its own; leave it out of a sweep."
    assert refused(["tsv", "epimer_kron"]) == (
        "epimer_kron needs kronecker curvature, and there is none; measure it, or leave epimer_kron out."
    )
    diagonal = [{n: epimer.Diagonal(torch.ones_like(W)) for n, W in model.items()} for model in suite.models]
    assert "regmean needs kronecker curvature, and there is diagonal" in refused(["regmean"], diagonal)
    with pytest.raises(ParameterError, match="'rank' parameter of tsv must be an integer at least 1"):
        sweep(suite.base, suite.models, by_suite(suite), methods=["tsv"], ranks=[0])


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_refused(scale):
    with pytest.raises(ParameterError):
        sweep_of(lambda s: s, scales=[scale])


SUITES = """
def three():
    import test_sweep
    return test_sweep.KEPT["suite"]

def score(state):
    return {"a": float(state["w"].sum())}
"""
KEPT = {}


@pytest.fixture
def entries(suite, tmp_path, monkeypatch):
    """A folder to work in, with a module `sweep_entries` of functions that users would write."""
    (tmp_path / "sweep_entries.py").write_text(SUITES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(KEPT, "suite", suite)
    monkeypatch.setitem(sys.modules, "test_sweep", sys.modules[__name__])
    sys.modules.pop("sweep_entries", None)
    yield tmp_path
    sys.modules.pop("sweep_entries", None)


def test_an_evaluation_is_named_by_suite_agreement_or_function(suite, entries):
    state = suite.models[1]
    labels, agreement = (
        evaluator(text)(state, "val") for text in ("sweep_entries:three", "agreement:sweep_entries:three")
    )
    assert labels.all.accuracies == accuracies(state, suite, "val")
    assert labels.kl == {}
    assert float(agreement.scores["task1"].mean()) == 1.0
    assert agreement.kl.keys() == {"task0", "task1", "task2"}
    assert evaluator("sweep_entries:score")(STEP, "test").all.average == 36.0
    with pytest.raises(ParameterError, match="agreement needs inputs: write agreement:SUITE"):
        evaluator("agreement")
    for text in ("sweep_entries:three", "agreement:sweep_entries:three"):
        with pytest.raises(ParameterError, match="sweep_entries:three has 3 tasks, and 2 models are merged"):
            evaluator(text, count=2)
    with pytest.raises(ParameterError, match=r"no function 'scor'. Did you mean 'score'\?"):
        evaluator("sweep_entries:scor")
    with pytest.raises(ParameterError, match=r"There is no suite 'glyphs'. Did you mean 'glyphs8'\?"):
        evaluator("agreement:glyphs")


@pytest.mark.parametrize("judge", [by_suite, by_agreement])
@pytest.mark.parametrize("split", ["val", "test"])
def test_a_suite_needs_data_to_choose_on_and_to_report_on(suite, judge, split):
    cut = {name: data for name, data in suite.tasks[1].splits.items() if name != split}
    short = replace(suite, tasks=[suite.tasks[0], replace(suite.tasks[1], splits=cut), suite.tasks[2]])
    with pytest.raises(ParameterError, match=f"small: task 'task1' has no {split} data, which a sweep needs; add it"):
        sweep(suite.base, suite.models, judge(short), methods=["average"], scales=[1])


# -- recipes: what is written is what was scored

JUDGE = """
from safetensors.torch import load_file

def near(state):
    wanted = load_file("wanted.safetensors")
    return {"all": -sum(float((state[name].double() - W.double()).square().sum()) for name, W in wanted.items())}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Model folders, and a judge that is nearest to a tsv merge of rank 2 at scale 1.2."""
    base = {name: W for name, W in made.make_base().items() if name in made.MATRICES or name == "block.0.bias"}
    models = made.make_models(base, 2)
    for name, state in {"base": base, "m0": models[0], "m1": models[1]}.items():
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
    save_file(dict(epimer.merge_state_dicts(base, models, "tsv", rank=2, scale=1.2)), tmp_path / "wanted.safetensors")
    (tmp_path / "sweep_judge.py").write_text(JUDGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("sweep_judge", None)
    yield tmp_path
    sys.modules.pop("sweep_judge", None)


def recipe_of(method, *, each=({}, {}), **rest):
    entries = [{"model": f"m{t}", **({"parameters": own} if own else {})} for t, own in enumerate(each)]
    return {"merge_method": method, "base_model": "base", "models": entries, **rest}


def score_of(folder, name):
    """The judge's score of a folder, computed here."""
    wanted = load_file(folder / "wanted.safetensors")
    state = load_file(folder / name / "model.safetensors")
    return -sum(float((state[n].double() - W.double()).square().sum()) for n, W in wanted.items())


KEEPS = [
    (recipe_of("tsv"), {}),
    (recipe_of("tsv"), {"methods": ["average", "tsv"], "ranks": [1, 2], "scales": [0.8, 1.2]}),
    (recipe_of("tsv", parameters={"rank": 2}), {"methods": ["tsv"]}),
    (recipe_of("tsv", each=({"weight": 3.0}, {"weight": 1.0})), {"methods": ["tsv", "average"]}),
    (recipe_of("ties", parameters={"density": 0.7}), {"methods": ["ties"]}),
    (recipe_of("auto", scale="auto"), {"methods": ["tsv"], "ranks": [2], "scales": [1.2]}),
    (recipe_of("task_arithmetic", rules=[["block.0.bias", "skip"]]), {"methods": ["tsv"], "ranks": [2]}),
    (recipe_of("tsv", scale=0.5), {"methods": ["tsv"], "scales": [1.0]}),
    (recipe_of("tsv", parameters={"rank": 2}), {"methods": ["epimer_free"], "scales": [1.2]}),
    (recipe_of("ties", each=({"density": 0.9}, {"density": 0.2})), {"methods": ["ties"]}),
    (recipe_of("ties", each=({"density": 0.9}, {"density": 0.2})), {"methods": ["tsv"]}),
    (recipe_of("tsv", parameters={"weight": 1.0}, each=({"weight": [1.0, 5.0]}, {})), {"methods": ["tsv"]}),
    (recipe_of("task_arithmetic", parameters={"normalize": True, "weight": 1.0}), {"methods": ["task_arithmetic"]}),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "options"), KEEPS)
def test_the_best_that_is_kept_scores_what_the_table_says(folder, recipe, options):
    if recipe.get("rules"):  # of a tensor that is not merged nothing is asked
        wanted = load_file("wanted.safetensors")
        save_file({name: W for name, W in wanted.items() if name != "block.0.bias"}, "wanted.safetensors")
    found = epimer.sweep(recipe, "sweep_judge:near", keep_best="best", progress=False, **options)
    assert score_of(folder, "best") == pytest.approx(found.best.validation.all.average, rel=1e-3, abs=1e-3)
    assert found.best.validation.all.average == max(one.validation.all.average for one in found.tried)


def test_a_sweep_writes_nothing_unless_asked(folder):
    before = sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    found = epimer.sweep(recipe_of("tsv"), "sweep_judge:near", methods=["tsv"], ranks=[1, 2], progress=False)
    assert (found.best.method, found.best.rank, found.best.scale) == ("tsv", 2, 1.2)
    assert found.best.validation.all.average == pytest.approx(0, abs=1e-6)
    assert sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts) == before


@pytest.mark.parametrize(
    ("options", "least"), [({"scales": [0.5, 1.0, 1.2]}, 9), ({}, 15), ({"methods": ["average"], "scales": [1.0]}, 1)]
)
def test_the_bar_counts_all_settings_from_the_start(folder, monkeypatch, options, least):
    shown = []

    class Watched(Progress):
        def begin(self, what, total):
            shown.append((0, total, what))
            return self

        def reach(self, done, total, item):
            shown.append((done, total, item))

    monkeypatch.setattr(sweeping, "Progress", Watched)
    options = {"methods": ["average", "tsv"], "ranks": [1, 2]} | options
    found = epimer.sweep(recipe_of("tsv"), "sweep_judge:near", progress=False, **options)
    (first, start, what), *rest = shown
    assert (first, start, what) == (0, least, "trying")
    assert [done for done, _, _ in rest] == list(range(1, len(found.tried) + 1))
    totals = [total for _, total, _ in rest]
    assert totals == sorted(totals)
    assert least <= totals[0]
    assert totals[-1] == len(found.tried)
    if "scales" in options:
        assert set(totals) == {least}
    else:
        assert len(found.tried) > least, "climbs that go on count too"
    assert rest[0][2].startswith("average, scale ")


def test_a_sweep_opens_and_reads_each_model_once(folder, monkeypatch):
    counts, fill = {}, OpenedFile.fill

    def counted(self, buffer, offset):
        counts[self.path.parent.name] = counts.get(self.path.parent.name, 0) + len(buffer)
        fill(self, buffer, offset)

    monkeypatch.setattr(OpenedFile, "fill", counted)
    methods = ["average", "tsv", "ties", "epimer_free"]
    epimer.sweep(recipe_of("tsv"), "sweep_judge:near", methods=methods, ranks=[1, 2], scales=[1.0], progress=False)
    for name in ("base", "m0", "m1"):
        size = sum(W.nbytes for W in load_file(folder / name / "model.safetensors").values())
        samples = 3 * 4096 * len(load_file(folder / name / "model.safetensors"))  # of fingerprints, at most
        assert size <= counts[name] <= size + min(size, samples)


EVAL = {"eval": "sweep_judge:near"}
AUTO = [
    recipe_of("auto", scale="auto", **EVAL),
    recipe_of("tsv", scale="auto", **EVAL),
    recipe_of("auto", **EVAL),
    recipe_of("tsv", scale="auto", parameters={"rank": 2}, **EVAL),
    recipe_of("auto", scale="auto", parameters={"rank": 2}, **EVAL),
    recipe_of("auto", scale=0.5, **EVAL),
]


@pytest.mark.parametrize("recipe", AUTO)
def test_what_auto_takes_by_eval_scores_what_it_says(folder, recipe):
    chosen, why = resolve(recipe)
    epimer.merge(chosen, "out", progress=False)
    said = float(why.split(": ")[1].split(" on validation data")[0])
    assert score_of(folder, "out") == pytest.approx(said, rel=1e-3, abs=0.0006)


def test_a_recipe_may_not_name_code(folder):
    for text in ("sweep_judge:near", "agreement:sweep_judge:near"):
        with pytest.raises(RecipeError, match=f"'eval: {text}' names Python code, which a recipe may not run"):
            epimer.merge(recipe_of("auto", eval=text), "out", progress=False)
    assert not (folder / "out").exists()


# -- recipes: what auto takes without an evaluation


def forecast_of(folder, method, scale, weights=(1.0, 1.0)):
    """The share of each task's gain that a merge loses in the norm of its leading Gram matrices, computed here."""
    base, *models = (load_file(folder / name / "model.safetensors") for name in ("base", "m0", "m1"))
    merged = epimer.merge_state_dicts(base, models, method, scale=scale, weights=weights, **steps_of(method))
    lost = []
    for model in models:
        part = whole = 0.0
        for name in made.MATRICES:
            D = (model[name] - base[name]).double().numpy()
            E = (merged[name] - base[name]).double().numpy() - D
            U, s, Vh = np.linalg.svd(D, full_matrices=False)
            k = min(D.shape) // 2  # of 32 directions as many as two tasks can have
            L = (U[:, :k] * s[:k]) @ Vh[:k]
            part += np.sum((L.T @ E @ L.T) ** 2)
            whole += np.sum((L.T @ D @ L.T) ** 2)
        lost.append(part / whole)
    return float(np.average(lost, weights=weights))


def test_auto_without_data_takes_epimer_free_at_the_scale_of_its_forecast(folder):
    chosen, why = resolve(recipe_of("auto", scale="auto"))
    grid = [round(0.05 * i, 2) for i in range(1, 81)]
    scale = min(grid, key=lambda scale: forecast_of(folder, "epimer_free", scale))
    assert (chosen.merge_method, chosen.parameters.get("scale", 1.0), chosen.auto) == ("epimer_free", scale, ())
    assert why == f"epimer_free at scale {scale:g}: {ADVISED} (task-gram curvature)"
    epimer.merge(recipe_of("auto", scale="auto"), "one", progress=False)
    epimer.merge(recipe_of("epimer_free", scale=scale), "two", progress=False)
    assert (folder / "one" / "model.safetensors").read_bytes() == (folder / "two" / "model.safetensors").read_bytes()
    scaled, why = resolve(recipe_of("auto", scale=0.5))
    assert (scaled.merge_method, scaled.parameters) == ("epimer_free", {"scale": 0.5})
    assert why == f"epimer_free: {ADVISED} (task-gram curvature)"


def test_auto_averages_copies(folder):
    save_file(load_file(folder / "m0" / "model.safetensors"), folder / "m1" / "model.safetensors")
    chosen, why = resolve(recipe_of("auto", scale="auto"))
    assert (chosen.merge_method, chosen.parameters) == ("average", {})
    assert why.startswith("average at scale 1: the models do not differ")


def test_a_scale_is_chosen_for_the_method_that_is_given(folder):
    grid = [round(0.05 * i, 2) for i in range(1, 81)]
    for method in ("tsv", "iso_c"):
        chosen, why = resolve(recipe_of(method, scale="auto"))
        losses = {scale: forecast_of(folder, method, scale) for scale in grid}
        best = min(losses, key=losses.get)
        assert (chosen.merge_method, chosen.parameters.get("scale", 1.0)) == (method, best)
        assert why == f"{method} at scale {best:g}: the lowest forecast, {losses[best]:.2f} (task-gram curvature)"


def test_a_scale_for_task_arithmetic_is_of_a_sum(folder):
    each = ({"weight": 1.0}, {"weight": 1.0})  # as mergekit's recipes have it
    chosen, _ = resolve(recipe_of("task_arithmetic", each=each, scale="auto"))
    grid = [round(0.05 * i, 2) for i in range(1, 81)]
    best = min(grid, key=lambda scale: forecast_of(folder, "task_arithmetic", scale))
    assert chosen.parameters.get("scale", 1.0) == best


def test_weights_of_a_recipe_count_in_its_diagnosis(folder):
    each = ({"weight": 5.0}, {"weight": 1.0})
    found = epimer.diagnose(recipe_of("tsv", each=each), progress=False)
    assert found.forecast["average"].mean == pytest.approx(forecast_of(folder, "average", 1.0, (5, 1)), rel=1e-4)


def test_recipes_that_cannot_be_chosen_for_are_refused(folder):
    bare = load_recipe({"merge_method": "average", "models": [{"model": "m0"}], "scale": "auto"})
    with pytest.raises(RecipeError, match="a recipe with 'auto' needs the base model"):
        resolve(bare)
    with pytest.raises(ParameterError, match="ties looks at the whole model"):
        resolve(recipe_of("ties", scale="auto"))
    with pytest.raises(ParameterError, match="epimer_kron needs kronecker curvature, and there is task-gram"):
        resolve(recipe_of("epimer_kron", scale="auto"))


def test_the_record_of_a_merge_holds_no_local_path(folder):
    suite = folder / "mine" / "suite.yaml"
    recipe = recipe_of("tsv", eval=str(suite))
    record = epimer.merge(recipe, "out", progress=False)
    assert str(folder) not in record.recipe
    assert yaml.safe_load(record.recipe)["merge_method"] == "tsv"


def test_a_sweep_says_where_the_scale_of_gradient_matching_cancels():
    base = made.make_base(torch.float64)
    models, curvature = made.make_models(base, 2), made.make_curvature(base, "diagonal", 2)
    judge = by_function("norm", lambda state: {"norm": float(state["block.0.weight"].norm())})
    given = {"methods": ["gradient_matching", "fisher"], "scales": [1.0, 2.0], "curvature": curvature}
    found = sweep(base, models, judge, **given)
    assert [note.split(";")[0] for note in found.notes] == [
        "gradient_matching: scale cancels without a prior and without the base's curvature"
    ]
    assert sweep(base, models, judge, parameters={"gradient_matching": {"prior": 0.1}}, **given).notes == []


def test_nothing_is_chosen_by_a_doubtful_task():
    scores = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([0.2])}
    wary = SplitScores(scores, {"a": 0.5, "b": 0.25}, doubtful=frozenset({"a"}))
    assert wary.order == pytest.approx(0.2 - 0.25)
    assert SplitScores(scores, {"a": 0.5, "b": 0.25}).order == pytest.approx(0.35 - 0.375)
    assert wary.all.average == pytest.approx(0.35)
    none_left = SplitScores(scores, {"a": 0.5, "b": 0.25}, doubtful=frozenset("ab"))
    assert none_left.order == pytest.approx(0.35 - 0.375)
