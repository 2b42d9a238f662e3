"""What goes in: every kind of tensor has a defined fate, every unusable input one line that says where it is."""

import json
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import epimer
from dense import close
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
from models import MATRICES, OTHERS, make_base, make_curvature, make_models
from state_dicts import (
    FIRST,
    METHODS,
    SECOND,
    VECTOR,
    changed,
    double,
    draw,
    mean,
    merge,
    psd,
    randn,
    refuses,
    spoiled,
    without,
)

ON_MATRICES = [name for name in METHODS if not epimer.describe_method(name).elementwise]
BASELESS = ("average", "nan", "greedy_soup", "fisher", "regmean", "mats", "karcher")
OPTIONAL = ("nuslerp", "multislerp", "passthrough")
"""methods that merge something else where there is a base, or that never look at it"""


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
    refuses(ParameterError, lambda: epimer.describe_method(wrong), f"'{wrong}'", f"'{right}'?")


@pytest.mark.parametrize("wrong", [3, ["tsv"], "zzzzzz"])
def test_what_is_no_method_at_all_is_answered_with_where_they_are_listed(base, models, wrong):
    listing = f"`epimer methods` lists all {len(METHODS)}."
    refuses(ParameterError, lambda: epimer.merge_state_dicts(base, models, wrong), listing)


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
