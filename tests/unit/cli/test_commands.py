"""The command line starts at once, lists its commands in order, and passes on what it is given."""

import os
import pstats
import re
import signal
import subprocess
import sys
from dataclasses import fields
from inspect import signature

import pytest

from commands import run
from epimer.cli import COMMANDS, app
from epimer.cli.bench import EXPERIMENTS, WITHOUT_SUITE
from epimer.cli.curvature import curvature

HEAVY = {"torch", "numpy", "transformers", "safetensors", "yaml", "huggingface_hub"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["merge", "--help"], ["bench", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    command = [sys.executable, "-X", "importtime", "-m", "epimer", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in ran.stderr.splitlines()}
    assert "typer" in imported
    assert imported.isdisjoint(HEAVY)


def test_help_lists_every_command_in_order():
    known, (_, table) = COMMANDS.split(), run("--help").out.split("Commands")
    assert re.findall(r"^│ ([a-z-]+) ", table, re.MULTILINE) == [name.replace("_", "-") for name in known]
    assert [command.name or command.callback.__name__ for command in app.registered_commands] == known


def test_bench_names_every_experiment():
    from epimer.experiments.basins import WITHOUT_SUITE as ALONE
    from epimer.experiments.paper import EXPERIMENTS as KNOWN

    assert EXPERIMENTS.split(", ") == list(KNOWN)
    assert WITHOUT_SUITE.split(", ") == list(ALONE)


def test_curvature_passes_every_option_on():
    from epimer.curvature.measure import Request

    options = set(signature(curvature).parameters) - {"engine", "address", "shards", "plugin", "as_json", "quiet"}
    assert options == {field.name for field in fields(Request)} - {"progress"}


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("epimer.api.diagnose", ["diagnose", "recipe.yaml"]),
        ("epimer.api.sweep", ["sweep", "recipe.yaml", "--eval", "suite.yaml"]),
        ("epimer.api.make_basis", ["basis", "recipe.yaml", "out"]),
    ],
    ids=["diagnose", "sweep", "basis"],
)
def test_memory_and_workers_are_passed_on_where_given(monkeypatch, function, arguments):
    passed = []

    def record(*_, **options):
        passed.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(function, record)
    for given in ([], ["--max-memory", "3GB"], ["--workers", "2", "--max-memory", "1GB"]):
        assert run(*arguments, *given) == (130, "", "stopped; nothing was written.\n")
    assert [(options.get("max_memory"), options.get("workers")) for options in passed] == [
        (None, None),
        ("3GB", None),
        ("1GB", 2),
    ]


def test_an_internal_error_says_so(monkeypatch):
    monkeypatch.delenv("EPIMER_DEBUG", raising=False)
    monkeypatch.setattr("epimer.methods.registry.list_methods", lambda: 1 / 0)
    line = "internal error: ZeroDivisionError: division by zero (EPIMER_DEBUG=1 shows where)"
    assert run("methods") == (1, "", f"{line}\n")
    assert run("methods", "--json") == (1, f'{{"error": "{line}"}}\n', f"{line}\n")
    monkeypatch.setenv("EPIMER_DEBUG", "1")
    assert "in test_an_internal_error_says_so" not in run("methods").out
    assert run("methods").err.startswith("Traceback (most recent call last)")


STOPPED = """
import os, signal, sys
from epimer import cli
moment, number = sys.argv[1], int(sys.argv[2])
def kill(*_, **__):
    os.kill(os.getpid(), number)
if moment == "parsing":
    from typer.core import TyperGroup
    TyperGroup.make_context = kill
elif moment == "importing":
    sys.addaudithook(lambda event, args: kill() if event == "import" and args[0] == "epimer.methods.registry" else None)
elif moment == "twice":
    def twice(*_):
        try:
            kill()
        finally:
            kill()  # as `timeout` does
            print("in order", file=sys.stderr)
    import epimer.methods.registry
    epimer.methods.registry.list_methods = twice
sys.argv = ["epimer", "methods"]
cli.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("moment", ["parsing", "importing", "twice"])
def test_a_signal_ends_a_command_in_one_line(moment, number, code):
    command = [sys.executable, "-c", STOPPED, moment, str(int(number))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=default_signals)
    said = "in order\n" if moment == "twice" else ""
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, "", f"{said}stopped; what was finished is kept.\n")


def test_a_signal_that_is_ignored_stays_ignored():
    """As with nohup, or in a shell's background."""
    command = [sys.executable, "-c", STOPPED, "importing", str(int(signal.SIGHUP))]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("closed", [1, 2])
def test_a_command_needs_no_output_to_end_well(closed):
    command = [sys.executable, "-m", "epimer", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=lambda: os.close(closed))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("epimer ") == (closed == 2)


LATE = """
import atexit, sys, threading, time
from epimer.cli import run
atexit.register(print, "last")
def late():
    time.sleep(0.5)
    print("late")
threading.Thread(target=late).start()
sys.argv = ["epimer", "--version"]
run()
"""


def test_a_command_ends_after_its_threads_and_what_they_print():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", LATE]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split()[-2:] == ["late", "last"]


def test_a_profiler_can_write_what_it_saw(tmp_path):
    profile = tmp_path / "profile"
    command = [sys.executable, "-m", "cProfile", "-o", str(profile), "-m", "epimer", "--version"]
    subprocess.run(command, capture_output=True, check=True)
    assert any(function == "main" for _, _, function in pstats.Stats(str(profile)).stats)


def default_signals():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
