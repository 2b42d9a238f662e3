"""clip8 by the command line, in processes of their own: a hub on this machine, its cache, and no hub at all."""

import json
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("transformers")

from safetensors.torch import load_file

from epimer.experiments.clip8.published import FUSION_BENCH, PAPER, PUBLISHED
from epimer.experiments.clip8.tasks import TASKS, VARIANTS
from stand_in_hub import COMMANDS, DatasetAnswer, Hub, Repo, environment
from tiny_clip import ImageEncoder, card, data_files, repositories

LIMIT = 4
# Only a few methods, so that a real run is a short one; the rest of the bench has tests of its own.
BENCH = """
import sys
from epimer.experiments import bench
from epimer.experiments import paper as experiments

experiments.CANDIDATES = tuple(c for c in bench.CANDIDATES if c.name in ("average", "fisher", "tsv", "epimer"))
experiments.EXPERIMENTS["performance"] = lambda b: experiments.performance(b, candidates=experiments.CANDIDATES)
from epimer.cli import main

sys.argv[0] = "epimer"
main()
"""

# The base's scores, and a command, in one process: importing transformers is most of what either costs.
SCORES = """
import json, sys
from contextlib import redirect_stderr
from io import StringIO
from epimer.cli import main
from epimer.evaluation.open_suite import open_suite

limit, *sys.argv[1:] = sys.argv[1:]
suite = open_suite("clip8", limit=int(limit), progress=False)
averages = [float(scores.mean()) for scores in suite.scores(suite.base, "test")]
with redirect_stderr(StringIO()) as err:
    try:
        main()
    except SystemExit as end:
        print(json.dumps([averages, list(suite.tasks[-1].classes), end.code, err.getvalue()]))
"""


class QuickAnswer(DatasetAnswer):
    """Answers without waiting for the other side between head and body, which is most of the time of a small file."""

    disable_nagle_algorithm = True


@pytest.fixture(scope="module")
def hub():
    repos = repositories()
    dtd = TASKS[-1]  # its names are in its card only, and in another order than ours
    repos[dtd.data] = {**data_files(dtd, 7, None), "README.md": card(list(reversed(dtd.classes)))}
    hub = Hub({name: Repo([files]) for name, files in repos.items()})
    hub.RequestHandlerClass = QuickAnswer
    yield hub
    hub.stop()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("clip8")


@pytest.fixture(scope="module")
def epimer(hub, place):
    """Return a function that runs a command with a cache of this module's own: the code, stdout and stderr."""

    def run(*command: str, script: str | None = None, **settings: str) -> tuple[int, str, str]:
        variables = environment(hub, place / "home", **{"COLUMNS": "400", **settings})
        start = [sys.executable, *(("-m", "epimer") if script is None else ("-c", script))]
        made = subprocess.run([*start, *map(str, command)], env=variables, cwd=place, capture_output=True, text=True)
        return made.returncode, made.stdout, made.stderr

    return run


@pytest.fixture(scope="module")
def ran(hub, epimer, place):
    """The benchmark, once, from the hub."""
    options = ("--variant", "B/32", "--limit", LIMIT, "--experiment", "performance")
    code, out, err = epimer("bench", "clip8", *options, script=BENCH)
    assert code == 0, err
    return out, json.loads((place / "epimer-bench" / "performance.json").read_text())


def test_all_tasks_and_published_numbers_are_in_the_table(ran):
    out, result = ran
    headings = result["headings"]
    assert [task.title for task in TASKS] == headings[3:11]
    assert headings[-2:] == [PAPER, FUSION_BENCH]
    rows = {row[0]: row for row in result["rows"]}
    assert {"zero-shot", "fine-tuned", "average", "fisher", "tsv", "epimer"} <= rows.keys()
    for name, row in rows.items():
        published = [PUBLISHED["B/32"][who].get(name) for who in (PAPER, FUSION_BENCH)]
        assert row[-2:] == ["" if value is None else f"{value:.1f}" for value in published]
        cells = [float(cell) for cell in row[3:11]]
        assert all(cell * LIMIT % 100 == 0 for cell in cells)  # as many samples as the limit says
        assert float(row[1].split()[0]) == pytest.approx(sum(cells) / 8, abs=0.051)
    assert rows["tsv"][-2:] == ["", "83.1"]  # the paper's is at k = 32
    (warning,) = (note for note in result["notes"] if note.startswith("WARNING"))
    assert "never compare across checkpoint families" in warning
    assert warning in out
    assert "ViT-B/32, tanganke checkpoints, 4 samples a split" in result["title"]


