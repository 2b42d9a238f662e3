"""Models of weight 0: their options, their bases, tensors in which they alone have none, and what is still refused."""

import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from epimer.api import make_basis, merge, sweep_state_dicts
from epimer.errors import CurvatureError, TensorError
from epimer.evaluation.judges import by_function
from epimer.testing import required_arguments
from models import make_base, make_curvature, make_models

BASE = make_base(torch.float64)
MODELS = make_models(BASE)
WEIGHTS, OTHERS = [0.7, 0.0, 0.3], [0, 2]


def same(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("ties", {"density": [0.9, 0.5, 0.2]}),
        ("dare", {"density": [0.9, 0.5, 0.2]}),
        ("gradient_matching", {"samples": [10.0, 300.0, 90.0], "prior": 0.1}),
    ],
)
def test_lists_with_one_entry_per_model_lose_its_entry(method, options):
    curvature = make_curvature(BASE, "diagonal") if method == "gradient_matching" else None
    found = epimer.merge_state_dicts(BASE, MODELS, method, weights=WEIGHTS, curvature=curvature, **options)
    options = {name: [v[t] for t in OTHERS] if isinstance(v, list) else v for name, v in options.items()}
    curvature = curvature and [curvature[t] for t in OTHERS]
    pair, weights = [MODELS[t] for t in OTHERS], [WEIGHTS[t] for t in OTHERS]
    assert same(found, epimer.merge_state_dicts(BASE, pair, method, weights=weights, curvature=curvature, **options))


@pytest.mark.parametrize("basis", ["tagged", "tensor"])
def test_a_basis_with_its_directions_is_refused(basis):
    curvature = make_curvature(BASE, "kronecker")
    given = {"method": "epimer_kron", "weights": WEIGHTS, "curvature": curvature}
    built = epimer.build_basis(BASE, MODELS, basis=basis)
    with pytest.raises(CurvatureError, match=r"'block.0.weight' was built with models\[1\] of weight 0; leave"):
        epimer.merge_state_dicts(BASE, MODELS, basis=built, **given)
    pair = epimer.build_basis(BASE, MODELS[:2], basis=basis)  # of the models that have a weight
    given["weights"] = [0.7, 0.3, 0.0]
    expected = epimer.merge_state_dicts(
        BASE, MODELS[:2], "epimer_kron", weights=[0.7, 0.3], curvature=curvature[:2], basis=basis
    )
    assert same(epimer.merge_state_dicts(BASE, MODELS, basis=pair, **given), expected)


def test_nan_in_it_is_refused_and_nothing_but_zeros_is_the_base():
    broken = dict(MODELS[1]) | {"block.0.bias": torch.full((24,), float("nan"), dtype=torch.float64)}
    with pytest.raises(TensorError, match=r"models\[1\]\['block.0.bias'\] holds NaN"):
        epimer.merge_state_dicts(BASE, [MODELS[0], broken, MODELS[2]], "average", weights=WEIGHTS)
    for method in ("task_arithmetic", "dare"):
        assert same(epimer.merge_state_dicts(BASE, MODELS, method, weights=[0, 0, 0]), BASE)


def test_a_sweep_shares_bases_of_the_other_models():
    norms = by_function("norms", lambda state: {"norm": float(state["block.0.weight"].norm())})

    methods, curvature = ["tsv", "epimer_kron", "epimer_free"], make_curvature(BASE, "kronecker")
    options = {"methods": methods, "scales": [1.0], "ranks": [3]}
    found = sweep_state_dicts(BASE, MODELS, norms, curvature=curvature, weights=WEIGHTS, **options)
    pair = {"curvature": [curvature[t] for t in OTHERS], "weights": [WEIGHTS[t] for t in OTHERS]}
    alone = sweep_state_dicts(BASE, [MODELS[t] for t in OTHERS], norms, **pair, **options)
    scores = [[one.validation.all.average for one in sweep.tried] for sweep in (found, alone)]
    assert scores[0] == scores[1]


@pytest.fixture
def recipe(tmp_path):
    """Three models on disk, the second with weight 0 in block 0 alone."""
    for name, state in zip(("base", "a", "b", "c"), (BASE, *MODELS), strict=True):
        (tmp_path / name).mkdir()
        save_file({key: W.contiguous() for key, W in state.items()}, tmp_path / name / "model.safetensors")
    weight = [{"filter": "block.0.", "value": 0}, {"value": 0.2}]
    return {
        "base_model": str(tmp_path / "base"),
        "merge_method": "epimer_free",
        "parameters": {"rank": 2},
        "models": [
            {"model": str(tmp_path / "a"), "parameters": {"weight": 0.5}},
            {"model": str(tmp_path / "b"), "parameters": {"weight": weight}},
            {"model": str(tmp_path / "c"), "parameters": {"weight": 0.3}},
        ],
    }


def test_a_weight_that_is_zero_in_some_tensors(recipe, tmp_path):
    everywhere = epimer.merge_state_dicts(BASE, MODELS, "epimer_free", weights=[0.5, 0.2, 0.3], rank=2)
    pair = epimer.merge_state_dicts(BASE, [MODELS[0], MODELS[2]], "epimer_free", weights=[0.5, 0.3], rank=2)

    def check(folder):
        for name, W in load_file(folder / "model.safetensors").items():
            assert torch.allclose(
                W, (pair if name.startswith("block.0.") else everywhere)[name], rtol=1e-12, atol=1e-13
            )

    merge(recipe, tmp_path / "out", progress=False)
    check(tmp_path / "out")
    make_basis(recipe, tmp_path / "basis", progress=False)
    merge(recipe | {"basis": str(tmp_path / "basis")}, tmp_path / "with-basis", progress=False)
    check(tmp_path / "with-basis")


@pytest.mark.parametrize(("method", "warned"), [("tsv", True), ("average", False), ("regmean", False)])
def test_a_weight_near_0_is_warned_of_if_the_method_counts_models(method, warned):
    base = make_base(torch.float64)
    models, arguments = make_models(base), required_arguments(method, base)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epimer.merge_state_dicts(base, models, method, weights=[1.0, 1e-6, 1.0], **arguments)
    texts = [str(warning.message) for warning in caught if "next to no weight" in str(warning.message)]
    assert len(texts) == int(warned)
    assert all("models[1]" in text and "give it weight 0 to leave it out" in text for text in texts)
    assert ("only weight 0 leaves it out" in str(epimer.describe_method(method))) == warned
