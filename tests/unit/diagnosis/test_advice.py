"""The recommendation in words: each sentence where it belongs, with numbers computed here, and nowhere else."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import epimer
from epimer.diagnosis.advice import ADVISED, advise, choice
from epimer.records import Forecast

SHAPES = {"one.weight": (20, 16), "two.weight": (16, 24)}
NAMES = ("cook", "poet", "judge", "nurse")


def draw(seed, rank=None, size=0.05):
    """A task vector of every matrix, of all directions or of some."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (m, n) in SHAPES.items():
        if rank is None:
            found[name] = size * torch.randn(m, n, generator=generator, dtype=torch.float64)
        else:
            left, right = (torch.randn(d, rank, generator=generator, dtype=torch.float64) for d in (m, n))
            found[name] = size * left @ right.T
    return found


BASE = draw(0, size=1.0)


def moved(*steps):
    return [{name: BASE[name] + step[name] for name in BASE} for step in steps]


def diagnosis(models, **given):
    return epimer.diagnose_state_dicts(BASE, models, names=NAMES[: len(models)], **{"rank": 8} | given)


def said(found, kind):
    return [advice.text for advice in found.advice if advice.kind == kind]


def size(model):
    return np.sqrt(sum(float((model[name] - BASE[name]).square().sum()) for name in BASE))


def kronecker(count, same=False):
    generator = torch.Generator().manual_seed(9)

    def made(d):
        X = torch.randn(2 * d, d, generator=generator, dtype=torch.float64) * torch.logspace(0, 1, d)
        return torch.eye(d, dtype=torch.float64) if same else X.T @ X

    return [{name: epimer.Kronecker(G=made(m), A=made(n)) for name, (m, n) in SHAPES.items()} for _ in range(count)]


@pytest.fixture(scope="module")
def plain():
    """Three models of one size that have nothing in common."""
    return diagnosis(moved(draw(1), draw(2), draw(3)))


def test_nothing_is_minded_where_nothing_is_wrong(plain):
    assert said(plain, "warning") == []
    assert [advice.kind for advice in plain.advice] == ["take", "take", "note"]


def test_the_lowest_forecast_is_taken_and_the_others_are_beside_it():
    found = diagnosis(moved(draw(1), draw(2), draw(3)), curvature=kronecker(3))
    losses = {name: forecast.mean_at_scale for name, forecast in found.forecast.items()}
    first, *others = sorted(("average", "tsv", "epimer_free", "regmean", "epimer_kron"), key=losses.get)
    scale, why = found.forecast[first].scale, f"the lowest forecast, {losses[first]:.2f}"
    beside = ", ".join(f"{name} {losses[name]:.2f} at {found.forecast[name].scale:g}" for name in others)
    assert said(found, "take")[0] == f"{first} at scale {scale:g}: {why} (others at their own best scales: {beside})."
    assert choice(found) == (first, scale, why)
    alone = diagnosis(moved(draw(1), draw(2)), methods=["average"])
    assert said(alone, "take")[0].endswith(f"the lowest forecast, {alone.forecast['average'].mean_at_scale:.2f}.")


def forecast(mean, at_scale=None):
    return Forecast((mean, mean), mean, mean, 1.5, mean if at_scale is None else at_scale)


def test_a_method_that_is_not_scaled_is_chosen_by_its_forecast_at_scale_1(plain):
    every = {"average": forecast(0.4, 0.1), "tsv": forecast(0.3, 0.2)}
    for kind in ("kronecker", "task-gram"):
        found = replace(plain, forecast=every, curvature=kind)
        assert choice(found) == ("average", 1.5, "the lowest forecast, 0.10")
        assert choice(found, scaled=False) == ("tsv", 1.0, "the lowest forecast, 0.30")


RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "advice_is_right-seed0-2026-11-17.json"


def test_the_rule_without_data_is_told_with_the_numbers_that_were_measured(plain):
    """Of the candidates without data, each at its best scale: how often each was best; and the forecasts of both."""
    rows = json.loads(RESULTS.read_text())["rows"]
    sets = [{name: row["best"][name] for name in ("average", "tsv", "epimer_free")} for row in rows]
    free, tsv = (sum(scores[name] == max(scores.values()) for scores in sets) for name in ("epimer_free", "tsv"))
    every = {"average": forecast(0.4), "tsv": forecast(0.04, 0.01), "epimer_free": forecast(0.09, 0.07)}
    found = advise(replace(plain, forecast=every))
    assert not found.ranks_methods
    text = said(found, "take")[0]
    assert text.startswith("epimer_free at scale 1.5: without data forecasts do not rank methods;")
    assert f"on {len(sets)} sets" in text
    assert f"{free} times, tsv {tsv} times" in text
    assert text.endswith("(its forecast is 0.07 at 1.5, and tsv's is 0.01 at 1.5).")
    lowest = advise(replace(plain, forecast={**every, "tsv": forecast(0.2)}))
    assert said(lowest, "take")[0].endswith("(its forecast is 0.07 at 1.5).")