def test_only_what_is_needed_is_fetched(ran, hub):
    files = hub.files()
    sizes = VARIANTS["B/32"]
    models = {sizes.base, *(sizes.tuned.format(task.name) for task in TASKS)}
    assert {file.split(":")[0] for file in files} == models | {task.data for task in TASKS}
    assert not any(word in file for file in files for word in ("contrast", "full_numbers"))
    assert sum(file.endswith(".parquet") for file in files) == 3 * len(TASKS)
    assert len(files) == len(set(files))


def test_zero_shot_scores_are_those_of_transformers(ran, place):
    """With transformers alone, on the files in the cache: MNIST has one template, so its own logits say it all."""
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    from epimer.experiments.clip8.images import split_rows
    from epimer.tasks.data import open_data

    (mnist,) = (task for task in TASKS if task.name == "mnist")
    cache = place / "home" / "hub"
    (folder,) = (cache / "models--openai--clip-vit-base-patch32" / "snapshots").iterdir()
    (data,) = (cache / "datasets--ylecun--mnist" / "snapshots").iterdir()
    table = open_data(str(data), split="test")
    rows = split_rows(30, len(table), limit=LIMIT, seed=0)["test"]
    images = CLIPImageProcessor.from_pretrained(folder)(
        images=[table.image(i, "image") for i in rows], return_tensors="pt"
    )
    prompts = AutoTokenizer.from_pretrained(folder)(
        [mnist.templates[0].format(digit) for digit in range(10)], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        logits = CLIPModel.from_pretrained(folder)(**images, **prompts).logits_per_image
    right = (logits.argmax(1) == torch.tensor([table.row(i)["label"] for i in rows])).double().mean()
    shown = next(row for row in ran[1]["rows"] if row[0] == "zero-shot")[ran[1]["headings"].index("MNIST")]
    assert shown == f"{100 * float(right):.1f}"


def test_without_the_hub(ran, hub, epimer):
    """What is in the cache is enough; what is not is named in one line, with what to do."""
    hub.stop()
    code, out, err = epimer(LIMIT, "bench", "clip8", "--variant", "L/14", script=SCORES)
    assert code == 0, err
    averages, names, code, err = json.loads(out)
    shown = next(row for row in ran[1]["rows"] if row[0] == "zero-shot")[3:11]
    assert [f"{100 * score:.1f}" for score in averages] == shown
    assert names == list(reversed(TASKS[-1].classes))
    assert code == 2
    assert re.fullmatch(
        r"error: clip8 could not open one of its models and datasets: openai/clip-vit-large-patch14 is neither a path "
        r"here nor in the hub's cache, and the hub cannot be reached \(.+\); download it where there is a network: "
        r"hf download openai/clip-vit-large-patch14; or copy a cache that has it to HF_HOME, or give folders that have "
        r"it with --checkpoints and --data\.\n",
        err,
    )


def test_pickled_modules_and_options_of_other_suites(epimer, place):
    module = ImageEncoder(0)
    torch.save(module, place / "zeroshot.pt")
    convert = ["convert", "zeroshot.pt", "zeroshot.safetensors"]
    commands = [["inspect", "zeroshot.pt", "--json"], convert, ["bench", "glyphs8", "--limit", "3"]]
    code, out, err = epimer(json.dumps([["epimer", *command] for command in commands]), script=COMMANDS)
    assert code == 0, err
    inspected, converted, refused = json.loads(out)
    state = module.state_dict()
    assert {row["name"]: tuple(row["shape"]) for row in json.loads(inspected[1])["tensors"]} == {
        name: tuple(W.shape) for name, W in state.items()
    }
    assert converted[0] == 0
    made = load_file(place / "zeroshot.safetensors")
    assert made.keys() == state.keys()
    assert all(torch.equal(W, state[name]) for name, W in made.items())
    assert refused == [2, "", "error: --limit is for the suite clip8; leave it out for glyphs8.\n"]
