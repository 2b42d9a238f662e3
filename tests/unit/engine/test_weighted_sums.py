"""Weighted sums in few passes: the bytes of the plain expression, near float64, and nothing that is not finite."""

import pytest
import torch

import epimer
from epimer.engine.weighted_sums import add_weighted_sum
from epimer.geometry.linalg import LowRank, weighted_sum
from epimer.plan.memory import STREAMED

SIZE = STREAMED + 77
WEIGHTS = [0.2, 0.5, 0.3]
POWERS = [0.125] * 3  # by which a sum is multiplied once


def tensors(dtype, shape=(SIZE,)):
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for _ in range(4)]


@pytest.mark.parametrize("shape", [(SIZE,), (77, 3), ()])
@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("based", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("weights", [WEIGHTS, POWERS, [1.0] * 3])
def test_it_has_the_bytes_of_the_plain_expression_and_is_near_float64(weights, dtype, based, scale, shape):
    base, *models = tensors(dtype, shape)
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    start = base.to(precision) if based else torch.zeros(shape, dtype=precision)
    result = torch.empty(shape, dtype=dtype)
    assert add_weighted_sum(result, base if based else None, models, weights, scale, precision)
    plain = scale * weighted_sum([W.to(precision) - start for W in models], weights) + start
    assert torch.equal(result, plain.to(dtype))
    origin = start.double()
    exact = origin + scale * sum(w * (W.double() - origin) for w, W in zip(weights, models, strict=True))
    largest = 2 * max(1, sum(weights)) * max(float(W.abs().max()) for W in (base, *models))  # of any number on the way
    assert (result.double() - exact).abs().max() <= 6 * torch.finfo(dtype).eps / 2 * largest


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1, 1)])
def test_factors_are_differences_from_the_base(shape):
    base, B, A = torch.randn(shape), torch.randn(6, 2), torch.randn(2, 5)
    result = torch.empty(shape)
    assert add_weighted_sum(result, base, [LowRank(B, A), base + 1], [0.5, 0.25], 1.0, torch.float32)
    torch.testing.assert_close(result, base + 0.5 * (B @ A).reshape(shape) + 0.25)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3e38, 1e5])
def test_what_is_not_finite_in_the_dtype_of_the_result_is_reported(value):
    models = tensors(torch.float32)[1:]
    models[1][-1] = value
    fits = {torch.bfloat16: abs(value) <= 3e38, torch.float16: False}
    for dtype, expected in fits.items():
        weights = [0.0, 1.5, 0.0] if abs(value) == 1e5 else [0.2, 1.0, 0.3]
        result = torch.empty(SIZE, dtype=dtype)
        assert add_weighted_sum(result, None, models, weights, 1.0, torch.float32) is expected
        assert bool(torch.isfinite(result).all()) is expected


def test_large_numbers_that_fit_are_not_refused():
    models = [torch.full((SIZE,), 60000.0)] * 2
    result = torch.empty(SIZE, dtype=torch.float16)
    assert add_weighted_sum(result, None, models, [0.5, 0.5], 1.0, torch.float32)


def test_a_sum_that_leaves_the_precision_before_its_weight_is_reported():
    """The plain route, which multiplies first, then merges it."""
    models = [torch.full((9,), 3e38)] * 2
    assert not add_weighted_sum(torch.empty(9), None, models, [0.5, 0.5], 1.0, torch.float32)
    merged = epimer.merge_state_dicts(None, [{"w": W} for W in models], "average")
    assert torch.equal(merged["w"], models[0])