def test_without_two_sided_curvature_epimer_free_is_taken_whatever_is_forecast(plain):
    scale = plain.forecast["epimer_free"].scale
    assert choice(plain) == ("epimer_free", scale, ADVISED)
    assert choice(plain, scaled=False) == ("epimer_free", 1.0, ADVISED)
    assert said(plain, "take")[0].startswith(f"epimer_free at scale {scale:g}: {ADVISED} (its forecast is ")
    every = {"average": forecast(0.4), "tsv": forecast(0.1), "epimer_free": forecast(0.3)}
    for kind, taken in {
        "task-gram": ("epimer_free", 1.5), "diagonal": ("epimer_free", 1.5), "samples": ("epimer_free", 1.5),
        "kronecker": ("tsv", 1.5), "ekfac": ("tsv", 1.5),
    }.items():  # fmt: skip
        assert choice(replace(plain, forecast=every, curvature=kind))[:2] == taken
    asked = {name: every[name] for name in ("average", "tsv")}
    assert choice(replace(plain, forecast=asked)) == ("tsv", 1.5, "the lowest forecast, 0.10")
    only = {"epimer_free": every["epimer_free"]}  # its scale alone is left to choose
    assert choice(replace(plain, forecast=only)) == ("epimer_free", 1.5, "the lowest forecast, 0.30")


@pytest.mark.parametrize("noise", [None, 0.0, 0.001, 0.005])
def test_models_that_do_not_differ_are_averaged(noise):
    """One model, copies and near-copies: a basis of rank k would leave directions of all of them out."""
    steps = [first := draw(1)]
    if noise is not None:
        steps += [{n: first[n] + draw(s, size=noise)[n] for n in first} for s in (2, 3)]
    models = moved(*steps)
    found = diagnosis(models)
    method, scale, why = choice(found)
    assert (method, scale, why) == ("average", 1.0, "the models do not differ, and it keeps every direction of them")
    assert said(found, "take")[0] == f"average at scale 1: {why}."
    mean = {name: sum(model[name] for model in models) / len(models) for name in BASE}

    def distance(method, **rank):
        merged = epimer.merge_state_dicts(BASE, models, method, **rank)
        return size({name: BASE[name] + merged[name] - mean[name] for name in BASE}) / size(mean)

    assert distance(method) < 1e-12 < 0.2 < distance("epimer_free", rank=3)
    other = replace(found, forecast={name: found.forecast[name] for name in ("tsv", "epimer_free")})
    assert choice(other).why.startswith("the lowest forecast, 0.00")


def test_near_copies_beside_another_model_do_not_make_all_alike():
    assert choice(diagnosis(moved(draw(1), draw(1), draw(2)))).method == "epimer_free"


def test_with_curvature_epimer_free_is_one_of_the_others(plain):
    every = {"tsv": forecast(0.3), "epimer_kron": forecast(0.1), "epimer_free": forecast(0.2)}
    found = advise(replace(plain, forecast=every, curvature="kronecker"))
    assert said(found, "take")[0].endswith(
        "0.10 (others at their own best scales: epimer_free 0.20 at 1.5, tsv 0.30 at 1.5)."
    )


def test_measuring_is_advised_only_where_nothing_was_measured(plain):
    text = "measure curvature if you have data, even unlabelled (`epimer curvature`): a few hundred samples a task."
    assert said(plain, "take")[1:] == [text]
    measured = diagnosis(moved(draw(1), draw(2), draw(3)), curvature=kronecker(3))
    assert not any("measure" in text for text in said(measured, "take"))


SMALL = "of F: curvature moves the mean by little on these coordinates"


