"""What goes in: every kind of tensor has a defined fate, every unusable input one line that says where it is."""

import json
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import epimer
from dense import basis_of, close
from epimer import (
    CurvatureError,
    Diagonal,
    EpimerError,
    EpimerWarning,
    Kronecker,
    ParameterError,
    Projected,
    Samples,
    TensorError,
)
from models import MATRICES, OTHERS, make_base, make_curvature, make_models, needs

METHODS = epimer.list_methods()
ON_MATRICES = [name for name in METHODS if not epimer.describe_method(name).elementwise]
BASELESS = ("average", "nan", "greedy_soup", "fisher", "regmean", "mats", "karcher")
OPTIONAL = ("nuslerp", "multislerp", "passthrough")
"""methods that merge something else where there is a base, or that never look at it"""
FIRST, SECOND = MATRICES
VECTOR = "block.0.bias"


def merge(base, models, name, **given):
    models = models[: epimer.describe_method(name).models[1]] if isinstance(models, list) else models
    return epimer.merge_state_dicts(base, models, name, **(needs(name, make_base(), len(models)) | given))


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def draw(shape, tasks=2, seed=0, dtype=torch.float64):
    """One tensor named w: a base and its fine-tuned models."""
    base, *tuned = (randn(*shape, seed=10 * seed + t, dtype=dtype) for t in range(tasks + 1))
    return {"w": base}, [{"w": W} for W in tuned]


def psd(size, seed=0):
    X = randn(size + 3, size, seed=seed)
    return X.T @ X / len(X)


def mean(models, name):
    return sum(model[name].double() for model in models) / len(models)


def double(state):
    return {k: v.double() if v.is_floating_point() else v for k, v in state.items()}


def changed(states, t, **tensors):
    """The state dicts with some tensors of one of them replaced; names take __ for a dot."""
    return [s | {k.replace("__", "."): v for k, v in tensors.items()} if i == t else s for i, s in enumerate(states)]


def without(states, t, *names):
    return [{k: v for k, v in s.items() if i != t or k not in names} for i, s in enumerate(states)]


