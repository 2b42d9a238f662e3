"""Write the lock files: every package of `.[dev]` with the SHA-256 of each of its files.

They serve every platform and every Python from 3.11 on: uv resolves for all of them at once and takes the hashes of all
files of a version from the package index. torch has files of its own: requirements-torch-cpu.lock for the CPU build,
which is not on the package index (its hashes are in torch-cpu.sha256, as sha256sum prints them), and
requirements-torch.lock for the index's build and the CUDA libraries that it needs on Linux. `make lock` runs this.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_HASHES = ROOT / ".ci" / "torch-cpu.sha256"
TORCH = re.compile(r"torch==|triton==|nvidia-|cuda-")
HEAD = "# {what} Written by `make lock` from pyproject.toml and constraints.txt; do not edit.\n"


def main() -> None:
    """Resolve, split, write."""
    entries = resolved()
    if missing := [pin for pin in entries if "--hash=sha256:" not in entries[pin]]:
        sys.exit(f"error: the package index gives no hash for {', '.join(missing)}; use one that does.")
    torch = [pin for pin in entries if TORCH.match(pin)]
    version = next(pin for pin in torch if pin.startswith("torch==")).removeprefix("torch==")
    write(
        "requirements.lock", "All that `make` installs but torch.", [entries[pin] for pin in entries.keys() - {*torch}]
    )
    write("requirements-torch.lock", "torch as the package index has it.", [entries[pin] for pin in torch])
    write("requirements-torch-cpu.lock", "torch for CPUs alone.", [cpu_build(version)])


def resolved() -> dict[str, str]:
    """Return `name==version ; marker` -> its lines, with the hashes of all files of that version."""
    uv = Path(sys.executable).with_name("uv")
    command = [uv if uv.exists() else shutil.which("uv") or sys.exit("error: uv is missing; run `make lock`.")]
    command += ["pip", "compile", "--universal", "--generate-hashes", "--python-version", "3.11", "--quiet"]
    command += ["--no-header", "--no-annotate", "--constraint", "constraints.txt", "--extra", "dev", "pyproject.toml"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit("error: uv found no versions that fit pyproject.toml and constraints.txt together; see above.")
    parts = re.split(r"^(?=\S)", done.stdout, flags=re.MULTILINE)
    return {part.split(" \\\n")[0].strip(): part.rstrip() for part in parts if part.strip()}


def cpu_build(version: str) -> str:
    """Return the lines of the CPU build of torch."""
    lines = [line.split() for line in CPU_HASHES.read_text(encoding="utf-8").splitlines()]
    hashes = [digest for digest, file in lines if file.startswith(f"torch-{version}+cpu-")]
    if not hashes:
        sys.exit(f"error: {CPU_HASHES.name} has no CPU build of torch {version}; add them, as sha256sum prints them.")
    return " \\\n    ".join([f"torch=={version}+cpu", *(f"--hash=sha256:{digest}" for digest in sorted(hashes))])


def write(name: str, what: str, entries: list[str]) -> None:
    """Write one of the files, sorted by name."""
    (ROOT / name).write_text(HEAD.format(what=what) + "\n".join(sorted(entries)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