def measured_lost(found, method, models, curvature):
    """The forecast of a merge at its best scale in the measured and in the task vectors' own curvature, dense."""
    rank, row = found.rank, epimer.describe_method(method)
    given = {name: value for name, value in {"rank": rank, "iterations": 8}.items() if name in row.defaults}
    merged = epimer.merge_state_dicts(
        BASE, models, method, curvature=curvature if row.needs_curvature else None, **given
    )

    def lost(model, factors, scale):
        distances = []
        for measured in (True, False):
            part = whole = 0.0
            for name in BASE:
                D = (model[name] - BASE[name]).numpy()
                x = scale * (merged[name] - BASE[name]).numpy()
                U, sigma, Vh = np.linalg.svd(D, full_matrices=False)
                k = min(rank, min(D.shape) // len(models))
                leading = (U[:, :k] * sigma[:k]) @ Vh[:k]
                G, A = leading @ leading.T, leading.T @ leading
                if measured:
                    G, A = factors[name].G.numpy(), factors[name].A.numpy()
                part, whole = part + np.sum((x - D) * (G @ (x - D) @ A)), whole + np.sum(D * (G @ D @ A))
            distances.append(np.sqrt(part / whole))
        return np.mean(distances) ** 2

    scales = [found.forecast[method].scale + step for step in (-0.05, 0, 0.05)]
    return min(np.mean([lost(*pair, scale) for pair in zip(models, curvature, strict=True)]) for scale in scales)


def test_a_small_eta_does_not_make_tsv_as_good():
    """One curvature for all: the flat mean is the best mean, η is 0, and tsv is still not that mean."""
    models, curvature = moved(draw(1), draw(2), draw(3)), kronecker(1) * 3
    found = diagnosis(models, curvature=curvature)
    assert found.total.eta == pytest.approx(0, abs=1e-9 * found.total.flat_objective)
    tsv, kron = (measured_lost(found, method, models, curvature) for method in ("tsv", "epimer_kron"))
    assert tsv > 1.2 * kron
    assert not any("as good" in text for text in said(found, "take"))
    assert said(found, "note")[0] == (
        f"η is 0.0% {SMALL}, yet tsv's own coefficients are worse (forecast {tsv:.2f} at scale "
        f"{found.forecast['tsv'].scale:g}, epimer_kron {kron:.2f} at {found.forecast['epimer_kron'].scale:g})."
    )


def test_tsv_is_as_good_where_its_forecast_is():
    """Task vectors that share no direction under flat curvature: all methods merge them alike, up to scale."""
    generator, steps = torch.Generator().manual_seed(5), [{}, {}, {}]
    for name, shape in SHAPES.items():
        U, V = (torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q for d in shape)
        for t, one in enumerate(steps):
            one[name] = 0.1 * U[:, 3 * t : 3 * t + 3] @ V[:, 3 * t : 3 * t + 3].T
    models, curvature = moved(*steps), kronecker(3, same=True)
    found = diagnosis(models, curvature=curvature)
    tsv, kron = (measured_lost(found, method, models, curvature) for method in ("tsv", "epimer_kron"))
    assert tsv == pytest.approx(kron, rel=0.01)
    texts = [text for text in said(found, "take") if "as good" in text]
    assert len(texts) == 1
    assert texts[0].startswith(f"η is 0.0% {SMALL}; tsv is as good (forecast {tsv:.2f} at scale ")
    assert re.search(rf", \w+ {kron:.2f} at [\d.]+\) and needs no data\.$", texts[0])
    worse = {**found.forecast, "tsv": replace(found.forecast["tsv"], mean_at_scale=1.06 * kron)}
    assert not any("as good" in text for text in said(advise(replace(found, forecast=worse)), "take"))


def diagonal(count, same):
    generator = torch.Generator().manual_seed(4)

    def made():
        return {n: epimer.Diagonal(torch.rand(s, generator=generator, dtype=torch.float64)) for n, s in SHAPES.items()}

    return [made()] * count if same else [made() for _ in range(count)]


def test_a_diagonal_never_says_that_tsv_is_as_good():
    """Its form ranks merges backwards, so neither it nor a small η compares tsv with anything."""
    found = diagnosis(moved(draw(1), draw(2), draw(3)), curvature=diagonal(3, same=True))
    assert found.total.eta_fraction < 1e-9
    assert not any("as good" in advice.text for advice in found.advice)
    assert said(found, "note")[0] == f"η is 0.0% {SMALL}; it does not compare with tsv's own coefficients."


def test_a_large_eta_is_the_share_of_the_conflict_that_curvature_removes():
    found = diagnosis(moved(draw(1), draw(2), draw(3)), curvature=kronecker(3))
    share = found.total.eta / found.total.flat_objective
    assert share > 0.05
    assert said(found, "note")[0] == f"η is {share:.0%} of F: this curvature removes that share of the conflict."
    for eta, small in ((0.049, True), (0.051, False)):
        edge = advise(replace(found, total=replace(found.total, eta=eta, flat_objective=1.0)))
        assert any(text.startswith(f"η is {eta:.1%} {SMALL}") for text in said(edge, "note")) == small
        assert any("removes that share" in text for text in said(edge, "note")) != small


def test_curvature_of_a_basis_forecasts_nothing(plain):
    found = advise(replace(plain, forecast={}, curvature="ggn"))
    assert said(found, "take") == []
    assert said(found, "note")[0] == "curvature is known inside its basis only, so nothing is forecast."


def test_copies_are_near_copies():
    first, noise = draw(1), draw(2, size=0.005)
    second = {name: first[name] + noise[name] for name in first}
    models = moved(first, draw(3), second)
    vectors = [np.concatenate([(m[n] - BASE[n]).numpy().ravel() for n in BASE]) for m in (models[0], models[2])]
    cosine = vectors[0] @ vectors[1] / np.linalg.norm(vectors[0]) / np.linalg.norm(vectors[1])
    texts = [text for text in said(diagnosis(models), "warning") if "near-copies" in text]
    assert texts == [f"cook and judge are near-copies (cosine {cosine:.2f}): count them as one."]
    found = diagnosis(moved(draw(1), draw(1), draw(1)))
    pairs = ["cook and poet", "cook and judge", "poet and judge"]
    assert said(found, "warning") == [f"{pair} are near-copies (cosine 1.00): count them as one." for pair in pairs]


def test_a_model_that_equals_the_base_is_to_be_left_out():
    still = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    found = diagnosis(moved(draw(1), still, draw(2)))
    assert said(found, "warning")[0] == "poet equals the base in every matrix: leave it out."
    assert sum("equals the base" in text for text in said(found, "warning")) == 1
    assert not any("further than" in text or "near-copies" in text for text in said(found, "warning"))
    assert all(np.isfinite([forecast.mean for forecast in found.forecast.values()]))


def test_a_model_that_moved_ten_times_further_is_named():
    models = moved(draw(1, size=0.01), draw(2, size=0.1), draw(3, size=0.01))
    times = size(models[1]) / np.median([size(models[0]), size(models[2])])
    found = diagnosis(models)
    assert (
        said(found, "warning")[0]
        == f"poet moved {times:.0f}x further than the others: lower its weight or leave it out."
    )
    assert 9 < times < 11
    assert sum("further than the others" in text for text in said(found, "warning")) == 1
    nearly = diagnosis(moved(draw(1, size=0.01), draw(2, size=0.028), draw(3, size=0.01)))
    assert not any("further than the others" in text for text in said(nearly, "warning"))


def test_a_model_far_from_the_base_is_asked_after():
    models = moved(draw(1, size=0.45), draw(2, size=0.6))
    share = size(models[1]) / np.sqrt(sum(float(W.square().sum()) for W in BASE.values()))
    texts = [text for text in said(diagnosis(models), "warning") if "base's norm" in text]
    assert texts == [f"poet moved by {share:.0%} of the base's norm: is it a model of this base?"]


def test_the_task_with_the_worst_forecast_is_named(plain):
    uneven = Forecast((0.1, 0.1, 0.9), 0.37, 0.9, 1.0, 0.37)
    found = advise(replace(plain, forecast={"tsv": uneven}))
    assert said(found, "warning") == ["judge has the worst forecast under tsv at scale 1: 0.90, 0.37 on average."]
    even = Forecast((0.3, 0.3, 0.4), 0.33, 0.4, 1.0, 0.33)
    assert said(advise(replace(plain, forecast={"tsv": even})), "warning") == []


def test_the_rank_that_keeps_nine_tenths_of_every_task_is_named():
    models = moved(draw(1, rank=4), draw(2, rank=3))
    found = diagnosis(models)
    assert said(found, "note") == ["k=4 keeps 100% of every task, or more."]
    kept = []
    for model in models:
        left = whole = 0.0
        for name in BASE:
            deltas = [(other[name] - BASE[name]).numpy() for other in models]
            parts = [np.linalg.svd(D) for D in deltas]
            U = np.linalg.qr(np.concatenate([part[0][:, :2] for part in parts], 1))[0]
            V = np.linalg.qr(np.concatenate([part[2][:2].T for part in parts], 1))[0]
            D = (model[name] - BASE[name]).numpy()
            left, whole = left + np.sum((U.T @ D @ V) ** 2), whole + np.sum(D**2)
        kept.append(left / whole)
    assert found.energy["2"] == pytest.approx(kept)
    assert min(kept) < 0.9, "k=2 is not enough, or the sentence would name it"
    short = diagnosis(models, rank=2)
    least = int(np.argmin(kept))
    assert said(short, "note") == [
        f"k=2 keeps {min(kept):.0%} of {NAMES[least]}, the least of any task; what it leaves is not merged."
    ]


def test_advice_is_part_of_the_plain_data(plain):
    assert list(plain.to_dict()["advice"]) == [{"kind": one.kind, "text": one.text} for one in plain.advice]
