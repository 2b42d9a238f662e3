"""Options that several commands share."""

import pytest

from epimer.cli.options import split_commas
from epimer.errors import ParameterError


def test_values_with_commas():
    assert split_commas("0.5, 1,1.5,", float, "--scale") == [0.5, 1.0, 1.5]
    assert split_commas("tsv", str, "--methods") == ["tsv"]
    assert split_commas(None, int, "--rank") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,x", "--rank must be values with commas between them, as 0.5,1,1.5; got '1,x'."),
        (" , ", "--rank names nothing; leave it out, or give values with commas between them."),
    ],
)
def test_values_that_are_none(text, message):
    with pytest.raises(ParameterError) as caught:
        split_commas(text, int, "--rank")
    assert str(caught.value) == message