def spoiled(W, value):
    W = W.clone()
    W.view(-1)[W.numel() // 2] = value
    return W


def refuses(kind, call, *named):
    """The call is refused in one line that holds everything in `named`."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, EpimerError)
    assert len(message.splitlines()) == 1
    for part in named:
        assert part in message
    return message


@pytest.fixture
def base():
    return make_base()


@pytest.fixture
def models(base):
    return make_models(base, 2)


@pytest.fixture
def diagonals(base):
    return make_curvature(base, "diagonal", 2)


@pytest.fixture
def factors(base):
    return make_curvature(base, "kronecker", 2)


@pytest.fixture
def samples(base):
    return make_curvature(base, "samples", 2)


# What each kind of tensor becomes.


@pytest.mark.parametrize("name", ON_MATRICES)
def test_what_is_no_matrix_is_averaged_by_a_matrix_method(name):
    base = make_base(torch.float64)
    models = make_models(base)
    merged = merge(base, models, name)
    for key in OTHERS:
        assert merged[key].shape == base[key].shape
        assert close(merged[key], mean(models, key))
        assert merged.record.tensors[key].rule == ("average" if base[key].numel() else "copy")


@pytest.mark.parametrize("name", [n for n in METHODS if not epimer.describe_method(n).ignores_base])
def test_integer_and_bool_buffers_that_all_models_share_are_copied_from_the_base(base, models, name):
    base["mask"] = torch.tensor([True, False, True])
    models = [model | {"mask": base["mask"].clone(), "steps": model["steps"].to(torch.int32)} for model in models]
    merged = merge(base, models, name)
    assert torch.equal(merged["steps"], torch.tensor([3, 1, 4]))
    assert torch.equal(merged["mask"], torch.tensor([True, False, True]))
    assert merged["mask"].dtype == torch.bool
    assert merged.record.tensors["mask"].rule == "copy"
    merged["mask"].fill_(False)
    assert base["mask"].any()


@pytest.mark.parametrize("other", [torch.tensor([3, 1, 5]), torch.tensor([3, 1]), torch.tensor([True, True, True])])
def test_integers_that_differ_between_models_are_copied_only_where_a_rule_says_so(base, models, other):
    models = changed(models, 1, steps=other)
    refuses(TensorError, lambda: merge(base, models, "average"), "models[1]['steps']", "differs from base's", "'copy'")
    refuses(TensorError, lambda: merge(None, models, "average"), "models[1]['steps']", "differs from models[0]'s")
    merged = merge(base, models, "average", rules=[("steps", "copy")])
    assert torch.equal(merged["steps"], base["steps"])
    assert "steps" not in merge(base, models, "average", rules=[("steps", "skip")])


# Statistics of BatchNorm.


def batch_norm(mean, var, count):
    return {
        "norm.running_mean": torch.tensor(mean),
        "norm.running_var": torch.tensor(var),
        "norm.num_batches_tracked": torch.tensor(count),
        "norm.weight": torch.ones(2),
    }


NORMS = (
    batch_norm([0.0, 0.0], [1.0, 4.0], 0),
    batch_norm([1.0, 2.0], [0.1, 0.5], 10),
    batch_norm([3.0, -2.0], [0.3, 9], 20),
)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("name", [n for n in METHODS if not epimer.describe_method(n).needs_curvature])
def test_running_variances_lie_between_the_models_whatever_the_method_and_scale(name, scale):
    ancestor, *tuned = NORMS
    base, models = make_base(), make_models(make_base(), 2)
    base, models = base | ancestor, [model | norm for model, norm in zip(models, tuned, strict=True)]
    row = epimer.describe_method(name)
    models = models[: row.models[1]]
    given = {"rules": [("norm.num_batches_tracked", "copy")]}
    merged = merge(base, models, name, scale=scale, **given)
    for key in ("norm.running_var", "norm.running_mean"):
        W0, (W1, W2) = base[key].double(), (model[key].double() for model in (models[0], models[-1]))
        W0 = W1 if row.ignores_base else W0
        if name != "nan" and name != "greedy_soup":  # which weigh models by what they see
            assert close(merged[key].double(), W0 + min(scale, 1) * ((W1 + W2) / 2 - W0), 1e-6)
        low, high = torch.stack([W0, W1, W2]).aminmax(dim=0)
        assert ((merged[key] >= low.float()) & (merged[key] <= high.float())).all()
        assert merged.record.tensors[key].rule == "statistic"


@pytest.mark.parametrize(
    ("weights", "expected"), [((2.0, 2.0), 0.2), ((3.0, 1.0), 0.15), ((5.0, -3.0), 0.1), ((-1.0, -2.0), 1.0)]
)
def test_absolute_weights_are_normalised_for_running_variances(weights, expected):
    base, *models = NORMS
    merged = epimer.merge_state_dicts(base, models, "task_arithmetic", weights=list(weights))
    assert merged["norm.running_var"][0].item() == pytest.approx(expected)


def test_a_variance_of_zero_is_never_missed_by_rounding():
    variances = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    base, model = {"norm.running_var": variances}, {"norm.running_var": torch.zeros(10_000)}
    merged = epimer.merge_state_dicts(base, [model] * 7, "task_arithmetic", weights=[0.3] * 7, scale=3.0)
    assert (merged["norm.running_var"] >= 0).all()


def test_what_becomes_of_statistics_and_counts_is_said():
    base, *models = NORMS
    with pytest.warns(EpimerWarning) as said:
        merged = epimer.merge_state_dicts(base, models, "average")
    texts = [str(one.message) for one in said]
    assert any("1 normalisation layers" in text and "re-estimate" in text for text in texts)
    assert any("'norm.num_batches_tracked' differ" in text and "copied from base" in text for text in texts)
    assert merged["norm.num_batches_tracked"].item() == 0


def test_a_buffer_that_is_copied_may_be_missing_from_a_model(base, models):
    merged = epimer.merge_state_dicts(base, without(models, 1, "steps"), "average")
    assert torch.equal(merged["steps"], base["steps"])


@pytest.mark.parametrize("name", METHODS)
def test_an_empty_tensor_stays_empty(base, models, name):
    base, models = base | {"none": torch.zeros(0)}, [model | {"none": torch.zeros(0)} for model in models]
    merged = merge(base, models, name)
    assert merged["none"].shape == (0,)
    assert merged["empty"].shape == (0, 3)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 3), (4, 3, 2), (4, 3, 2, 2)])
def test_entrywise_methods_take_tensors_of_any_shape(shape):
    base, models = draw(shape)
    F = [randn(*shape, seed=90 + t).square() for t in range(2)]
    curvature = [{"w": Diagonal(f)} for f in F]
    W1, W2 = models[0]["w"], models[1]["w"]
    fisher = epimer.merge_state_dicts(base, models, "fisher", curvature=curvature)["w"]
    assert close(fisher, (F[0] * W1 + F[1] * W2) / (F[0] + F[1]))
    assert close(epimer.merge_state_dicts(base, models, "average", weights=[3, 1])["w"], 0.75 * W1 + 0.25 * W2)
    alone = epimer.merge_state_dicts(base, models[:1], "ties", density=1.0)["w"]
    assert close(alone, W1)


CONV = (6, 3, 2, 2)


def conv_curvature(kind, t):
    if kind == "diagonal":
        F = randn(*CONV, seed=40 + t).square()
        return Diagonal(F), Diagonal(F.flatten(1))
    if kind == "kronecker":
        metric = Kronecker(G=psd(6, seed=t), A=psd(12, seed=5 + t))
        return metric, metric
    metric = Samples(g=randn(9, 2, 6, seed=t), x=randn(9, 2, 12, seed=5 + t))
    return metric, metric


@pytest.mark.parametrize("name", ON_MATRICES)
def test_a_convolution_under_the_rule_matrix_merges_as_its_flattened_matrix(name):
    base, models = draw(CONV)
    method, given, flat_given = epimer.describe_method(name), {}, {}
    if method.needs_curvature:
        metrics = [conv_curvature(method.curvature, t) for t in range(2)]
        given["curvature"] = [{"conv.weight": four} for four, _ in metrics]
        flat_given["curvature"] = [{"flat.weight": two} for _, two in metrics]
    conv = epimer.merge_state_dicts(
        {"conv.weight": base["w"]},
        [{"conv.weight": model["w"]} for model in models],
        name,
        rules=[("conv.weight", "matrix")],
        **given,
    )
    flat = epimer.merge_state_dicts(
        {"flat.weight": base["w"].flatten(1)}, [{"flat.weight": m["w"].flatten(1)} for m in models], name, **flat_given
    )
    assert conv["conv.weight"].shape == CONV
    assert close(conv["conv.weight"].flatten(1), flat["flat.weight"])
    assert not close(conv["conv.weight"], mean(models, "w"), 1e-3)
    assert conv.record.tensors["conv.weight"].rank == flat.record.tensors["flat.weight"].rank


def test_a_convolution_in_channels_last_merges_as_a_contiguous_one():
    base, models = draw(CONV)
    rules = [("w", "matrix")]
    last = [{"w": state["w"].to(memory_format=torch.channels_last)} for state in (base, *models)]
    merged = epimer.merge_state_dicts(last[0], last[1:], "tsv", rules=rules)["w"]
    assert close(merged, epimer.merge_state_dicts(base, models, "tsv", rules=rules)["w"])


def tie(state, *names):
    return state | dict.fromkeys(names, state[names[0]])


@pytest.mark.parametrize("method", ["average", "tsv", "iso_c"])
def test_tensors_tied_in_base_and_models_stay_tied(method):
    base = {"embed_tokens.weight": randn(8, 4), "lm_head.weight": None, "w": randn(4, 4, seed=1)}
    base = tie(base, "embed_tokens.weight", "lm_head.weight")
    fresh = [base | {"embed_tokens.weight": randn(8, 4, seed=seed)} for seed in (2, 3)]
    models = [tie(model, "embed_tokens.weight", "lm_head.weight") for model in fresh]
    merged = epimer.merge_state_dicts(base, models, method)
    assert merged["lm_head.weight"] is merged["embed_tokens.weight"]
    assert merged.record.tensors["lm_head.weight"].status == "tied"
    assert merged["w"] is not merged["embed_tokens.weight"]
    untied = epimer.merge_state_dicts(
        {k: v.clone() for k, v in base.items()}, [{k: v.clone() for k, v in m.items()} for m in models], method
    )
    assert all(close(merged[k], untied[k]) for k in untied)
    assert untied["lm_head.weight"] is not untied["embed_tokens.weight"]


@pytest.mark.parametrize("method", ["nan", "ties"])
def test_what_looks_at_whole_models_counts_a_tied_tensor_once(method):
    base, models = draw((8, 4))
    rest = [{"v": randn(3, 3, seed=seed)} for seed in (5, 6, 7)]
    single = [state | other for state, other in zip((base, *models), rest, strict=True)]
    double = [tie(state, "w", "tied") for state in single]
    once = epimer.merge_state_dicts(single[0], single[1:], method)
    both = epimer.merge_state_dicts(double[0], double[1:], method)
    assert all(close(both[k], once[k]) for k in once)
    assert both["tied"] is both["w"]


def test_tied_tensors_that_one_model_holds_as_equal_copies_stay_tied():
    base, models = draw((4, 4))
    base, models = tie(base, "w", "v"), [tie(model, "w", "v") for model in models]
    models[1]["v"] = models[1]["w"].clone()
    merged = epimer.merge_state_dicts(base, models, "average")
    assert merged["v"] is merged["w"]


def test_tensors_tied_in_the_base_but_not_in_every_model_are_merged_apart():
    base, models = draw((4, 4))
    base, models = tie(base, "w", "v"), [tie(model, "w", "v") for model in models]
    models[1]["v"] = randn(4, 4, seed=9)
    merged = epimer.merge_state_dicts(base, models, "average")
    assert merged["v"] is not merged["w"]
    assert close(merged["w"], mean(models, "w"))
    assert close(merged["v"], mean(models, "v"))


def test_of_three_tied_tensors_the_two_that_stay_one_in_every_model_stay_tied():
    base, models = draw((4, 4))
    base, models = tie(base, "w", "v", "u"), [tie(model, "w", "v", "u") for model in models]
    models[1]["w"] = randn(4, 4, seed=9)
    merged = epimer.merge_state_dicts(base, models, "average")
    assert merged["u"] is merged["v"]
    assert merged["v"] is not merged["w"]
    assert close(merged["u"], mean(models, "u"))


def test_tied_tensors_stay_tied_where_only_one_of_their_names_is_a_table():
    base, models = draw((4, 4))
    names = ("embed_tokens.weight", "output.weight")
    base, models = (dict.fromkeys(names, state["w"]) for state in (base, models[0]))
    merged = epimer.merge_state_dicts(base, [models, dict(models)], "tsv")
    assert merged["output.weight"] is merged["embed_tokens.weight"]


@pytest.mark.parametrize("shape", [(120, 4), (4, 120), (9, 9)])
@pytest.mark.parametrize("name", ["tsv", "iso_c", "epimer", "mats", "epimer_exact"])
def test_merging_transposed_tensors_gives_the_transpose(name, shape):
    base, models = draw(shape)
    m, n = shape
    kind = epimer.describe_method(name).curvature
    metrics = flipped = [None, None]
    if kind == "diagonal":
        F = [randn(m, n, seed=70 + t).square() for t in range(2)]
        metrics, flipped = [Diagonal(f) for f in F], [Diagonal(f.T) for f in F]
    elif kind == "kronecker":
        G, A = [psd(m, seed=t) for t in range(2)], [psd(n, seed=3 + t) for t in range(2)]
        metrics = [Kronecker(G=g, A=a) for g, a in zip(G, A, strict=True)]
        flipped = [Kronecker(G=a, A=g) for g, a in zip(G, A, strict=True)]
    elif kind == "samples":
        pairs = [(randn(9, 2, m, seed=t), randn(9, 2, n, seed=3 + t)) for t in range(2)]
        metrics, flipped = [Samples(g=g, x=x) for g, x in pairs], [Samples(g=x, x=g) for g, x in pairs]
    given, turned = ({"curvature": [{"w": v} for v in side]} if kind else {} for side in (metrics, flipped))
    merged = epimer.merge_state_dicts(base, models, name, **given)["w"]
    other = epimer.merge_state_dicts({"w": base["w"].T}, [{"w": model["w"].T} for model in models], name, **turned)["w"]
    assert close(other.T, merged, 1e-8)


def test_one_model_alone_is_returned_by_a_method_that_keeps_every_direction():
    base, models = draw((7, 5), tasks=1)
    for name in ("average", "nan", "tsv", "task_arithmetic"):
        merged = epimer.merge_state_dicts(base, models, name)
        assert close(merged["w"], models[0]["w"])
    assert epimer.merge_state_dicts(base, models, "tsv").record.tensors["w"].rank == 5


def test_identical_models_average_to_themselves_and_add_up_in_task_arithmetic():
    base, models = draw((7, 5), tasks=1)
    three = [models[0], dict(models[0]), models[0]]
    D = models[0]["w"] - base["w"]
    assert close(epimer.merge_state_dicts(base, three, "average")["w"], models[0]["w"])
    assert close(epimer.merge_state_dicts(base, three, "ties", density=1.0)["w"], models[0]["w"])
    assert close(epimer.merge_state_dicts(base, three, "task_arithmetic", weights=[1, 1, 1])["w"], base["w"] + 3 * D)


def test_beside_a_zero_task_vector_tsv_keeps_the_other_s_leading_half():
    base, models = draw((8, 6), tasks=1)
    merged = epimer.merge_state_dicts(base, [dict(base), models[0]], "tsv")["w"]
    U, sigma, Vh = torch.linalg.svd(models[0]["w"] - base["w"], full_matrices=False)
    assert close(merged, base["w"] + (U[:, :3] * sigma[:3]) @ Vh[:3])
    halved = epimer.merge_state_dicts(base, [dict(base), models[0]], "average")["w"]
    assert close(halved, 0.5 * (base["w"] + models[0]["w"]))


@pytest.mark.parametrize("name", ["tsv", "epimer", "epimer_kron", "epimer_free"])
def test_a_rank_beyond_the_layer_is_lowered_and_said(base, name):
    models = make_models(base, 3)
    with pytest.warns(EpimerWarning, match="rank 9 lowered to 6") as caught:
        merged = merge(base, models, name, rank=9)
    assert FIRST in str(caught[0].message)
    assert merged.record.tensors[FIRST].rank == 20 // 3
    assert merged.record.tensors[SECOND].rank == 18 // 3
    with warnings.catch_warnings():
        warnings.simplefilter("error", EpimerWarning)
        exact = merge(base, models, name, rank=6)
    assert all(torch.equal(merged[key], exact[key]) for key in base)


@pytest.mark.parametrize("name", ["tsv", "epimer", "epimer_kron", "epimer_exact", "epimer_free"])
def test_a_layer_with_fewer_directions_than_tasks_is_averaged_and_said(name):
    base, models = draw((3, 5), tasks=4)
    kind = epimer.describe_method(name).curvature
    made = {
        "diagonal": Diagonal(randn(3, 5).square()),
        "kronecker": Kronecker(G=psd(3), A=psd(5)),
        "samples": Samples(g=randn(6, 1, 3), x=randn(6, 1, 5)),
    }
    given = {"curvature": [{"w": made[kind]}] * 4} if kind in made else {}
    with pytest.warns(EpimerWarning, match="averaged: 'w'"):
        merged = epimer.merge_state_dicts(base, models, name, **given)
    assert close(merged["w"], mean(models, "w"))
    assert merged.record.tensors["w"].status == "clamped"
    assert merged.record.tensors["w"].rank == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["average", "tsv", "fisher", "mats"])
def test_half_precision_is_rounded_once_at_the_end(name, dtype):
    base = make_base(dtype)
    models = make_models(base, 2)
    merged = merge(base, models, name)
    wide = merge(double(base), [double(model) for model in models], name)
    for key in (FIRST, VECTOR, "temperature"):
        assert merged[key].dtype == dtype
        error = (merged[key].double() - wide[key]).abs()
        assert (error <= 0.51 * torch.finfo(dtype).eps * wide[key].abs().clamp_min(1e-2)).all()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float16, torch.bfloat16)])
@pytest.mark.parametrize("name", ["average", "tsv"])
def test_models_may_be_of_another_precision_than_the_base(name, dtypes):
    base, models = draw((7, 5), dtype=torch.bfloat16)
    models = [{"w": model["w"].to(dtype)} for model, dtype in zip(models, dtypes, strict=True)]
    merged = epimer.merge_state_dicts(base, models, name)["w"]
    wide = epimer.merge_state_dicts(double(base), [double(model) for model in models], name)["w"]
    assert merged.dtype == torch.bfloat16
    assert close(merged.double(), wide, 4e-3)
    assert close(epimer.merge_state_dicts(double(base), models, name)["w"], wide)


@pytest.mark.parametrize("name", METHODS)
def test_parameters_that_require_grad_merge_into_plain_tensors(name, base, models):
    def live(state):
        return {k: nn.Parameter(v.clone()) if v.is_floating_point() else v for k, v in state.items()}

    lively = [live(model) for model in models]
    merged = merge(live(base), lively, name)
    plain = merge(base, models, name)
    for key in base:
        assert torch.equal(merged[key], plain[key])
        assert type(merged[key]) is torch.Tensor
        assert not merged[key].requires_grad
    assert all(W.requires_grad for W in lively[0].values() if W.is_floating_point())


def test_curvature_that_requires_grad_is_used_as_it_is(base, models, diagonals):
    live = [{k: Diagonal(v.F.clone().requires_grad_()) for k, v in one.items()} for one in diagonals]
    merged = epimer.merge_state_dicts(base, models, "fisher", curvature=live)
    plain = epimer.merge_state_dicts(base, models, "fisher", curvature=diagonals)
    assert all(torch.equal(merged[k], plain[k]) for k in base)
    assert not any(W.requires_grad for W in merged.values())


@pytest.mark.parametrize("name", BASELESS)
def test_without_a_base_the_merge_is_that_with_one_at_scale_1(name):
    base = make_base(torch.float64)
    models = make_models(base)
    alone, based = merge(None, models, name), merge(base, models, name)
    assert list(alone) == list(models[0])
    for key in base:
        if base[key].is_floating_point():
            assert close(alone[key], based[key], 1e-6)
    assert torch.equal(alone["steps"], models[0]["steps"])


@pytest.mark.parametrize("name", sorted(set(METHODS) - {*BASELESS, *OPTIONAL}))
def test_other_methods_refuse_to_do_without_a_base(name, models):
    refuses(TensorError, lambda: merge(None, models, name), name, "base")


def test_a_diagnosis_and_a_basis_need_a_base(models):
    refuses(TensorError, lambda: epimer.diagnose_state_dicts(None, models), "base")
    refuses(TensorError, lambda: epimer.build_basis(None, models), "base")


@pytest.mark.parametrize(
    ("name", "setting"),
    [("average", {"scale": 0.5}), ("mats", {"aggregator": "sum"}), ("mats", {"basis": "tagged"})],
)
def test_without_a_base_settings_that_depend_on_one_are_refused(name, setting, models):
    refuses(ParameterError, lambda: merge(None, models, name, **setting), name, next(iter(setting)), "base")


def test_without_a_base_curvature_projected_on_a_basis_is_refused(base, models):
    bases = epimer.build_basis(base, models, rank=2, basis="tensor")
    curvature = [{k: Projected(G=torch.eye(4), A=torch.eye(4), basis=bases[k]) for k in MATRICES}] * 2
    refuses(EpimerError, lambda: epimer.merge_state_dicts(None, models, "mats", curvature=curvature), "base")


# State dicts that do not fit together.


def test_missing_names_are_listed(base, models):
    broken = without(models, 1, VECTOR, FIRST)
    refuses(TensorError, lambda: merge(base, broken, "average"), "models[1]", FIRST, VECTOR)
    refuses(TensorError, lambda: merge(None, broken, "average"), "models[1]", FIRST, "models[0]")
    refuses(TensorError, lambda: epimer.diagnose_state_dicts(base, broken), "models[1]", FIRST)
    refuses(TensorError, lambda: epimer.build_basis(base, broken), "models[1]", FIRST)


def test_extra_names_are_listed(base, models):
    broken = changed(models, 1, lora__A=torch.ones(2, 2))
    refuses(TensorError, lambda: merge(base, broken, "average"), "models[1]", "'lora.A'")


def test_models_with_no_name_in_common_are_shown_what_they_have(base, models):
    prefixed = {f"model.{k}": v for k, v in models[1].items()}
    refuses(TensorError, lambda: merge(base, [models[0], prefixed], "tsv"), "models[1]", f"'model.{FIRST}'", FIRST)


def test_a_model_without_any_tensor_is_called_that(base, models):
    message = refuses(TensorError, lambda: merge(base, [models[0], {}], "tsv"), "models[1]")
    assert "it has ," not in message


def test_a_shape_mismatch_names_both_shapes(base, models):
    broken = changed(models, 1, block__0__weight=torch.ones(24, 21))
    refuses(TensorError, lambda: merge(base, broken, "tsv"), "models[1]", f"'{FIRST}'", "(24, 21)", "(24, 20)")
    broken = changed(models, 1, temperature=torch.ones(1))
    refuses(TensorError, lambda: merge(base, broken, "average"), "models[1]", "'temperature'", "(1,)", "()")


def test_a_tensor_that_is_empty_in_the_base_alone_is_a_shape_mismatch(base, models):
    broken = changed(models, 1, empty=torch.ones(2, 3))
    refuses(TensorError, lambda: merge(base, broken, "average"), "models[1]", "'empty'", "(2, 3)", "(0, 3)")


def test_integers_where_the_base_has_floats_are_refused(base, models):
    broken = changed(models, 1, block__0__bias=torch.ones(24, dtype=torch.int64))
    refuses(TensorError, lambda: merge(base, broken, "average"), "models[1]", f"'{VECTOR}'", "int64")


def test_floats_where_the_base_has_integers_are_refused(base, models):
    rounded = base | {VECTOR: base[VECTOR].to(torch.int8)}
    refuses(TensorError, lambda: merge(rounded, models, "average"), "models[0]", f"'{VECTOR}'", "int8")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["average", "tsv"])
def test_nan_and_inf_name_their_owner(base, models, name, value):
    bad = spoiled(base[FIRST], value)
    refuses(TensorError, lambda: merge(base | {FIRST: bad}, models, name), "base", f"'{FIRST}'", "1 of 480")
    broken = changed(models, 1, block__0__weight=bad)
    refuses(TensorError, lambda: merge(base, broken, name), "models[1]", f"'{FIRST}'", "1 of 480")
    refuses(TensorError, lambda: merge(None, broken, "average"), "models[1]", f"'{FIRST}'")
    refuses(TensorError, lambda: epimer.diagnose_state_dicts(base, broken), "models[1]", f"'{FIRST}'")


@pytest.mark.parametrize("value", [[1.0], np.ones(3), 1.0, None, "weights.pt"])
def test_what_is_no_tensor_is_refused(base, models, value):
    broken = changed(models, 1, block__0__bias=value)
    refuses(TensorError, lambda: merge(base, broken, "average"), "models[1]", f"'{VECTOR}'", type(value).__name__)


def test_names_that_are_no_strings_are_refused():
    state = {0: torch.ones(2, 2)}
    refuses(TensorError, lambda: epimer.merge_state_dicts(state, [dict(state)], "tsv"), "base", "int")


@pytest.mark.parametrize("broken", [{}, [], None, 3, "abc", "generator", "mapping", "module"])
def test_models_must_be_a_list_of_mappings(base, models, broken):
    made = {"generator": (model for model in models), "mapping": models[0], "module": [nn.Linear(2, 2)]}
    given = made.get(broken, broken) if isinstance(broken, str) else broken
    refuses(TensorError, lambda: merge_any(base, given), "models")


def merge_any(base, models):
    return epimer.merge_state_dicts(base, models, "average")


def test_a_base_must_be_a_mapping_or_a_module(models):
    refuses(TensorError, lambda: merge_any([1, 2], models), "base", "nn.Module", "list")


def test_a_tuple_of_models_is_a_list_of_models(base, models):
    assert torch.equal(merge_any(base, tuple(models))[FIRST], merge_any(base, models)[FIRST])


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, lambda W: W.to("meta")], ids=["sparse", "meta"])
def test_tensors_without_plain_values_are_refused(base, models, make):
    broken = changed(models, 1, block__0__weight=make(models[1][FIRST]))
    refuses(TensorError, lambda: merge(base, broken, "average"), "models[1]", f"'{FIRST}'")


def test_nan_in_a_precision_without_arithmetic_names_its_owner(base, models):
    bad = spoiled(models[1][FIRST], float("nan")).to(torch.float8_e4m3fn)
    broken = changed(models, 1, block__0__weight=bad)
    refuses(TensorError, lambda: merge(base, broken, "average"), "models[1]", f"'{FIRST}'")


def test_a_result_beyond_half_precision_is_refused():
    base = {"w": torch.zeros(3, dtype=torch.float16)}
    models = [{"w": torch.full((3,), 6e4, dtype=torch.float16)}]
    refuses(TensorError, lambda: epimer.merge_state_dicts(base, models, "average", scale=2), "'w'", "float16")
    wide = epimer.merge_state_dicts({"w": base["w"].float()}, models, "average", scale=2)["w"]
    assert wide.tolist() == [120_000.0] * 3


@pytest.mark.parametrize("name", ["average", "tsv", "iso_c"])
def test_a_task_vector_beyond_float32_is_refused(name):
    base, models = {"w": torch.full((3, 3), 3e38)}, [{"w": -3e38 * torch.rand(3, 3)}, {"w": torch.full((3, 3), 3e38)}]
    refuses(TensorError, lambda: epimer.merge_state_dicts(base, models, name), "'w'")


# Curvature.


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-3])
@pytest.mark.parametrize("name", ["fisher", "gradient_matching", "epimer"])
def test_fisher_entries_must_be_finite_and_not_negative(base, models, diagonals, name, value):
    broken = changed(diagonals, 1, block__0__weight=Diagonal(spoiled(diagonals[1][FIRST].F, value)))
    refuses(CurvatureError, lambda: merge(base, models, name, curvature=broken), "curvature[1]", f"'{FIRST}'")
    refuses(CurvatureError, lambda: epimer.diagnose_state_dicts(base, models, curvature=broken), "curvature[1]", FIRST)


def test_the_base_s_curvature_is_checked_too(base, models, diagonals):
    def with_base_curvature(metric):
        return lambda: merge(base, models, "gradient_matching", curvature=diagonals, base_curvature={FIRST: metric})

    F = diagonals[0][FIRST].F
    refuses(CurvatureError, with_base_curvature(Diagonal(spoiled(F, float("nan")))), "base_curvature", FIRST)
    refuses(CurvatureError, with_base_curvature(Diagonal(-F)), "base_curvature", FIRST)
    refuses(CurvatureError, with_base_curvature(Diagonal(F.T)), "base_curvature", FIRST)
    refuses(CurvatureError, with_base_curvature(Kronecker(A=psd(20))), "base_curvature", FIRST, "Kronecker")


def test_a_diagonal_of_the_wrong_shape_is_refused(base, models, diagonals):
    broken = changed(diagonals, 1, block__0__weight=Diagonal(torch.ones(20, 24)))
    refuses(CurvatureError, lambda: merge(base, models, "epimer", curvature=broken), "curvature[1]", FIRST, "(20, 24)")


def tilted(M):
    return M + torch.triu(torch.full_like(M, 0.1 * float(M.max())), 1)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda k: Kronecker(G=k.G, A=tilted(k.A)), "symmetric"),
        (lambda k: Kronecker(G=tilted(k.G), A=k.A), "symmetric"),
        (lambda k: Kronecker(G=k.G, A=k.A - 0.1 * k.A.trace() * torch.eye(20)), "semi-definite"),
        (lambda k: Kronecker(G=-k.G, A=-k.A), "semi-definite"),
        (lambda k: Kronecker(A=torch.ones(20, 20) - torch.eye(20)), "semi-definite"),
        (lambda k: Kronecker(G=spoiled(k.G, float("nan"))), "NaN"),
        (lambda k: Kronecker(A=spoiled(k.A, float("inf"))), "Inf"),
        (lambda k: Kronecker(G=k.A, A=k.G), "24 x 24"),
        (lambda k: Kronecker(A=torch.ones(20)), "20 x 20"),
        (lambda k: Kronecker(A=torch.ones(20, 21)), "20 x 20"),
    ],
)
def test_kronecker_factors_must_be_symmetric_positive_semi_definite_and_fit(base, models, factors, broken, said):
    curvature = changed(factors, 1, block__0__weight=broken(factors[1][FIRST]))
    for name in ("mats", "epimer_kron"):
        refuses(
            CurvatureError,
            lambda name=name: merge(base, models, name, curvature=curvature),
            "curvature[1]",
            f"'{FIRST}'",
            said,
        )


@pytest.mark.parametrize("method", ["mats", "epimer_kron"])
@pytest.mark.parametrize(
    "broken",
    [
        lambda k: Kronecker(G=k.G, A=k.A - 0.1 * k.A.trace() * torch.eye(20)),
        lambda k: Kronecker(G=-k.G, A=-k.A),
        lambda k: Kronecker(A=torch.ones(20, 20) - torch.eye(20)),
        lambda k: Kronecker(G=k.G, A=tilted(k.A)),
    ],
)
def test_wide_factors_are_checked_on_the_directions_that_are_merged(base, models, factors, broken, method, monkeypatch):
    monkeypatch.setattr("epimer.geometry.checks.WIDE", 8)
    curvature = changed(factors, 1, block__0__weight=broken(factors[1][FIRST]))
    refuses(
        CurvatureError, lambda: merge(base, models, method, curvature=curvature), "curvature[1]", f"'{FIRST}'", "must"
    )


@pytest.mark.parametrize("column", [1, 19])
def test_a_wide_gram_that_is_indefinite_is_refused_by_name(base, models, column, monkeypatch):
    """Within a block of its diagonal (column 1), or only between two of them, where the sum of all shows it."""
    monkeypatch.setattr("epimer.geometry.checks.WIDE", 10)
    broken = torch.eye(20)
    broken[0, column] = broken[column, 0] = 4.0
    curvature = [{FIRST: Kronecker(A=M), SECOND: Kronecker(A=psd(30))} for M in (torch.eye(20), broken)]
    refuses(
        CurvatureError,
        lambda: merge(base, models, "regmean", curvature=curvature),
        "curvature[1]",
        f"'{FIRST}'",
        "A must be positive semi-definite; its lowest eigenvalue is -3",
    )


@pytest.mark.parametrize("wide", [8, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_that_rounding_left_slightly_indefinite_are_accepted(base, models, dtype, wide, monkeypatch):
    monkeypatch.setattr("epimer.geometry.checks.WIDE", wide)
    X = randn(3, 20, dtype=torch.float32)
    A = (X.T @ X / 3).to(dtype)
    assert float(torch.linalg.eigvalsh(A.double())[0]) < 0
    curvature = [{FIRST: Kronecker(A=A), SECOND: Kronecker(A=psd(30))}] * 2
    merged = epimer.merge_state_dicts(base, models, "mats", curvature=curvature)
    assert close(merged[FIRST].double(), mean(models, FIRST), 1e-6)  # one curvature for all: the mean


def test_a_zero_factor_is_a_task_without_curvature(base, models):
    curvature = [{k: Kronecker(A=c * torch.eye(n)) for k, (_, n) in MATRICES.items()} for c in (0.0, 1.0)]
    merged = epimer.merge_state_dicts(base, models, "regmean", curvature=curvature)
    assert close(merged[FIRST].double(), models[1][FIRST].double(), 1e-6)


def test_regmean_needs_the_input_factor(base, models, factors):
    broken = changed(factors, 1, block__0__weight=Kronecker(G=factors[1][FIRST].G))
    refuses(CurvatureError, lambda: merge(base, models, "regmean", curvature=broken), "curvature[1]", FIRST, "A")


@pytest.mark.parametrize(
    ("g", "x"),
    [
        ((9, 24), (9, 20)),
        ((9, 2, 20), (9, 2, 24)),
        ((9, 2, 24), (8, 2, 20)),
        ((9, 2, 24), (9, 3, 20)),
        ((0, 2, 24), (0, 2, 20)),
    ],
)
def test_samples_of_the_wrong_shape_are_refused(base, models, samples, g, x):
    broken = changed(samples, 1, block__0__weight=Samples(g=torch.ones(g), x=torch.ones(x)))
    refuses(
        CurvatureError,
        lambda: merge(base, models, "epimer_exact", curvature=broken),
        "curvature[1]",
        f"'{FIRST}'",
        str(g),
        str(x),
    )


def test_samples_must_be_finite(base, models, samples):
    one = samples[1][FIRST]
    for broken in (Samples(g=spoiled(one.g, float("nan")), x=one.x), Samples(g=one.g, x=spoiled(one.x, float("inf")))):
        curvature = changed(samples, 1, block__0__weight=broken)
        refuses(
            CurvatureError,
            lambda curvature=curvature: merge(base, models, "epimer_exact", curvature=curvature),
            "curvature[1]",
            f"'{FIRST}'",
        )


@pytest.mark.parametrize(
    "broken",
    [
        Diagonal([1.0, 2.0]),
        Diagonal(np.ones((24, 20))),
        Diagonal(None),
        Diagonal(torch.ones(24, 20, dtype=torch.complex64)),
    ],
)
def test_a_diagonal_that_holds_no_real_tensor_is_refused(base, models, diagonals, broken):
    curvature = changed(diagonals, 1, block__0__weight=broken)
    refuses(CurvatureError, lambda: merge(base, models, "epimer", curvature=curvature), "curvature[1]", f"'{FIRST}'")


@pytest.mark.parametrize("broken", [np.eye(20), "A", torch.eye(20, dtype=torch.complex64)])
def test_a_factor_that_is_no_real_tensor_is_refused(base, models, factors, broken):
    curvature = changed(factors, 1, block__0__weight=Kronecker(A=broken))
    refuses(CurvatureError, lambda: merge(base, models, "mats", curvature=curvature), "curvature[1]", f"'{FIRST}'")


def test_factors_of_integers_count_as_numbers(base, models):
    integer, real = (
        [{k: Kronecker(A=(c * torch.eye(n)).to(dtype)) for k, (_, n) in MATRICES.items()} for c in (1, 3)]
        for dtype in (torch.int64, torch.float32)
    )
    first = epimer.merge_state_dicts(base, models, "regmean", curvature=integer)
    assert close(first[FIRST].double(), 0.25 * models[0][FIRST].double() + 0.75 * models[1][FIRST].double(), 1e-6)
    assert torch.equal(first[FIRST], epimer.merge_state_dicts(base, models, "regmean", curvature=real)[FIRST])


def test_factors_in_half_precision_do_not_overflow(base, models):
    # their doubles do not fit in float16
    curvature = [{k: Kronecker(A=(c * torch.eye(n)).half()) for k, (_, n) in MATRICES.items()} for c in (2e4, 6e4)]
    merged = epimer.merge_state_dicts(base, models, "regmean", curvature=curvature)
    small, large = (float(torch.tensor(c).half()) for c in (2e4, 6e4))
    expected = (small * models[0][FIRST].double() + large * models[1][FIRST].double()) / (small + large)
    assert close(merged[FIRST].double(), expected, 1e-6)


@pytest.mark.parametrize("unit", [1e-60, 1e60])
@pytest.mark.parametrize("name", ["fisher", "epimer"])
def test_curvature_that_float32_cannot_hold_is_refused_beside_float32_models(base, models, diagonals, name, unit):
    curvature = [{k: Diagonal(unit * v.F) for k, v in one.items()} for one in diagonals]
    named = ("curvature[0]", f"'{FIRST}'", "float32")
    refuses(CurvatureError, lambda: epimer.merge_state_dicts(base, models, name, curvature=curvature), *named)
    wide = [double(state) for state in (base, *models)]
    merged = epimer.merge_state_dicts(wide[0], wide[1:], name, curvature=curvature)
    expected = epimer.merge_state_dicts(wide[0], wide[1:], name, curvature=diagonals)
    assert close(merged[FIRST], expected[FIRST], 1e-9)


@pytest.mark.parametrize("name", [m for m in METHODS if epimer.describe_method(m).needs_curvature])
def test_a_method_that_needs_curvature_says_which_kind(base, models, name):
    kind = epimer.describe_method(name).curvature
    refuses(CurvatureError, lambda: epimer.merge_state_dicts(base, models, name), name, "curvature=", kind.title())


@pytest.mark.parametrize("name", ["epimer", "fisher", "mats", "epimer_exact"])
def test_curvature_missing_for_a_matrix_is_refused(base, models, name):
    curvature = make_curvature(base, epimer.describe_method(name).curvature, 2)
    for_none = [{k: v for k, v in one.items() if k != FIRST} for one in curvature]
    refuses(CurvatureError, lambda: merge(base, models, name, curvature=for_none), "no model", f"'{FIRST}'")
    refuses(CurvatureError, lambda: merge(base, models, name, curvature=[{}, {}]), "no model", f"'{FIRST}'")
    for_one = without(curvature, 1, FIRST)
    refuses(CurvatureError, lambda: merge(base, models, name, curvature=for_one), "curvature[1]", f"'{FIRST}'")
    refuses(
        CurvatureError,
        lambda: epimer.diagnose_state_dicts(base, models, curvature=for_one),
        "curvature[1]",
        f"'{FIRST}'",
    )


def test_curvature_missing_for_one_model_of_a_vector_is_refused(base, models, diagonals):
    broken = without(diagonals, 1, VECTOR)
    refuses(CurvatureError, lambda: merge(base, models, "fisher", curvature=broken), "curvature[1]", f"'{VECTOR}'")
    for_none = without(without(diagonals, 0, VECTOR), 1, VECTOR)
    merged = merge(base, models, "fisher", curvature=for_none)
    assert close(merged[VECTOR].double(), mean(models, VECTOR), 1e-6)
    assert "averaged" in merged.record.tensors[VECTOR].note


@pytest.mark.parametrize(
    ("name", "wrong", "needed"),
    [
        ("epimer", Kronecker(A=psd(20)), "Diagonal"),
        ("fisher", Kronecker(A=psd(20)), "Diagonal"),
        ("mats", Diagonal(torch.ones(24, 20)), "Kronecker"),
        ("epimer_exact", Diagonal(torch.ones(24, 20)), "Samples"),
        ("epimer", torch.ones(24, 20), "Diagonal"),
        ("gradient_matching", "fisher.pt", "Diagonal"),
    ],
)
def test_the_wrong_kind_of_curvature_is_refused(base, models, name, wrong, needed):
    good = make_curvature(base, epimer.describe_method(name).curvature, 2)
    broken = changed(good, 1, block__0__weight=wrong)
    refuses(
        CurvatureError,
        lambda: merge(base, models, name, curvature=broken),
        "curvature[1]",
        f"'{FIRST}'",
        type(wrong).__name__,
        needed,
    )


def test_mixed_kinds_are_refused(base, models, diagonals):
    bases = epimer.build_basis(base, models, rank=2)
    mixed = [diagonals[0], {k: Projected(H=torch.eye(4), basis=bases[k]) for k in MATRICES}]
    named = ("curvature[1]", f"'{FIRST}'", "diagonal", "projected")
    refuses(CurvatureError, lambda: merge(base, models, "epimer", curvature=mixed), *named)


def test_a_diagnosis_refuses_mixed_kinds(base, models, diagonals, factors):
    mixed = [diagonals[0], factors[1]]
    named = ("curvature[1]", f"'{FIRST}'", "diagonal", "kronecker")
    refuses(CurvatureError, lambda: epimer.diagnose_state_dicts(base, models, curvature=mixed), *named)


def test_curvature_must_be_one_mapping_per_model(base, models, diagonals):
    for broken, named in (
        (diagonals[0], "list"),
        (3, "list"),
        (iter(diagonals), "list"),
        (diagonals[:1], "1 entries for 2"),
        ([*diagonals, diagonals[0]], "3 entries for 2"),
        ([diagonals[0], None], "curvature[1]"),
        ([diagonals[0], diagonals[1][FIRST]], "curvature[1]"),
    ):
        for call in (
            lambda broken=broken: merge(base, models, "epimer", curvature=broken),
            lambda broken=broken: epimer.diagnose_state_dicts(base, models, curvature=broken),
        ):
            refuses(CurvatureError, call, "curvature", named)


# Curvature projected on a basis.


def projections(bases, diagonals):
    """SᵀHS on each matrix's basis, by forming S."""
    made = []
    for one in diagonals:
        mapping = {}
        for key, basis in bases.items():
            S = basis_of(basis, *MATRICES[key]).double()
            mapping[key] = S.T @ (one[key].F.reshape(-1, 1) * S)
        made.append(mapping)
    return made


def test_projected_curvature_merges_as_what_it_was_projected_from():
    base = make_base(torch.float64)
    models, diagonals = make_models(base, 2), make_curvature(base, "diagonal", 2)
    bases = epimer.build_basis(base, models, rank=2)
    matrices = projections(bases, diagonals)
    expected = epimer.merge_state_dicts(base, models, "epimer", curvature=diagonals, rank=2)
    by_argument = epimer.merge_state_dicts(
        base, models, "epimer", basis=bases, curvature=[{k: Projected(H=H) for k, H in m.items()} for m in matrices]
    )
    by_metric = epimer.merge_state_dicts(
        base, models, "epimer", curvature=[{k: Projected(H=H, basis=bases[k]) for k, H in m.items()} for m in matrices]
    )
    for key in MATRICES:
        assert close(by_argument[key], expected[key], 1e-9)
        assert close(by_metric[key], expected[key], 1e-9)


def test_the_record_tells_the_rank_of_the_basis_that_was_used(base, models, diagonals):
    bases = epimer.build_basis(base, models, rank=2)
    merged = epimer.merge_state_dicts(base, models, "epimer", curvature=diagonals, basis=bases)
    assert merged.record.tensors[FIRST].rank == 2


def test_the_diagnosis_tells_the_rank_of_the_basis_that_was_used(base, models, diagonals):
    bases = epimer.build_basis(base, models, rank=2)
    assert epimer.diagnose_state_dicts(base, models, curvature=diagonals, basis=bases).layers[FIRST].theory.rank == 2


@pytest.mark.parametrize("size", [4, 20])  # 20 would fit the default basis by chance
def test_projected_curvature_without_a_basis_is_refused(base, models, size):
    curvature = [{k: Projected(H=torch.eye(size)) for k in MATRICES}] * 2
    named = ("curvature[0]", f"'{FIRST}'", "basis")
    refuses(CurvatureError, lambda: merge(base, models, "epimer", curvature=curvature), *named)


@pytest.mark.parametrize("size", [4, 20])
def test_a_diagnosis_refuses_projected_curvature_without_a_basis(base, models, size):
    curvature = [{k: Projected(H=torch.eye(size if k == FIRST else 18)) for k in MATRICES}] * 2
    named = ("curvature[0]", f"'{FIRST}'", "basis")
    refuses(CurvatureError, lambda: epimer.diagnose_state_dicts(base, models, curvature=curvature), *named)


@pytest.mark.parametrize(
    ("method", "kind", "wrong"),
    [
        ("epimer", "tagged", {"H": torch.eye(3)}),
        ("epimer", "tagged", {"G": torch.eye(4), "A": torch.eye(3)}),
        ("epimer_kron", "tensor", {"G": torch.eye(3), "A": torch.eye(4)}),
        ("epimer_kron", "tensor", {"H": torch.eye(4)}),
    ],
)
def test_projected_curvature_that_does_not_fit_its_basis_is_refused(base, models, method, kind, wrong):
    bases = epimer.build_basis(base, models, rank=2, basis=kind)
    right = {k: Projected(G=torch.eye(4), A=torch.eye(4)) for k in MATRICES}
    curvature = [right, right | {FIRST: Projected(**wrong)}]
    named = ("curvature[1]", f"'{FIRST}'")
    refuses(CurvatureError, lambda: merge(base, models, method, curvature=curvature, basis=bases), *named)


@pytest.mark.parametrize("wrong", [{"H": torch.eye(3)}, {"G": torch.eye(4), "A": torch.eye(3)}])
def test_a_diagnosis_refuses_projected_curvature_that_does_not_fit_its_basis(base, models, wrong):
    bases = epimer.build_basis(base, models, rank=2)
    right = {k: Projected(G=torch.eye(4), A=torch.eye(4)) for k in MATRICES}
    curvature = [right, right | {FIRST: Projected(**wrong)}]
    named = ("curvature[1]", f"'{FIRST}'")
    refuses(CurvatureError, lambda: epimer.diagnose_state_dicts(base, models, curvature=curvature, basis=bases), *named)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"H": torch.eye(4), "A": torch.eye(4)},
        {"H": -torch.eye(4)},
        {"H": torch.ones(4, 3)},
        {"A": torch.eye(4) / 0},
    ],
)
def test_projected_curvature_is_checked_as_any_other(base, models, wrong):
    bases = epimer.build_basis(base, models, rank=2)
    right = {k: Projected(H=torch.eye(4)) for k in MATRICES}
    curvature = [right, right | {FIRST: Projected(**wrong)}]
    refuses(
        CurvatureError,
        lambda: merge(base, models, "epimer", curvature=curvature, basis=bases),
        "curvature[1]",
        f"'{FIRST}'",
    )


