"""A merge that equals its base, or leaves most of what moved as it was, says so; shares are of parameters."""

import warnings

import pytest
import torch

import epimer

SHAPES = {"big.weight": (30, 30), "small.weight": (5, 4), "bias": (8,)}  # 900, 20 and 8 parameters


def models(step=0.1):
    torch.manual_seed(0)
    base = {name: 1 + torch.rand(shape) for name, shape in SHAPES.items()}
    return base, [{name: W + step * torch.randn(W.shape) for name, W in base.items()} for _ in range(2)]


def merged(base, tuned, **options):
    """Return the merge, and what it warned of in one text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = epimer.merge_state_dicts(base, tuned, options.pop("method", "task_arithmetic"), **options)
    return found, " ".join(str(one.message) for one in caught)


def test_shares_are_of_parameters():
    base, tuned = models()
    found, text = merged(base, tuned, method="tsv", rules=[("small.*", "copy")])
    assert found.record.shares == pytest.approx({"matrix": 900 / 928, "copy": 20 / 928, "average": 8 / 928})
    assert found.record.untouched == pytest.approx(20 / 928)
    assert "equals its base" not in text
    assert "copied" not in text


@pytest.mark.parametrize("cause", ["scale 0", "everything is copied", "lost in bfloat16", "models equal the base"])
def test_a_merge_that_equals_its_base_says_so(cause):
    base, tuned = models(1e-6 if "bfloat16" in cause else 0.1)
    options = {"scale": 0.0} if cause == "scale 0" else {}
    if "copied" in cause:
        options = {"rules": [("*", "copy")]}
    if "bfloat16" in cause:
        base = {name: W.bfloat16() for name, W in base.items()}
        tuned = [{name: base[name].float() + 1e-6 for name in base} for _ in range(2)]
    if "equal" in cause:
        tuned = [base, base]
    found, text = merged(base, tuned, **options)
    assert all(torch.equal(found[name], base[name]) for name in base)
    assert "the merge equals its base" in text


def test_most_of_what_moved_is_left_as_it_was():
    base, tuned = models()
    for rule in ("copy", "skip"):
        found, text = merged(base, tuned, rules=[("big.*", rule)])
        assert found.record.untouched == pytest.approx(900 / 928)
        assert "97% of the parameters that the models changed are copied, skipped" in text


def test_a_frozen_tensor_is_no_reason_to_warn():
    base, tuned = models()
    frozen = [{**model, "big.weight": base["big.weight"]} for model in tuned]
    found, text = merged(base, frozen)
    assert found.record.tensors["small.weight"].unchanged is False
    assert found.record.untouched == 0
    assert not text
    found, text = merged(base, frozen, rules=[("big.*", "copy")])
    assert found.record.untouched == 0
    assert not text


def test_wide_tensors_are_compared_to_their_last_entry():
    base = {"wide.weight": torch.ones(2000, 1500)}
    tuned = {"wide.weight": base["wide.weight"].clone()}
    tuned["wide.weight"][-1, -1] = 3
    assert merged(base, [base])[0].record.tensors["wide.weight"].unchanged
    found, text = merged(base, [tuned])
    assert not found.record.tensors["wide.weight"].unchanged
    assert not text
