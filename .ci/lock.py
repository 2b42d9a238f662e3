"""Write requirements.lock and requirements-cuda.lock: every package of `.[dev]` with the SHA-256 of each of its files.

One pair of files serves every platform and every Python from 3.11 on: uv resolves for all of them at once and takes
the hashes of all files of a version from the package index. What only the CUDA build of torch needs is a file of its
own, as no marker tells that build from the CPU's. The CPU builds of torch are not on the package index; their hashes
are in torch-cpu.sha256, in the format of sha256sum. `make lock` runs this.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_HASHES = ROOT / ".ci" / "torch-cpu.sha256"
CUDA = re.compile(r"(nvidia|cuda)-|triton==")
HEAD = "# {what} Written by `make lock` from pyproject.toml and constraints.txt; do not edit.\n"


def main() -> None:
    """Resolve, split, write."""
    entries = resolved()
    if missing := [name for name in entries if "--hash=sha256:" not in entries[name]]:
        sys.exit(f"error: the package index gives no hash for {', '.join(missing)}; use one that does.")
    torch = next(entry for name, entry in entries.items() if name.startswith("torch=="))
    entries = {name: entry + cpu_hashes(name) if entry is torch else entry for name, entry in entries.items()}
    cuda = {name for name in entries if CUDA.match(name)}
    write("requirements.lock", "What `make` installs.", [entries[name] for name in entries if name not in cuda])
    write("requirements-cuda.lock", "What the CUDA build of torch needs besides.", [entries[name] for name in cuda])


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


def cpu_hashes(pin: str) -> str:
    """Return the hashes of the CPU builds of this version of torch, as lines to append."""
    version = pin.split("==")[1].split()[0]
    lines = [line.split() for line in CPU_HASHES.read_text(encoding="utf-8").splitlines()]
    hashes = [digest for digest, file in lines if file.startswith(f"torch-{version}+cpu-")]
    if not hashes:
        sys.exit(f"error: {CPU_HASHES.name} has no CPU build of torch {version}; add them, as sha256sum prints them.")
    return "".join(f" \\\n    --hash=sha256:{digest}" for digest in hashes)


def write(name: str, what: str, entries: list[str]) -> None:
    """Write one of the two files, sorted by name."""
    (ROOT / name).write_text(HEAD.format(what=what) + "\n".join(sorted(entries)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