def test_projections_on_different_bases_are_refused(base, models):
    first, second = epimer.build_basis(base, models, rank=2), epimer.build_basis(base, models[::-1], rank=2)
    curvature = [{k: Projected(H=torch.eye(4), basis=bases[k]) for k in MATRICES} for bases in (first, second)]
    named = ("curvature[1]", f"'{FIRST}'", "bas")
    refuses(CurvatureError, lambda: merge(base, models, "epimer", curvature=curvature), *named)
    refuses(CurvatureError, lambda: epimer.diagnose_state_dicts(base, models, curvature=curvature), *named)


def test_a_basis_serves_layers_too_small_for_one():
    base, models = draw((8, 6), tasks=3)
    base, models = base | {"tiny": randn(2, 6)}, [m | {"tiny": randn(2, 6, seed=5)} for m in models]
    curvature = [{k: Diagonal(randn(*base[k].shape, seed=t).square()) for k in base} for t in range(3)]
    bases = epimer.build_basis(base, models, rank=2)
    merged = epimer.merge_state_dicts(base, models, "epimer", curvature=curvature, basis=bases)
    expected = epimer.merge_state_dicts(base, models, "epimer", curvature=curvature, rank=2)
    assert all(close(merged[k], expected[k]) for k in base)
    assert merged.record.tensors["tiny"].status == "clamped"


