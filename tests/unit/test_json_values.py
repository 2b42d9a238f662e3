"""JSON is read in one way: what is within the limits as the standard library reads it, and nothing beyond them."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import epimer
from epimer.json_values import RepeatedKeyError, json_value

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**299), 10**299) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES)
def test_a_value_comes_back(value):
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), json.dumps(value).encode()):
        assert json_value(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 101 + "]" * 101, "nested deeper than 100 levels"),
        ('{"a":' * 101 + "1" + "}" * 101, "nested deeper than 100 levels"),
        ("[" * 100_000, "nested deeper than 100 levels"),
        ("[1, " + "9" * 301 + "]", "an integer of 301 digits"),
        ('{"a": -' + "9" * 4500 + "}", "an integer of 4501 digits"),
        (r'"\ud800"', r"half a character, '\\ud800'"),
        (r'{"a": {"b\udfff": 1}}', r"half a character, '\\udfff'"),
        (b'"\xed\xa0\x80"', "can't decode byte"),
        (b"\xff\xfe{\0}\0", "can't decode byte"),
    ],
)
def test_what_is_beyond_the_limits_is_refused_in_a_line(text, message):
    with pytest.raises(ValueError, match=message) as error:
        json_value(text)
    assert len(str(error.value).splitlines()) == 1


def test_the_limits_themselves_are_read():
    assert json_value("[" * 100 + "]" * 100) == json.loads("[" * 100 + "]" * 100)
    assert json_value("9" * 300) == 10**300 - 1
    assert float(json_value("-" + "9" * 300)) == -1e300
    assert json_value(r'["\ud83d\ude00", "[[[["]') == ["\U0001f600", "[[[["]
    assert json_value(json.dumps("[{" * 100)) == "[{" * 100
    assert json_value(b"\xef\xbb\xbf[1]") == [1]


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": -0}', "[NaN]", "[Infinity]", "[-1]"])
def test_strict_reads_counts_and_no_key_twice(text):
    json_value(text)
    with pytest.raises(ValueError, match=r"twice|no count"):
        json_value(text, strict=True)
    with pytest.raises(RepeatedKeyError, match="'b' twice"):
        json_value('{"a": {"b": 1, "b": 2}}', strict=True)


def test_no_other_module_parses_json():
    root = Path(epimer.__file__).parent
    others = [path for path in root.rglob("*.py") if re.search(r"json\.loads?\(", path.read_text(encoding="utf-8"))]
    assert {path.name for path in others} == {"json_values.py"}
