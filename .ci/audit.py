"""Ask pip-audit for known vulnerabilities of all that the lock files name; `make lint` runs this.

A vulnerability that a newer version fixes fails the lint, unless IGNORED says why it does not concern us; one that no
version fixes is told. With --tell nothing fails: `make test` of an old checkout must work on the day after. Where the
vulnerability service does not answer, as behind a mirror that serves packages alone, the last line says that nothing
was audited, and the lint goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("requirements.lock", "requirements-torch.lock")
IGNORED: dict[str, str] = {}
"""id of a vulnerability (PYSEC-…, GHSA-…, CVE-…) -> why it does not concern epimer, and until when it is ignored"""


def main() -> int:
    """Run pip-audit once for all lock files and return the exit status."""
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    command += ["--disable-pip", "--require-hashes", *(f"--requirement={name}" for name in LOCKS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines()
        return say(f"audit: NOT AUDITED: pip-audit gave no answer: {lines[-1] if lines else 'no message'}")
    lines, failed = judge(report, IGNORED)
    say(*lines)
    return int(failed and "--tell" not in sys.argv[1:])


def judge(report: Mapping[str, Any], ignored: Mapping[str, str]) -> tuple[list[str], bool]:
    """Return what a report of pip-audit says, line by line, and whether a vulnerability fails the lint."""
    packages = report["dependencies"]
    skipped = [one["name"] for one in packages if "skip_reason" in one]
    lines, failed = [], False
    for one in packages:
        for found in one.get("vulns", []):
            names = {found["id"], *found.get("aliases", [])}
            reason = next((ignored[name] for name in names if name in ignored), None)
            fixed = ", ".join(found.get("fix_versions", []))
            failed |= bool(fixed) and reason is None
            todo = (
                f"fixed in {fixed}: set it in constraints.txt and run `make lock`" if fixed else "no version fixes it"
            )
            told = f"ignored: {reason}" if reason else todo
            lines.append(f"audit: {one['name']} {one['version']} has {' '.join(sorted(names))}; {told}")
    audited = len(packages) - len(skipped)
    if not audited:
        lines.append(f"audit: NOT AUDITED: the vulnerability service knows none of the {len(packages)} packages")
    else:
        rest = f"; NOT AUDITED: {', '.join(skipped)}" if skipped else ""
        lines.append(f"audit: {audited} packages, {'vulnerable: see above' if lines else 'none is vulnerable'}{rest}")
    return lines, failed


def say(*lines: str) -> int:
    """Print lines and return the exit status of a lint that goes on."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