def test_a_basis_without_directions_takes_curvature_without_entries(base):
    copies = [dict(base), dict(base)]
    bases = epimer.build_basis(base, copies, rank=2)
    curvature = [{k: Projected(H=torch.zeros(0, 0)) for k in MATRICES}] * 2
    merged = epimer.merge_state_dicts(base, copies, "epimer", curvature=curvature, basis=bases)
    assert torch.equal(merged[FIRST], base[FIRST])


@pytest.mark.parametrize("broken", ["missing", "of another layer", "a tensor", "a name"])
@pytest.mark.parametrize("use", ["merge", "diagnosis"])
def test_a_basis_must_have_every_matrix_and_fit_it(base, models, diagonals, use, broken):
    bases = epimer.build_basis(base, models, rank=2)
    given = {
        "missing": {SECOND: bases[SECOND]},
        "of another layer": bases | {FIRST: bases[SECOND]},
        "a tensor": bases | {FIRST: torch.ones(24, 4)},
        "a name": bases | {FIRST: "tagged"},
    }[broken]

    def call():
        if use == "merge":
            return epimer.merge_state_dicts(base, models, "epimer", curvature=diagonals, basis=given)
        return epimer.diagnose_state_dicts(base, models, curvature=diagonals, basis=given)

    refuses(EpimerError, call, "basis", f"'{FIRST}'")


