"""The lock files: all that the development environment needs, at the versions of the constraints, with hashes."""

import importlib.util
import json
import re
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCKS = ("requirements.lock", "requirements-torch.lock", "requirements-torch-cpu.lock")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entries(file: str) -> list[tuple[Requirement, list[str]]]:
    """Return each requirement of a lock file and its hashes."""
    lines = [line for line in (ROOT / file).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    wholes = "\n".join(lines).replace(" \\\n", " ").splitlines()
    found = [
        (whole.split(" --hash=")[0].strip(), re.findall(r"--hash=sha256:([0-9a-f]{64})(?= |$)", whole))
        for whole in wholes
    ]
    assert all(whole.count("--hash") == len(hashes) for whole, (_, hashes) in zip(wholes, found, strict=True))
    return [(Requirement(pin), hashes) for pin, hashes in found]


def pins(*files: str) -> dict[str, Version]:
    """Return the versions that are installed here, by name."""
    found = [one for file in files for one, _ in entries(file) if one.marker is None or one.marker.evaluate()]
    assert all([part.operator for part in one.specifier] == ["=="] for one in found)
    return {canonicalize_name(one.name): Version(next(iter(one.specifier)).version) for one in found}


@pytest.mark.parametrize("file", LOCKS)
def test_every_requirement_has_a_version_and_hashes(file):
    found = entries(file)
    assert len(found) >= (1 if "cpu" in file else 15)
    for requirement, hashes in found:
        assert [part.operator for part in requirement.specifier] == ["=="], requirement
        assert hashes == sorted(set(hashes)), requirement
        assert hashes, requirement


def test_versions_are_those_of_the_constraints():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = [Requirement(line) for line in lines if not line.startswith("#")]
    locked = pins("requirements.lock", "requirements-torch.lock")
    for one in constraints:
        name = canonicalize_name(one.name)
        assert name not in locked or one.specifier.contains(locked[name]), f"{one}: run `make lock`"
    assert len([one for one in constraints if canonicalize_name(one.name) in locked]) > 40


def test_all_that_the_development_environment_needs_is_locked():
    """Go through what is installed, from `.[dev]` on: what a package asks for on this machine must be in the lock."""
    locked = pins("requirements.lock", "requirements-torch-cpu.lock")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["dev"], *extras["hf"], *extras["ray"], *extras["suites"]]
    waiting, seen = [Requirement(one) for one in asked if not one.startswith("epimer")], set()
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        assert name in locked, f"{one} is not in requirements.lock: run `make lock`"
        assert one.specifier.contains(locked[name], prereleases=True), f"{one}, locked {locked[name]}: run `make lock`"
        if (key := (name, frozenset(one.extras))) in seen:
            continue
        seen.add(key)
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # a new dependency that is not installed here yet
        contexts = [{"extra": given} for given in ("", *one.extras)]
        more = [Requirement(text) for text in needs if not (name == "torch" and re.match("nvidia|cuda|triton", text))]
        waiting += [need for need in more if need.marker is None or any(map(need.marker.evaluate, contexts))]
    assert len(seen) > 60


def test_the_cpu_builds_of_torch_are_those_of_the_list():
    ((torch, hashes),) = entries("requirements-torch-cpu.lock")
    (index,) = [one for one, _ in entries("requirements-torch.lock") if one.name == "torch"]
    assert str(torch.specifier) == f"{index.specifier}+cpu"
    listed = [line.split() for line in (ROOT / ".ci" / "torch-cpu.sha256").read_text().splitlines()]
    version = next(iter(index.specifier)).version
    assert sorted(digest for digest, name in listed if name.startswith(f"torch-{version}+cpu-")) == hashes


def test_no_file_names_an_address():
    for file in (*LOCKS, "constraints.txt", ".ci/torch-cpu.sha256"):
        assert "://" not in (ROOT / file).read_text(encoding="utf-8")


def commands(target: str) -> list[str]:
    """Return what `make` would run for a target on a clean clone."""
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return done.stdout.decode().replace("||", "\n").splitlines()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_installs_nothing_without_a_hash_but_epimer_itself_and_lint_asks_for_vulnerabilities():
    lint = commands("lint")
    installs = [line for line in lint if "pip install" in line]
    for line in installs:
        itself = line.endswith("--no-build-isolation -e .")
        assert "--no-deps" in line, line
        assert itself or "--require-hashes" in line, line
    assert [file for file in LOCKS if not any(f"-r {file}" in line for line in installs)] == []
    assert lint[-1].split() == [".venv/bin/python", ".ci/audit.py"]
    assert ".venv/bin/python .ci/audit.py --tell" in commands("test")
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().endswith("exec make test")


FLAW = {"id": "PYSEC-2099-1", "fix_versions": ["1.1"], "aliases": ["CVE-2099-1"], "description": "bad"}
CLEAN = {"name": "fine", "version": "2.0", "vulns": []}
FLAWED = {"name": "weak", "version": "1.0", "vulns": [FLAW]}
UNFIXED = {"name": "weak", "version": "1.0", "vulns": [{**FLAW, "fix_versions": []}]}
SKIPPED = {"name": "far", "skip_reason": "Dependency not found on PyPI and could not be audited: far (3.0)"}


@pytest.mark.parametrize(
    ("packages", "ignored", "last", "failed"),
    [
        ([CLEAN], {}, "audit: 1 packages, none is vulnerable", False),
        ([CLEAN, FLAWED], {}, "audit: 2 packages, vulnerable: see above", True),
        ([CLEAN, FLAWED], {"CVE-2099-1": "not used"}, "audit: 2 packages, vulnerable: see above", False),
        ([CLEAN, UNFIXED], {}, "audit: 2 packages, vulnerable: see above", False),
        ([CLEAN, FLAWED, SKIPPED], {}, "audit: 2 packages, vulnerable: see above; NOT AUDITED: far", True),
        ([CLEAN, SKIPPED], {}, "audit: 1 packages, none is vulnerable; NOT AUDITED: far", False),
        ([SKIPPED], {}, "audit: NOT AUDITED: the vulnerability service knows none of the 1 packages", False),
    ],
)
def test_a_vulnerability_that_could_be_fixed_fails_the_lint_and_silence_is_told(packages, ignored, last, failed):
    lines, found = script("audit").judge({"dependencies": packages, "fixes": []}, ignored)
    assert lines[-1] == last
    assert found is failed
    if FLAWED in packages:
        assert lines[0].startswith("audit: weak 1.0 has CVE-2099-1 PYSEC-2099-1; ")
        assert "ignored: not used" in lines[0] if ignored else "fixed in 1.1" in lines[0]
    if UNFIXED in packages:
        assert lines[0] == "audit: weak 1.0 has CVE-2099-1 PYSEC-2099-1; no version fixes it"


def test_the_audit_reads_what_pip_audit_writes():
    audit = pytest.importorskip("pip_audit._format", reason="pip-audit is not installed")
    from pip_audit._service.interface import ResolvedDependency, SkippedDependency, VulnerabilityID, VulnerabilityResult

    flaw = VulnerabilityResult(VulnerabilityID("PYSEC-2099-1"), "bad", [Version("1.1")], {"CVE-2099-1"})
    found = {ResolvedDependency("weak", Version("1.0")): [flaw], SkippedDependency("far", "not known"): []}
    lines, failed = script("audit").judge(json.loads(audit.JsonFormat(True, True).format(found, [])), {})
    assert failed
    assert lines[0].startswith("audit: weak 1.0 has CVE-2099-1 PYSEC-2099-1; fixed in 1.1")
    assert lines[1].endswith("NOT AUDITED: far")
