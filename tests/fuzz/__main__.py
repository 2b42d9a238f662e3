"""Run the fuzzer: all readers, some of them, or one case again with its traceback."""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fuzz.harness import place_for_files, quiet_environment, run_case, run_cases, shares, table

PIECE = 250  # cases of one reader in one process


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("readers", nargs="*", help="their names; all by default")
    parser.add_argument("--cases", type=int, default=2000, help="how many, over all readers")
    parser.add_argument("--first", type=int, default=0, help="the number of each reader's first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--case", type=int, help="only this case of one reader, in this process")
    parser.add_argument("--keep", type=Path, help="with --case: write the damaged files to this folder")
    options = parser.parse_args()
    quiet_environment()
    from fuzz.readers import READERS

    if unknown := [name for name in options.readers if name not in READERS]:
        parser.error(f"unknown reader {unknown[0]!r}; known: {', '.join(READERS)}")
    chosen = {name: READERS[name] for name in options.readers or READERS}
    if options.case is not None:
        return _one(chosen[options.readers[0]], options)
    pieces = []
    for name, count in shares(chosen, options.cases).items():
        ends = [*range(options.first, options.first + count, PIECE), options.first + count]
        pieces += [(name, options.seed, a, b) for a, b in zip(ends, ends[1:], strict=False)]
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(lambda piece: run_cases(*piece), pieces))
    for outcome in outcomes:
        for escape in outcome.escapes:
            print(f"{outcome.reader}: {escape}")
    print(table(outcomes))
    return 1 if any(outcome.escapes for outcome in outcomes) else 0


def _one(reader, options) -> int:
    from random import Random

    with tempfile.TemporaryDirectory(prefix="epimer-fuzz-", dir=place_for_files()) as root:
        template = Path(root) / "template"
        template.mkdir()
        reader.build(template)
        if options.keep is not None:
            import shutil

            shutil.copytree(template, options.keep)
            reader.damage(Random(f"{reader.name} {options.seed} {options.case}"), options.keep)
        refused = run_case(reader, options.seed, options.case, template)
    print("accepted" if refused is None else f"refused: {refused}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