@pytest.mark.parametrize("broken", ["tensor", 3])
def test_a_diagnosis_takes_a_basis_only_as_a_mapping(base, models, broken):
    refuses(ParameterError, lambda: epimer.diagnose_state_dicts(base, models, basis=broken), "basis")


def test_a_diagnosis_refuses_a_tensor_basis(base, models, diagonals):
    bases = epimer.build_basis(base, models, rank=2, basis="tensor")
    refuses(EpimerError, lambda: epimer.diagnose_state_dicts(base, models, curvature=diagonals, basis=bases), "basis")


def test_an_entrywise_method_has_no_subspace_to_choose(base, models, diagonals):
    for given in ({"basis": "tagged"}, {"rank": 2}, {"aggregator": "anchored"}):
        refuses(ParameterError, lambda given=given: merge(base, models, "fisher", **given), "fisher", *given)


# Weights, methods and parameters.


@pytest.mark.parametrize("weights", [[1], [1, 1, 1], []])
@pytest.mark.parametrize("name", ["average", "task_arithmetic", "tsv"])
def test_weights_must_be_one_per_model(base, models, name, weights):
    refuses(
        ParameterError, lambda: merge(base, models, name, weights=weights), "weights", f"{len(weights)} entries for 2"
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "0.5", None, True])
@pytest.mark.parametrize("name", ["average", "task_arithmetic"])
def test_weights_must_be_finite_numbers(base, models, name, bad):
    refuses(ParameterError, lambda: merge(base, models, name, weights=[0.5, bad]), "weights[1]")
    refuses(ParameterError, lambda: epimer.diagnose_state_dicts(base, models, weights=[0.5, bad]), "weights[1]")


