"""Run the fuzzer: all readers, some of them, or one case again with its traceback."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from random import Random

from fuzz.harness import Reader, place_for_files, quiet_environment, run_case, run_cases, shares, table

PIECE = 250  # cases of one reader in one process


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("readers", nargs="*", help="their names; all by default")
    parser.add_argument("--cases", type=int, default=2000, help="how many, over all readers")
    parser.add_argument("--first", type=int, default=0, help="the number of each reader's first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--case", type=int, help="only this case of one reader, in this process")
    parser.add_argument("--keep", type=Path, help="with --case: write the damaged files to this new folder")
    options = parser.parse_args()
    quiet_environment()
    from fuzz.readers import READERS

    if unknown := [name for name in options.readers if name not in READERS]:
        parser.error(f"unknown reader {unknown[0]!r}; known: {', '.join(READERS)}")
    chosen = {name: READERS[name] for name in options.readers or READERS}
    if options.case is not None:
        return _one(next(iter(chosen.values())), options.seed, options.case, options.keep)
    pieces = []
    for name, count in shares(chosen, options.cases).items():
        ends = [*range(options.first, options.first + count, PIECE), options.first + count]
        pieces += [(name, options.seed, first, last) for first, last in pairwise(ends)]
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = []
        for outcome in pool.map(lambda piece: run_cases(*piece), pieces):
            outcomes.append(outcome)
            print(f"\r{len(outcomes)} of {len(pieces)} pieces", end="", file=sys.stderr, flush=True)
            for escape in outcome.escapes:
                print(f"{outcome.reader}: {escape}", flush=True)
    print(file=sys.stderr)
    print(table(outcomes))
    return 1 if any(outcome.escapes for outcome in outcomes) else 0


def _one(reader: Reader, seed: int, case: int, keep: Path | None) -> int:
    """Run one case; its error, if it is none of epimer's, comes with its traceback."""
    with tempfile.TemporaryDirectory(prefix="epimer-fuzz-", dir=place_for_files()) as root:
        template = Path(root) / "template"
        template.mkdir()
        reader.build(template)
        if keep is not None:
            shutil.copytree(template, keep)
            reader.damage(Random(f"{reader.name} {seed} {case}"), keep)
        refused = run_case(reader, seed, case, template)
    print("accepted" if refused is None else f"refused: {refused}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
