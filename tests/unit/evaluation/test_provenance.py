import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import epimer
from commands import run
from epimer.evaluation.provenance import SOURCE, command, provenance, source_state

ROOT = Path(__file__).parents[3]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder, *arguments):
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def head():
    """Return the commit of the checkout that the tests run in, or None in an unpacked archive."""
    try:
        return git(ROOT, "rev-parse", "HEAD") if git(ROOT, "ls-files", "src") else None
    except subprocess.CalledProcessError:
        return None


@pytest.fixture
def checkout(tmp_path):
    """A repository with a package and a benchmark, in one commit."""
    (tmp_path / "src/package").mkdir(parents=True)
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "src/package/__init__.py").write_text("")
    (tmp_path / "benchmarks/speed.py").write_text("")
    (tmp_path / "benchmarks/results/speed.json").write_text("{}")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "all")
    return tmp_path


@needs_git
def test_the_commit_is_that_of_the_package(checkout):
    package = checkout / "src/package"
    assert source_state(package) == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False}


@needs_git
@pytest.mark.parametrize("file", ["src/package/__init__.py", "src/package/new.py", "benchmarks/speed.py"])
def test_changed_code_is_dirty(checkout, file):
    (checkout / file).write_text("1\n")
    assert source_state(checkout / "src/package")["dirty"] is True


@needs_git
@pytest.mark.parametrize("file", ["benchmarks/results/speed.json", "benchmarks/results/new.json", "notes.txt"])
def test_results_of_earlier_benchmarks_are_no_change_of_the_code(checkout, file):
    (checkout / file).write_text("1\n")
    assert source_state(checkout / "src/package")["dirty"] is False


@needs_git
def test_a_package_installed_into_another_repository_has_no_commit(checkout):
    (checkout / ".gitignore").write_text(".venv\n")
    installed = checkout / ".venv/package"
    shutil.copytree(checkout / "src/package", installed)
    assert source_state(installed) == {"commit": None, "dirty": None}


def test_outside_a_repository_there_is_no_commit(tmp_path):
    (tmp_path / "__init__.py").write_text("")
    assert source_state(tmp_path) == {"commit": None, "dirty": None}


def test_provenance_names_code_versions_machine_and_settings():
    origin = provenance(seed=3, samples=256)
    assert origin["commit"] == head()
    assert origin == {**origin, **source_state(SOURCE), "epimer": epimer.__version__, "torch": torch.__version__}
    assert origin["python"] == ".".join(map(str, sys.version_info[:3]))
    assert origin["machine"]["cpu"]
    assert 1 <= origin["machine"]["cores"] <= os.cpu_count()
    assert (origin["seed"], origin["samples"]) == (3, 256)


def test_a_command_has_no_folders_of_the_machine():
    line = ["/home/me/epimer/benchmarks/growth.py", "--json", "/tmp/a b.json", "--out=/mnt/x", "s3://bucket/m", "0.5"]
    assert command(line) == "growth.py --json 'a b.json' --out=x s3://bucket/m 0.5"
    assert command(["/usr/lib/epimer/__main__.py", "bench"]) == "epimer bench"


def test_an_experiment_that_needs_no_suite_names_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["epimer", "bench", "--experiment", "basins", "-o", str(tmp_path)])
    assert run(*sys.argv[1:]).code == 0
    made = json.loads((tmp_path / "basins.json").read_text())["made"]
    assert made["commit"] == head()
    assert made["command"] == f"epimer bench --experiment basins -o {tmp_path.name}"


def test_a_benchmarks_file_names_its_commit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    importlib.import_module("result_file").write_result(tmp_path / "x.json", {"rows": [1, 2]}, seed=7)
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["rows"] == [1, 2]
    assert (result["made"]["commit"], result["made"]["seed"]) == (head(), 7)


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda path: path.stem)
def test_every_benchmark_writes_its_results_with_their_provenance(script):
    """Numbers go to `write_result`, records of experiments to `write` with the provenance of their bench."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    functions = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    methods = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
    options = {argument.value for call in calls for argument in call.args if isinstance(argument, ast.Constant)}
    if options & {"--json", "--save"}:
        assert "write_result" in functions
    if "write" in functions:
        assert "with_provenance" in methods or "provenance" in functions