@pytest.mark.parametrize("bad", [0.5, "ab", {"a": 1, "b": 2}])
def test_weights_must_be_a_list(base, models, bad):
    refuses(ParameterError, lambda: merge(base, models, "average", weights=bad), "weights")


def test_weights_of_a_mean_must_not_be_negative_nor_sum_to_zero(base, models):
    refuses(ParameterError, lambda: merge(base, models, "average", weights=[2, -1]), "weights[1]", "-1")
    refuses(ParameterError, lambda: merge(base, models, "tsv", weights=[0, 0]), "weights", "0")
    refuses(ParameterError, lambda: epimer.diagnose_state_dicts(base, models, weights=[0, 0]), "weights")


@pytest.mark.parametrize("weights", [(1.0, -1.0), (0.0, 0.0), (0.3, 0.9)])
def test_task_arithmetic_takes_weights_as_they_are(weights):
    base, models = draw((7, 5))
    merged = epimer.merge_state_dicts(base, models, "task_arithmetic", weights=list(weights))
    D = [model["w"] - base["w"] for model in models]
    assert close(merged["w"], base["w"] + weights[0] * D[0] + weights[1] * D[1])
    assert merged.record.weights == weights


def test_weights_of_a_mean_are_shares(base, models):
    first, second = (merge(base, models, "average", weights=w) for w in ([1, 3], torch.tensor([0.25, 0.75])))
    assert all(torch.equal(first[k], second[k]) for k in base)
    assert first.record.weights == (0.25, 0.75)


