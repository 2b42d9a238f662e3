"""The package from outside: an instant import, public names that exist, pages that match the code."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import epimer

ROOT = Path(__file__).parents[2]


def test_importing_epimer_does_not_import_torch():
    code = "import sys, epimer; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_can_be_had():
    for name in epimer.__all__:
        assert getattr(epimer, name) is not None
    assert set(epimer.__all__) <= set(dir(epimer))
    with pytest.raises(AttributeError, match="no attribute 'merg'"):
        epimer.merg  # noqa: B018


def test_the_methods_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert page == generate.render(), "run `make docs`"


def test_version_agrees_with_the_project_file():
    assert f'version = "{epimer.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
