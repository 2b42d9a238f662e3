"""Laws over the whole registry: a new preset is one row there and inherits every law of epimer.testing."""

import pytest
import torch

import epimer
from dense import close
from epimer.errors import ParameterError
from epimer.geometry.metric import Diagonal, Kronecker
from epimer.testing import EVERY_METHOD, LAWS, find_violation, usual_count
from models import MATRICES, make_base, make_curvature, make_models, needs

OURS = epimer.list_methods()
FORMS = [row.mergekit.name for name in OURS if (row := epimer.describe_method(name)).mergekit is not None]
METHODS = [*OURS, *FORMS]


def obeys(name, law):
    return law in epimer.describe_method(name).laws


def some_models(base, name, **more):
    """Return three models, or as many as the method merges."""
    return make_models(base, usual_count(epimer.describe_method(name)), **more)


def merge(base, models, name, **overrides):
    return epimer.merge_state_dicts(base, models, name, **(needs(name, base, len(models)) | overrides))


def same(a, b, tolerance=1e-5):
    assert a.keys() == b.keys()
    return all(close(a[key].double(), b[key].double(), tolerance) for key in a)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_obeys_exactly_the_laws_it_declares(name, law):
    broken = find_violation(name, law)
    assert (broken is None) == obeys(name, law), broken


@pytest.mark.parametrize("law", EVERY_METHOD)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_obeys_the_laws_of_every_method(name, law):
    assert find_violation(name, law) is None


@pytest.mark.parametrize("name", METHODS)
def test_trace_normalisation_makes_any_curved_method_blind_to_units(name):
    method = epimer.describe_method(name)
    if not any(p.name == "normalize" for p in method.parameters) or not method.needs_curvature:
        pytest.skip("no normalisation to choose")
    base = make_base(torch.float64)
    curvature = make_curvature(base, method.curvature)
    if obeys(name, "curvature_scale"):
        pytest.skip("covered by the law")
    louder = [
        {k: Kronecker(A=c * v.A, G=v.G) if isinstance(v, Kronecker) else Diagonal(c * v.F) for k, v in one.items()}
        for one, c in zip(curvature, (9, 1, 0.1), strict=True)
    ]
    models = make_models(base)
    first = epimer.merge_state_dicts(base, models, name, curvature=curvature, normalize="trace", damping=0.01)
    second = epimer.merge_state_dicts(base, models, name, curvature=louder, normalize="trace", damping=0.01)
    assert same(first, second, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", METHODS)
def test_names_shapes_and_dtypes_are_the_base_s_and_inputs_stay_as_they_were(name, dtype):
    base = make_base(dtype)
    models = some_models(base, name)
    before = [{k: v.clone() for k, v in state.items()} for state in (base, *models)]
    merged = merge(base, models, name)
    assert list(merged) == list(base)
    for key, W in base.items():
        assert merged[key].shape == W.shape
        assert merged[key].dtype == W.dtype
        assert torch.isfinite(merged[key]).all()
        assert merged[key].data_ptr() != W.data_ptr() or not W.numel()
    assert torch.equal(merged["steps"], base["steps"])
    for state, copy in zip((base, *models), before, strict=True):
        assert all(torch.equal(state[k], copy[k]) for k in copy)
    # half precision in, and the arithmetic still is that of float32
    wide = [{k: v.float() if v.is_floating_point() else v for k, v in state.items()} for state in (base, *models)]
    precise = merge(wide[0], wide[1:], name)
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 1e-4)
    assert same({k: merged[k] for k in MATRICES}, {k: precise[k] for k in MATRICES}, tolerance)


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_gives_the_same_bits(name):
    base = make_base()
    models = some_models(base, name)
    first, second = merge(base, models, name, seed=7), merge(base, models, name, seed=7)
    assert all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("name", METHODS)
def test_one_model_alone_merges(name):
    base = make_base(torch.float64)
    models = make_models(base, 1, rank=3)
    if epimer.describe_method(name).models[0] > 1:
        with pytest.raises(ParameterError, match=rf"^{name} merges (at least|exactly) 2 models, and there are 1\.$"):
            merge(base, models, name)
        return
    merged = merge(base, models, name)
    assert all(torch.isfinite(merged[k]).all() for k in merged)
    if obeys(name, "copies") or name in ("tsv", "epimer", "epimer_exact"):
        assert all(close(merged[k], models[0][k], 1e-6) for k in MATRICES)


@pytest.mark.parametrize("name", METHODS)
def test_a_zero_task_vector_merges(name):
    base = make_base(torch.float64)
    count = usual_count(epimer.describe_method(name))
    models = [dict(base), *make_models(base, 2)][:count]
    merged = merge(base, models, name)
    assert all(torch.isfinite(merged[k]).all() for k in merged)
    nothing = merge(base, [dict(base), dict(base)][:count], name)
    assert all(close(nothing[k].double(), base[k].double(), 1e-12) for k in base)