@pytest.mark.parametrize(("wrong", "right"), [("tie", "ties"), ("Average", "average"), ("epimer-kron", "epimer_kron")])
def test_an_unknown_method_is_answered_with_the_nearest(base, models, wrong, right):
    refuses(ParameterError, lambda: epimer.merge_state_dicts(base, models, wrong), f"'{wrong}'", f"'{right}'?")
    refuses(ParameterError, lambda: epimer.describe_method(wrong), f"'{wrong}'", f"'{right}'?", "iso_cts")


@pytest.mark.parametrize("wrong", [3, ["tsv"], "zzzzzz"])
def test_what_is_no_method_at_all_is_answered_with_all_of_them(base, models, wrong):
    refuses(ParameterError, lambda: epimer.merge_state_dicts(base, models, wrong), *METHODS)


@pytest.mark.parametrize(
    ("method", "wrong", "right"),
    [("ties", "densty", "density"), ("tsv", "ranks", "rank"), ("epimer", "dampening", "damping")],
)
def test_an_unknown_parameter_is_answered_with_the_nearest(base, models, method, wrong, right):
    refuses(ParameterError, lambda: merge(base, models, method, **{wrong: 0.1}), method, f"'{wrong}'", f"'{right}'?")


def invalid(parameter):
    """Values that a parameter must not take."""
    match parameter.kind:
        case "number" | "integer":
            yield from (True, False, "1", [1], float("nan"), float("inf"), torch.ones(1), 1j)
            if parameter.kind == "integer":
                yield from (1.5, 2.0)
            if parameter.low is not None:
                yield parameter.low - 1
                if parameter.open_low:
                    yield parameter.low
            if parameter.high is not None:
                yield parameter.high + 1
        case "boolean":
            yield from ("true", 1, 0.0, [True])
        case "choice":
            yield from ("nonsense", 3, True, ["trace"])
        case "numbers":
            yield from (3, "12", [1, -1], [1, float("nan")], [1, True], ["1", "2"])
        case "callable":
            yield from (3, "accuracy")
        case "mapping":
            yield from (3, "curvature.pt", [("w", 1)])
        case "basis":
            yield from ("nonsense", 3, True, ["tagged"])
        case "rules":
            yield from ("*.bias", 3, {"*.bias": "copy"}, ["*.bias"], [("*.bias",)], [(3, "copy")], [("*.bias", 3)])
        case _:
            raise AssertionError(parameter.kind)
    if not parameter.optional:
        yield None


@pytest.mark.parametrize("name", METHODS)
def test_every_parameter_of_every_method_refuses_what_it_cannot_take(name):
    base, models = draw((4, 4))
    for parameter in epimer.describe_method(name).parameters:
        for value in invalid(parameter):
            refuses(
                ParameterError,
                lambda key=parameter.name, value=value: epimer.merge_state_dicts(base, models, name, **{key: value}),
                f"'{parameter.name}'",
                name,
                "must be",
            )


@pytest.mark.parametrize("value", [torch.ones(2, 2), np.ones((2, 2))])
@pytest.mark.parametrize("key", ["scale", "basis"])
def test_a_value_of_many_lines_is_shown_in_one(base, models, key, value):
    refuses(ParameterError, lambda: merge(base, models, "epimer", **{key: value}), f"'{key}'", "must be")


def test_a_number_too_large_for_a_float_is_refused(base, models):
    refuses(ParameterError, lambda: merge(base, models, "average", scale=10**400), "'scale'")


@pytest.mark.parametrize("given", [{"rank": 0}, {"rank": 2.5}, {"rank": True}, {"damping": -1}, {"damping": "1"}])
def test_a_diagnosis_checks_its_parameters(base, models, given):
    refuses(ParameterError, lambda: epimer.diagnose_state_dicts(base, models, **given), f"'{next(iter(given))}'")


@pytest.mark.parametrize("given", [{"rank": 0}, {"rank": "2"}, {"basis": "full"}, {"basis": "tager"}, {"basis": {}}])
def test_a_basis_checks_its_parameters(base, models, given):
    refuses(ParameterError, lambda: epimer.build_basis(base, models, **given), f"'{next(iter(given))}'")


def test_numbers_of_numpy_are_numbers_and_are_recorded_as_such(base, models):
    given = {"rank": np.int64(4), "scale": np.float32(0.5), "seed": np.int32(3)}
    merged = merge(base, models, "tsv", **given)
    assert torch.equal(merged[FIRST], merge(base, models, "tsv", rank=4, scale=0.5)[FIRST])
    written = json.loads(json.dumps(merged.record.to_dict()))
    assert (written["parameters"]["rank"], written["parameters"]["scale"]) == (4, 0.5)


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "meta", 1.5, ["cpu"]])
def test_a_device_that_cannot_be_used_is_refused(base, models, device):
    refuses(EpimerError, lambda: merge(base, models, "average", device=device), "device", str(device))


def test_a_device_is_checked_before_any_work(base, models):
    calls = []

    def evaluate(state):
        calls.append(state)
        return 1.0

    refuses(EpimerError, lambda: merge(base, models, "greedy_soup", evaluate=evaluate, device="nonsense"), "nonsense")
    assert not calls


def test_a_soup_needs_a_score(base, models):
    refuses(ParameterError, lambda: epimer.merge_state_dicts(base, models, "greedy_soup"), "greedy_soup", "evaluate")


@pytest.mark.parametrize("answer", [float("nan"), None, "good", torch.ones(2)])
def test_a_soup_s_score_must_be_a_number(base, models, answer):
    refuses(
        ParameterError, lambda: merge(base, models, "greedy_soup", evaluate=lambda state: answer), "evaluate", "[0]"
    )


@pytest.mark.parametrize("wrong", [[1.0], [1, 2, 3], [], np.ones(3)])
def test_gradient_matching_needs_one_sample_count_per_model(base, models, diagonals, wrong):
    refuses(
        ParameterError,
        lambda: merge(base, models, "gradient_matching", curvature=diagonals, samples=wrong),
        "samples",
        f"{len(wrong)} entries for 2",
    )


def test_sample_counts_may_be_an_array(base, models, diagonals):
    first, second = (
        merge(base, models, "gradient_matching", curvature=diagonals, samples=counts)
        for counts in (np.array([10.0, 30.0]), [10, 30])
    )
    assert all(torch.equal(first[k], second[k]) for k in base)


# Rules.


def test_a_rule_pattern_that_matches_nothing_is_refused(base, models):
    rules = [("*.bias", "copy"), ("block.9.*", "copy")]
    for call in (
        lambda: merge(base, models, "average", rules=rules),
        lambda: epimer.diagnose_state_dicts(base, models, rules=rules),
        lambda: epimer.build_basis(base, models, rules=rules),
    ):
        refuses(ParameterError, call, "'block.9.*'")


@pytest.mark.parametrize("before", [0, 8])
def test_an_unknown_rule_is_named_however_long_the_list(base, models, before):
    rules = [(name, "copy") for name in list(base)[:before]] + [("*", "avrage")]
    refuses(ParameterError, lambda: merge(base, models, "tsv", rules=rules), "'avrage'", "average")


def test_the_rule_matrix_needs_at_least_two_dimensions(base, models):
    for key in (VECTOR, "temperature"):
        refuses(TensorError, lambda key=key: merge(base, models, "tsv", rules=[(key, "matrix")]), f"'{key}'", "matrix")


@pytest.mark.parametrize("rule", ["matrix", "average", "fisher"])
def test_integers_can_only_be_copied(base, models, rule):
    refuses(TensorError, lambda: merge(base, models, "tsv", rules=[("steps", rule)]), "'steps'", rule, "copy")


