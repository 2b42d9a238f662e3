"""mergekit's options on `epimer merge`."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from epimer.cli import app
from epimer.cli.mergekit_flags import NEEDLESS, translate
from epimer.errors import ParameterError


@pytest.mark.parametrize(("args", "expected"), [
    ("r.yaml out --cuda", "r.yaml out --device cuda"),
    ("r.yaml out --no-cuda -j 4 --quiet", "r.yaml out --device cpu --workers 4 --quiet"),
    ("r.yaml --out-path out --num-threads=2", "r.yaml out --workers 2"),
    ("r.yaml out --out-shard-size 5B", "r.yaml out --max-shard-size 10GB"),
    ("r.yaml out --out-shard-size=250M", "r.yaml out --max-shard-size 0.5GB"),
    ("r.yaml out --lora-merge-dtype float16 -v --gpu-rich", "r.yaml out --device auto"),
    ("r.yaml out --dry-run --max-memory 3GB", "r.yaml out --dry-run --max-memory 3GB"),
    (" ".join(["r.yaml", *NEEDLESS, "out"]), "r.yaml out"),
])  # fmt: skip
def test_options_become_ours(args, expected):
    assert translate(args.split())[0] == expected.split()


def test_what_has_no_effect_is_said_once_each():
    assert translate(["--lazy-unpickle", "--no-copy-tokenizer"])[1] == [
        "--lazy-unpickle has no effect: tensors are always read one at a time, and nothing in a file is run.",
        "--no-copy-tokenizer has no effect: the tokenizer is always copied.",
    ]
    assert translate(["r.yaml", "out"])[1] == []


@pytest.mark.parametrize(("args", "expected"), [
    ("--random-seed 3", "--random-seed is an option of mergekit; here, write the seed into the recipe: parameters: "
     "{seed: N}."),
    ("--transformers-cache x", "--transformers-cache is an option of mergekit; here, set the variable HF_HUB_CACHE to "
     "the folder."),
    ("--out-shard-size many", "--out-shard-size must be a number of parameters, as 5B; got 'many'."),
    ("--num-threads", "--num-threads needs a value."),
])  # fmt: skip
def test_what_would_change_the_result_is_refused(args, expected):
    with pytest.raises(ParameterError) as error:
        translate(args.split())
    assert str(error.value) == expected


def test_a_command_line_of_mergekit_merges(tmp_path):
    states = {name: {"l.0.weight": torch.full((2, 2), value)} for name, value in {"a": 1.0, "b": 3.0}.items()}
    for name, state in states.items():
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
    (tmp_path / "r.yaml").write_text("merge_method: linear\nmodels: [{model: a}, {model: b}]\n")
    flags = ["--no-cuda", "--copy-tokenizer", "--allow-crimes", "--lazy-unpickle", "--out-shard-size", "1B"]
    result = CliRunner().invoke(app, ["merge", str(tmp_path / "r.yaml"), str(tmp_path / "out"), *flags])
    assert result.exit_code == 0, result.output
    assert (load_file(tmp_path / "out" / "model.safetensors")["l.0.weight"] == 2).all()
