"""A merge that fails in float32 is done again in float64 within the memory that it may take, or refused by name."""

import json
import subprocess
import sys
from threading import Event, Thread

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from dense import close
from epimer.api import plan_merge
from epimer.engine.merge import MergeWalk
from epimer.engine.threads import Threads, Turns
from epimer.errors import ParameterError

TASKS, UNIT = 4, 2.0**100  # whose squares leave float32

CODE = """
import sys, warnings
import epimer
from epimer.engine.memory import peak_memory, return_freed_memory
warnings.simplefilter("ignore")
return_freed_memory()
small, recipe = sys.argv[1:]
epimer.merge(small, small + ".out", progress=False, workers=1)  # loads the libraries
before = peak_memory()
record = epimer.merge(recipe, recipe + ".out", progress=False, workers=1)
print(record.tensors["far.weight"].status, peak_memory() - before)
"""


def write_recipe(folder, side):
    """Write models one of whose matrices cannot be merged in float32, and a recipe for them."""
    for t in range(TASKS + 1):
        generator = torch.Generator().manual_seed(t)
        state = {f"{i}.weight": torch.randn(64, 64, generator=generator) for i in range(6)}
        state["far.weight"] = UNIT * torch.randn(side, side, generator=generator) * bool(t)
        save_file(state, folder / f"m{t}.safetensors")
    recipe = {
        "merge_method": "epimer_free",
        "base_model": "m0.safetensors",
        "models": [{"model": f"m{t}.safetensors"} for t in range(1, TASKS + 1)],
        "parameters": {"basis": "tagged", "rank": 8},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder / "recipe.yaml"


def bytes_needed(recipe):
    """Return the bytes that are planned for the matrix, and those for merging it again."""
    job = next(job for job in plan_merge(recipe).jobs if job.name == "far.weight")
    return job.memory, job.memory_in_float64()


@pytest.mark.parametrize("workers", [1, 3])
def test_it_is_merged_again_where_there_is_room_and_refused_by_name_where_there_is_not(tmp_path, workers):
    recipe = write_recipe(tmp_path, 128)

    def merge(memory):
        plan = plan_merge(recipe)
        walk = MergeWalk(plan, plan.parts)
        engine = Threads([torch.device("cpu")] * workers, memory=memory)
        return {job.name: (W, record) for _, merged in engine.map(walk) for job, W, record in merged}

    planned, again = bytes_needed(recipe)
    assert planned < again
    with pytest.raises(ParameterError, match=r"'far\.weight' must be merged once more in float64, which needs .* MB"):
        merge(again - 1)
    found = merge(again)
    assert [name for name, (_, record) in found.items() if "in float64" in record.note] == ["far.weight"]
    states = [load_file(tmp_path / f"m{t}.safetensors")["far.weight"].double() for t in range(TASKS + 1)]
    exact = epimer.merge_state_dicts(
        {"w": states[0]}, [{"w": W} for W in states[1:]], "epimer_free", basis="tagged", rank=8
    )
    assert close(found["far.weight"][0].double() / UNIT, exact["w"] / UNIT, 1e-6)


def test_it_takes_no_more_memory_than_it_asks_for(tmp_path):
    recipe = write_recipe(tmp_path, 768)
    planned, again = bytes_needed(recipe)
    (tmp_path / "small").mkdir()
    small = write_recipe(tmp_path / "small", 16)
    ran = subprocess.run([sys.executable, "-c", CODE, small, recipe], capture_output=True, text=True, check=True)
    status, grown = ran.stdout.split()
    assert status == "retried"
    assert planned < int(grown) < again


def test_who_needs_more_waits_for_the_others_and_they_for_it():
    turns, first, events = Turns(), Event(), []

    def beside():
        with turns.shared():
            first.set()
            Event().wait(0.05)
            events.append("beside")

    def wider():
        with turns.shared():
            first.wait()
            with turns.alone_for_now(), turns.alone_for_now():  # a second time while it is alone
                events.append("alone")
                late.start()
                Event().wait(0.05)
                events.append("still alone")

    def after():
        with turns.shared():
            events.append("after")

    late = Thread(target=after)
    threads = [Thread(target=beside), Thread(target=wider)]
    for thread in threads:
        thread.start()
    for thread in (*threads, late):
        thread.join(10)
    assert events == ["beside", "alone", "still alone", "after"]
    assert turns.working == 0
