"""Soak: merges of every kind of output under random kills and faults, each survivor byte-identical; memory stays flat.

`make soak` runs it. Every merge starts with nothing (or with another merge's output, which it replaces), meets up to
three faults at random moments (kill -9, SIGINT, SIGTERM by time or at a call; errors of the system at a call; limits on
files), and is then run to its end: the folder must hold the bytes of an undisturbed run and nothing beside it. Then all
other commands that write meet faults at random moments. Then the disk fails once at every call by which each command
opens a file to write, writes, syncs, renames, links, truncates or makes a folder: no call is left out. Last, merges by
the Python API in one process, whose memory must not grow.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import yaml

from faults import COMMANDS, Commands, Trial, make_workshop

MERGES = [name for name, one in COMMANDS.items() if one.arguments[0] in ("merge", "extract-lora", "sweep")]
OTHERS = [name for name in COMMANDS if name not in MERGES]
SIGNALS = ("SIGKILL", "SIGKILL", "SIGINT", "SIGTERM")
ERRORS = ("ENOSPC", "EDQUOT", "EROFS", "EMFILE", "EIO")
METHODS = ("tsv", "ties", "task_arithmetic", "epimer_free", "iso_c", "average", "dare", "wudi")
WARM = 40  # merges before memory is looked at: allocators and caches fill up first
GROWTH = 30_000  # bytes per merge that are measured as noise: 6 MB in 200 merges


def fault_of(trial: Trial, generator: random.Random) -> dict:
    """Return a random fault and when it happens."""
    kind = generator.random()
    if kind < 0.5:
        return {"fault": generator.choice(SIGNALS), "after": generator.uniform(0, 1.1 * trial.seconds)}
    if kind < 0.7:
        return {"fault": generator.choice(SIGNALS), "at": generator.randint(1, len(trial.moments))}
    if kind < 0.9:
        return {"fault": generator.choice(ERRORS), "at": generator.choice(trial.writes)}
    return {"limits": {"FSIZE": generator.randint(600, 8000)}, "fault": "EFBIG"}


def disturbed(trials: dict[str, Trial], names: list[str], count: int, generator: random.Random, until: float) -> dict:
    """Let commands meet faults; return how many there were of which kind, and all that went wrong."""
    met, wrong, done = Counter[str](), [], Counter[str]()
    for i in range(count):
        if time.monotonic() > until:
            break
        name = names[i % len(names)]
        trial = trials[name]
        faults = [fault_of(trial, generator) for _ in range(generator.randint(1, 3))]
        for problem in trial.survive(faults):
            wrong.append(f"{name}, {faults}: {problem}")
            print(wrong[-1], flush=True)
        met.update(one["fault"] for one in faults)
        done[name] += 1
    return {"runs": done.total(), "commands": dict(done), "faults": dict(met), "wrong": wrong}


def failing(trials: dict[str, Trial], error: str, until: float) -> dict:
    """Let the disk fail at every writing call of every command; return how many there were, and all that went wrong."""
    wrong, calls = [], Counter[str]()
    for name, trial in trials.items():
        for kind, moments in trial.kinds.items():
            for moment in moments:
                if time.monotonic() > until:
                    return {"calls": dict(calls), "wrong": [*wrong, f"no time for {name} from call {moment} on"]}
                for problem in trial.meet(error, at=moment):
                    wrong.append(f"{name}, {error} at {trial.moments[moment - 1]}: {problem}")
                    print(wrong[-1], flush=True)
                calls[kind] += 1
    return {"calls": dict(calls), "wrong": wrong}


def resident() -> int:
    """Return the bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def growth(workshop: Path, count: int) -> dict:
    """Merge many times in this process; return the slope of its memory in bytes per merge, and open files."""
    import epimer

    used, files = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for i in range(count):
            recipe = yaml.safe_load((workshop / ("recipe.yaml", "files.yaml")[i % 2]).read_text())
            recipe |= {"merge_method": METHODS[i % len(METHODS)], "base_model": str(workshop / recipe["base_model"])}
            recipe["models"] = [{"model": str(workshop / one["model"])} for one in recipe["models"]]
            lora = {"output": "lora", "lora_rank": 2} if i % 5 == 4 and i % 2 else {}
            epimer.merge(recipe | lora, f"{scratch}/out", overwrite=True, progress=False)
            gc.collect()
            used.append(resident())
            files.append(len(list(Path("/proc/self/fd").iterdir())))
    late = used[WARM:] if count > 2 * WARM else used
    mean_i, mean_u = (len(late) - 1) / 2, sum(late) / len(late)
    covariance = sum((i - mean_i) * (u - mean_u) for i, u in enumerate(late))
    slope = covariance / sum((i - mean_i) ** 2 for i in range(len(late)))
    return {"merges": count, "slope": slope, "first": late[0], "last": late[-1], "files": [files[0], files[-1]]}


def main() -> int:
    """Run the soak; the exit code tells whether all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--merges", type=int, default=200)
    parser.add_argument("--others", type=int, default=60, help="runs of the other commands that write")
    parser.add_argument("--grow", type=int, default=200, help="merges in one process")
    parser.add_argument("--every", default="EIO", help="error of the disk at every writing call; empty to leave it out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=36000, help="stop to disturb after these")
    parser.add_argument("--only", help="commands, with semicolons")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    generator, found, until = random.Random(options.seed), {"seed": options.seed}, time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="epimer-soak-") as scratch:
        root = Path(scratch)
        workshop = make_workshop(root / "workshop")
        if options.grow:
            found["memory"] = growth(workshop, options.grow)
            print(f"memory: {found['memory']}", flush=True)
        commands = Commands(root)
        try:
            for part, names, count in (("merges", MERGES, options.merges), ("others", OTHERS, options.others)):
                if options.only:
                    names = [name for name in names if name in options.only.split(";")]
                if not names:
                    continue
                trials = {name: Trial(commands, workshop, root / "runs" / name, COMMANDS[name]) for name in names}
                if count:
                    found[part] = disturbed(trials, names, count, generator, until)
                    print(f"{part}: {found[part]}", flush=True)
                if options.every:
                    found[f"{part}, every call"] = failing(trials, options.every, until)
                    print(f"{part}, every call: {found[f'{part}, every call']}", flush=True)
        finally:
            commands.close()
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    parts = [one for one in found.values() if isinstance(one, dict)]
    wrong = [problem for part in parts for problem in part.get("wrong", ())]
    leaks = found.get("memory", {}).get("slope", 0) > GROWTH
    return 1 if wrong or leaks else 0


if __name__ == "__main__":
    sys.exit(main())