def test_the_rule_copy_needs_a_base(models):
    call = lambda: merge(None, models, "average", rules=[(VECTOR, "copy")])  # noqa: E731
    refuses(TensorError, call, f"'{VECTOR}'", "copy", "base")


@pytest.mark.parametrize("name", ["average", "tsv", "epimer", "ties"])
def test_copy_takes_the_base_s_tensor_and_ignores_the_models(base, models, name):
    broken = changed(models, 1, block__0__weight=torch.full((3,), float("nan")))
    merged = merge(base, broken, name, rules=[(FIRST, "copy")])
    assert torch.equal(merged[FIRST], base[FIRST])
    assert merged[FIRST].data_ptr() != base[FIRST].data_ptr()
    assert merged.record.tensors[FIRST].rule == "copy"


@pytest.mark.parametrize("name", ["average", "tsv", "epimer", "ties"])
def test_skip_leaves_a_tensor_out_and_lets_names_differ(base, models, name):
    models = changed(without(models, 1, FIRST), 0, extra=torch.ones(3))
    merged = merge(base, models, name, rules=[(FIRST, "skip"), ("extra", "skip")])
    assert list(merged) == [key for key in base if key != FIRST]
    assert merged.record.tensors[FIRST].rule == "skip"


@pytest.mark.parametrize("name", ON_MATRICES)
def test_average_takes_a_matrix_out_of_the_method(name):
    base = make_base(torch.float64)
    models = make_models(base, 2)
    merged = merge(base, models, name, rules=[(FIRST, "average")])
    assert close(merged[FIRST], mean(models, FIRST))
    assert torch.equal(merged[SECOND], merge(base, models, name)[SECOND])


def test_average_obeys_weights_and_scale():
    base, models = draw((6, 6))
    merged = epimer.merge_state_dicts(base, models, "tsv", weights=[1, 3], scale=0.5, rules=[("w", "average")])
    D = [model["w"] - base["w"] for model in models]
    assert close(merged["w"], base["w"] + 0.5 * (0.25 * D[0] + 0.75 * D[1]))


@pytest.mark.parametrize("name", ["epimer", "tsv", "epimer_kron", "task_arithmetic", "greedy_soup"])
def test_fisher_weighs_a_tensor_by_its_diagonal_in_any_method(name):
    base = make_base(torch.float64)
    models, diagonals = make_models(base, 2), make_curvature(base, "diagonal", 2)
    method = epimer.describe_method(name)
    curvature = make_curvature(base, method.curvature, 2) or [{}, {}]
    curvature = [one | {VECTOR: extra[VECTOR]} for one, extra in zip(curvature, diagonals, strict=True)]
    given = {"curvature": curvature, "rules": [("*.bias", "fisher")]}
    if name == "greedy_soup":
        given["evaluate"] = lambda state: 1.0
    merged = epimer.merge_state_dicts(base, models, name, **given)
    F1, F2 = (one[VECTOR].F for one in diagonals)
    assert close(merged[VECTOR], (F1 * models[0][VECTOR] + F2 * models[1][VECTOR]) / (F1 + F2))
    assert merged.record.tensors[VECTOR].rule == "fisher"


def test_fisher_obeys_weights_and_scale(base, diagonals):
    base = make_base(torch.float64)
    models = make_models(base, 2)
    merged = epimer.merge_state_dicts(
        base, models, "epimer", curvature=diagonals, weights=[1, 3], scale=0.5, rules=[(VECTOR, "fisher")]
    )
    F1, F2 = diagonals[0][VECTOR].F, 3 * diagonals[1][VECTOR].F
    D1, D2 = (model[VECTOR] - base[VECTOR] for model in models)
    assert close(merged[VECTOR], base[VECTOR] + 0.5 * (F1 * D1 + F2 * D2) / (F1 + F2))


def test_fisher_leaves_the_mean_where_no_model_has_curvature():
    base, models = draw((5,))
    F = torch.tensor([1.0, 0, 2, 0, 3]).double()
    curvature = [{"w": Diagonal(F)}, {"w": Diagonal(2 * F)}]
    merged = epimer.merge_state_dicts(base, models, "tsv", curvature=curvature, rules=[("w", "fisher")])["w"]
    expected = torch.where(F > 0, (models[0]["w"] + 2 * models[1]["w"]) / 3, mean(models, "w"))
    assert close(merged, expected)


def test_fisher_needs_a_diagonal_of_every_model(base, models, diagonals, factors):
    def call(curvature):
        return lambda: merge(base, models, "tsv", curvature=curvature, rules=[(FIRST, "fisher")])

    refuses(CurvatureError, call(None), f"'{FIRST}'")
    refuses(CurvatureError, call(without(diagonals, 1, FIRST)), "curvature[1]", f"'{FIRST}'")
    refuses(CurvatureError, call(factors), "curvature[0]", f"'{FIRST}'", "Diagonal")


def test_matrix_takes_a_table_into_the_method(base, models):
    name = "lm_head.weight"
    merged = merge(base, models, "tsv", rules=[(name, "matrix")])
    assert merged.record.tensors[name].rule == "matrix"
    alone = epimer.merge_state_dicts({"w": base[name]}, [{"w": model[name]} for model in models], "tsv")
    assert torch.equal(merged[name], alone["w"])
    assert not close(merged[name].double(), mean(models, name), 1e-3)


def test_the_first_rule_that_matches_wins(base, models):
    rules = [("block.0.*", "copy"), ("*.weight", "average"), ("*", "skip")]
    merged = merge(base, models, "tsv", rules=rules)
    assert {name: record.rule for name, record in merged.record.tensors.items()} == {
        FIRST: "copy",
        SECOND: "average",
        "embed_tokens.weight": "average",
        VECTOR: "copy",
        "conv.weight": "average",
        "temperature": "skip",
        "empty": "skip",
        "lm_head.weight": "average",
        "steps": "skip",
    }
    assert torch.equal(merged[VECTOR], base[VECTOR])
    assert close(merged[SECOND].double(), mean(models, SECOND), 1e-6)
    assert set(merged) == {FIRST, SECOND, "embed_tokens.weight", VECTOR, "conv.weight", "lm_head.weight"}


def test_a_diagnosis_and_a_basis_follow_the_rules(base, models):
    rules = [(FIRST, "average"), ("conv.weight", "matrix")]
    assert set(epimer.build_basis(base, models, rules=rules)) == {SECOND, "conv.weight"}
    assert set(epimer.diagnose_state_dicts(base, models, rules=rules).layers) == {SECOND, "conv.weight"}


def test_a_diagnosis_without_a_matrix_is_refused():
    base, models = draw((7,))
    refuses(TensorError, lambda: epimer.diagnose_state_dicts(base, models), "no matrix")


# Warnings.


@pytest.mark.parametrize("name", [m for m in METHODS if not epimer.describe_method(m).needs_curvature])
def test_curvature_given_in_vain_is_said(base, models, diagonals, name):
    with pytest.warns(EpimerWarning, match=f"{name} uses no curvature"):
        merged = merge(base, models, name, curvature=diagonals[: epimer.describe_method(name).models[1]])
    plain = merge(base, models, name)
    assert all(torch.equal(merged[k], plain[k]) for k in base)


def test_curvature_that_a_rule_uses_is_not_in_vain(base, models, diagonals):
    with warnings.catch_warnings():
        warnings.simplefilter("error", EpimerWarning)
        merge(base, models, "average", curvature=diagonals, rules=[(VECTOR, "fisher")])


def test_warnings_point_at_the_line_that_called(base, models, diagonals):
    with pytest.warns(EpimerWarning) as caught:
        epimer.merge_state_dicts(base, models, "tsv", curvature=diagonals, rank=100)
    assert len(caught) == 2
    assert {warning.filename for warning in caught} == {__file__}


def test_singular_curvature_is_said_and_leaves_the_mean_where_it_is_zero():
    base, models = draw((6, 5))
    x = randn(1, 5, seed=8)
    curvature = [{"w": Kronecker(A=c * x.T @ x)} for c in (1, 2)]
    with pytest.warns(EpimerWarning, match="singular.*'w'"):
        merged = epimer.merge_state_dicts(base, models, "regmean", curvature=curvature, off_diagonal=1.0)
    assert merged.record.tensors["w"].status == "damped"
    W1, W2 = (model["w"] for model in models)
    along = x.T @ x / x.square().sum()
    assert close(merged["w"], (W1 + W2) / 2 @ (torch.eye(5) - along) + (W1 + 2 * W2) / 3 @ along, 1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_curvature_merges_float32_models_as_it_does_float64_ones(dtype):
    base, models = draw((12, 40), dtype=torch.float32)
    curvature = [{"w": Kronecker(A=X.T @ X)} for X in (randn(8, 40, seed=30), randn(8, 40, seed=31))]
    rounded = [{"w": Kronecker(A=one["w"].A.to(dtype))} for one in curvature]
    wide = epimer.merge_state_dicts(
        double(base), [double(model) for model in models], "regmean", curvature=curvature, off_diagonal=1
    )
    merged = epimer.merge_state_dicts(base, models, "regmean", curvature=rounded, off_diagonal=1)
    assert close(merged["w"].double() - base["w"], wide["w"] - base["w"], 1e-3)
