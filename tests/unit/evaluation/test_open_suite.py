"""Suites by name, by file and by function; options go to the suites that take them."""

import inspect
import sys
from types import ModuleType

import pytest

from epimer.errors import ParameterError, RecipeError
from epimer.evaluation import open_suite as module
from epimer.evaluation.open_suite import SUITES, is_suite_file, open_suite
from trained import make_suite


def test_files_are_told_by_their_ending():
    assert all(map(is_suite_file, ("suite.yaml", "a/b.YML")))
    assert not any(map(is_suite_file, ("glyphs8", "my_suite:make", "suite.json")))


@pytest.mark.parametrize("name", SUITES)
def test_every_loader_takes_a_seed_and_can_be_quiet(name):
    assert {"seed", "progress"} <= inspect.signature(module._loader(name)).parameters.keys()


def test_a_named_suite_gets_its_options_and_no_other_does(tmp_path, monkeypatch):
    seen = {}

    def load(size=None, *, seed, progress):
        seen.update(size=size, seed=seed, progress=progress)
        return make_suite(tmp_path)

    outside = ModuleType("outside_suite")
    outside.load = load
    monkeypatch.setitem(sys.modules, "outside_suite", outside)
    monkeypatch.setitem(SUITES, "small", "outside_suite:load")
    assert open_suite("small", seed=3, progress=False, size="large", limit=None).name == "small"
    assert seen == {"size": "large", "seed": 3, "progress": False}
    with pytest.raises(ParameterError, match="--size is for the suite small; leave it out for glyphs8"):
        open_suite("glyphs8", size="large")
    with pytest.raises(ParameterError, match=r"--variant is for the suite clip8; leave it out for suite\.yaml"):
        open_suite("suite.yaml", variant="B/32")


def test_what_cannot_be_opened_is_named():
    with pytest.raises(
        ParameterError, match=r"There is no suite 'glyphs'\. Did you mean 'glyphs8'\? .*module:function"
    ):
        open_suite("glyphs")
    with pytest.raises(RecipeError, match=r"Cannot read the suite 'nowhere\.yaml'"):
        open_suite("nowhere.yaml")
