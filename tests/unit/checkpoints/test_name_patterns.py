"""Patterns of module names: what PEFT's regular expressions match, in time that their lengths bound."""

import re
from random import Random

import pytest

from epimer.checkpoints.name_patterns import LONGEST, MOST_PATTERNS, NamePatterns

NAMES = [
    "q_proj", "model.layers.0.self_attn.q_proj", "model.layers.10.self_attn.q_proj", "model.layers.1.mlp.up_proj",
    "encoder.layer.3.attention.output.dense", "encoder.layer.13.attention.self.query", "transformer.h.7.attn.c_attn",
    "up.up.up", "a.b", "ab", "",
]  # fmt: skip
PATTERNS = [
    "q_proj", "self_attn.q_proj", "^model.layers.0.self_attn.q_proj", "^q_proj", r"layers\\.[01]\\..*", ".*q_proj",
    ".*", r".*\.(q|k|v|up)_proj", r"layers\.\d+\.self_attn\..*", r"layers\.(0|1|2)\.(mlp|self_attn)\.[a-z_]+",
    r"h\.[0-9]\.attn\.c_attn$", "(?:query|dense)", "up(.up)?", "[^.]+", r"\w+", "a.b", "ab?", "(a|b|)", "[a-c]b*",
    r"attention\.self\.query|output\.dense", ".+?_proj", r"[\w.]*dense", "[]a]b", "[a-]b",
]  # fmt: skip


def peft(pattern: str, name: str) -> bool:
    """Whether a key of alpha_pattern is for a module, as `peft.utils.other.get_pattern_key` asks it."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_peft_matches(pattern):
    assert [NamePatterns({pattern: 1}).value(name, 0) == 1 for name in NAMES] == [peft(pattern, n) for n in NAMES]


def test_the_first_pattern_that_matches_counts():
    patterns = NamePatterns({"v_proj": 1, ".*_proj": 2, "self_attn.q_proj": 3, "dense": 4})
    values = [patterns.value(name, 0) for name in ("a.v_proj", "self_attn.q_proj", "x.dense", "x_dense", "dense.x")]
    assert values == [1, 2, 4, 0, 0]


def test_random_patterns_are_those_of_python_or_refused():
    rng, pieces = (
        Random(0),
        ["a", "b", ".", r"\.", "*", "+", "?", "(", ")", "|", "[ab]", "[^.]", r"\w", "^", "$", "{2}"],
    )
    names = ["".join(rng.choices("ab.", k=rng.randrange(8))) for _ in range(40)]
    read = 0
    for _ in range(3000):
        pattern = "".join(rng.choices(pieces, k=rng.randrange(1, 7)))
        try:
            patterns = NamePatterns({pattern: 1})
        except ValueError:
            continue
        if set(pattern) <= {"a", "b", "."}:  # a dot in a name is a dot
            continue
        try:
            expected = [peft(pattern, name) for name in names]
        except re.error:
            continue
        read += 1
        assert [patterns.value(name, 0) == 1 for name in names] == expected, pattern
    assert read > 700


@pytest.mark.parametrize(
    "pattern", ["(a*)*b", "(.*)*x", "(a|aa)+$", r"(a)\1", "a{2,3}", "(?=a)", "(?i)a", "a**", "[a", "(a"]
)
def test_other_forms_are_refused_by_name(pattern):
    with pytest.raises(ValueError, match=re.escape(repr(pattern))):
        NamePatterns({pattern: 1})


def test_long_patterns_and_names_end():
    """Four times `.*` took Python steps in the fourth power of the name's length."""
    patterns = NamePatterns({".*" * 400 + f"x{i}": i for i in range(MOST_PATTERNS)})
    assert patterns.value("a." * (LONGEST // 8), 7) == 7
    assert patterns.value("a" * 10**6, 7) == 7
    with pytest.raises(ValueError, match="33 patterns, and at most 32"):
        NamePatterns({f".*{i}": i for i in range(MOST_PATTERNS + 1)})
    with pytest.raises(ValueError, match="2001 characters"):
        NamePatterns({".*" * 1000 + "x": 1})
