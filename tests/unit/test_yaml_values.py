"""YAML of strangers: plain data, or a ValueError in time proportional to the text."""

import pytest

from epimer.yaml_values import yaml_value


def test_plain_data_is_read():
    assert yaml_value("a: [1, {b: two}]\nc: &x {d: 3}\ne: *x") == {"a": [1, {"b": "two"}], "c": {"d": 3}, "e": {"d": 3}}
    assert yaml_value("") is None


def merge_bomb(levels):
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    ["a: !!python/object/apply:os.getcwd []", "a: !!bool maybe", "a: !!int ''", "[" * 3000, "a: [", merge_bomb(20)],
)
def test_the_rest_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        yaml_value(text)
