"""Adapters in, an adapter out: PEFT loads it, and what it makes of the base is the dense merge of the same recipe."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import epimer
from commands import run
from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.writer import Draft
from epimer.curvature.format import Provenance
from epimer.geometry.linalg import LowRank
from epimer.geometry.metric import Metric
from epimer.methods.rules import is_matrix

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file, save_file  # noqa: E402

from adapters import (  # noqa: E402
    ADAPTERS,
    PEFT_REMARKS,
    RANK,
    SIZES,
    TOKENS,
    Adapters,
    Convolutions,
    bert,
    copied,
    gpt2,
    gpt2_classifier,
    llama,
    llava,
    qwen_vl,
    save_adapter,
    save_base,
    unloaded,
)

pytestmark = PEFT_REMARKS


@pytest.fixture(scope="module", params=ADAPTERS)
def adapters(request, tmp_path_factory, no_progress_bars):
    return Adapters(tmp_path_factory.mktemp(request.param), request.param)


def recipe(given: Adapters, method: str, **more) -> dict:
    models = [{"model": text} for text in given.texts]
    return {"merge_method": method, "base_model": str(given.path), "models": models, "output": "lora", **more}


def moved(state: dict[str, Tensor], base: dict[str, Tensor]) -> dict[str, float]:
    """Return how far every tensor lies from the base."""
    return {name: float(torch.linalg.vector_norm(state[name].double() - W)) for name, W in base.items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], base: dict[str, Tensor], share: float) -> None:
    """Assert that a model moved as expected, up to a share of the way; and not where it did not move."""
    length = moved(expected, base)
    for name, W in expected.items():
        error = float(torch.linalg.vector_norm(found[name].double() - W.double()))
        assert error <= share * length[name], f"{name}: {error:.1e} of {length[name]:.1e}"


# Factors are written in float32, whole tensors (a norm) in the base's float32, of which a small step keeps six digits.
EXACT = [
    ("average", {}),
    ("task_arithmetic", {"scale": 0.7}),
    ("tsv", {}),
    ("tsv", {"rank": 2}),
    ("tsv", {"coefficients": "projected"}),
    ("iso_c", {"scale": 1.3}),
    ("iso_cts", {}),
    ("epimer_free", {}),
    ("epimer_free", {"anchor": "sum", "rank": 3}),
    ("epimer_free", {"basis": "tagged", "aggregator": "sum"}),
    ("epimer_free", {"basis": "full", "aggregator": "mean"}),
    ("wudi", {}),
]


@pytest.mark.parametrize(("method", "parameters"), EXACT, ids=str)
def test_the_adapter_is_the_dense_merge_of_the_same_recipe(adapters, method, parameters, tmp_path):
    expected = epimer.merge_state_dicts(adapters.base, adapters.dense, method, **parameters)
    record = epimer.merge(recipe(adapters, method, parameters=parameters), tmp_path / "out", progress=False)
    found = unloaded(adapters.model, tmp_path / "out", torch.float64)
    loose = method == "wudi" or parameters.get("basis") == "full"  # which form dense matrices, in float32
    assert_close(found, expected, adapters.base, 1e-4 if loose else 3e-6)
    assert max(one.error or 0 for one in record.tensors.values()) < (1e-5 if loose else 1e-12)


@pytest.mark.parametrize("method", ["task_arithmetic", "tsv", "epimer_free"])
def test_the_forward_pass_is_that_of_the_dense_merge(adapters, method, tmp_path):
    epimer.merge(recipe(adapters, method), tmp_path / "lora", progress=False)
    epimer.merge({**recipe(adapters, method), "output": "model"}, tmp_path / "dense", progress=False)
    words = torch.arange(2, 20)[None]
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense").eval()(words).logits
    before = adapters.model.eval()(words).logits
    found = peft.PeftModel.from_pretrained(copied(adapters.model), tmp_path / "lora").merge_and_unload().eval()
    error = torch.linalg.vector_norm(found(words).logits - wanted)
    assert error <= 1e-5 * torch.linalg.vector_norm(before - wanted)
    assert torch.linalg.vector_norm(before - wanted) > 0.1


@pytest.mark.parametrize("method", ["average", "tsv", "iso_c", "ties", "dare"])
def test_a_rank_keeps_the_leading_directions_and_tells_the_error(adapters, method, tmp_path):
    """The share that is left out is the rest of the spectrum, whatever the method: the best that a rank can do."""
    given = recipe(adapters, method, lora_rank=3)
    record = epimer.merge(given, tmp_path / "out", progress=False)
    expected = epimer.merge_state_dicts(adapters.base, adapters.dense, method)
    found = unloaded(adapters.model, tmp_path / "out", torch.float64)
    cut = 0
    for name, one in record.tensors.items():
        if one.error is None:
            continue
        D = expected[name].double() - adapters.base[name]
        sigma = torch.linalg.svdvals(D.flatten(1))
        best = float(sigma[3:].square().sum().sqrt() / sigma.square().sum().sqrt())
        apart = float(torch.linalg.vector_norm(found[name] - expected[name]) / torch.linalg.vector_norm(D))
        assert abs(one.error - best) < 3e-3, name  # entries at a threshold may fall on either side of it
        assert abs(apart - best) < 3e-3, name
        cut += best > 0.1
    assert cut > 2


def test_tasks_of_weight_zero_take_no_rank(adapters, tmp_path):
    given = recipe(adapters, "tsv")
    for entry, weight in zip(given["models"], (1, 0, 1), strict=True):
        entry["parameters"] = {"weight": weight}
    epimer.merge(given, tmp_path / "out", progress=False)
    expected = epimer.merge_state_dicts(adapters.base, adapters.dense, "tsv", weights=[1, 0, 1])
    found = unloaded(adapters.model, tmp_path / "out", torch.float64)
    assert_close(found, expected, adapters.base, 3e-6)


def test_no_dense_matrix_is_formed_and_no_base_weight_read(adapters, tmp_path, monkeypatch):
    largest, dense = [0], LowRank.dense

    def watched(self: LowRank) -> Tensor:
        largest.append(min(self.shape))
        return dense(self)

    read, kind = [], type(open_checkpoint(str(adapters.path)))
    before = kind.read
    monkeypatch.setattr(LowRank, "dense", watched)
    monkeypatch.setattr(kind, "read", lambda self, name, rows=None: read.append(name) or before(self, name, rows))
    for method in ("task_arithmetic", "epimer_free", "iso_cts"):
        record = epimer.merge(recipe(adapters, method), tmp_path / method, progress=False)
        layers = [name for name, one in record.tensors.items() if one.error is not None]
        assert len(layers) > 4
        assert not {*layers} & {*read}
    assert max(largest) <= 3 * RANK + 6


def test_a_module_that_an_adapter_brings_as_the_base_has_it_is_written_whole(tmp_path):
    """It has no factors; PEFT refuses those of rank 0."""
    model = save_base(tmp_path / "base", llama)
    for t, whole in enumerate((None, ["lm_head"])):
        torch.manual_seed(t)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=whole, init_lora_weights=False)
        peft.get_peft_model(copied(model), config).save_pretrained(tmp_path / str(t))
    base = {name: W.double() for name, W in load_file(tmp_path / "base" / "model.safetensors").items()}
    states = [unloaded(model, tmp_path / str(t), torch.float64) for t in range(2)]
    models = [{"model": f"{tmp_path / 'base'}+{tmp_path / str(t)}"} for t in range(2)]
    given = {"merge_method": "tsv", "base_model": str(tmp_path / "base"), "models": models, "output": "lora"}
    epimer.merge(given, tmp_path / "out", progress=False)
    expected = epimer.merge_state_dicts(base, [{n: state[n] for n in base} for state in states], "tsv")
    assert_close(unloaded(model, tmp_path / "out", torch.float64), expected, base, 3e-6)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["modules_to_save"] == ["lm_head"]


def save_curvature(given: Adapters, folder: Path, kind: str) -> list[dict[str, Metric]]:
    """Save random curvature of every matrix that a method may merge, one folder per model; return it too."""
    inputs_first, found = "transformer.h.0.attn.c_attn.weight" in given.base, []
    for t in range(len(given.texts)):
        generator, metrics = torch.Generator().manual_seed(t), {}
        for name, W in given.base.items():
            if not is_matrix(name, W.shape):
                continue
            m, n = W.shape
            if kind == "diagonal":
                metrics[name] = epimer.Diagonal(torch.rand(m, n, generator=generator))
                continue
            X, Y = torch.randn(2 * n, n, generator=generator), torch.randn(2 * m, m, generator=generator)
            metrics[name] = epimer.Kronecker(A=X.T @ X / n, G=Y.T @ Y / m, inputs=0 if inputs_first else 1)
        epimer.Curvature(metrics, Provenance(kind, samples=8)).save(folder / str(t))
        found.append(metrics)
    return found


@pytest.mark.parametrize(
    ("method", "kind"), [("epimer", "diagonal"), ("epimer_kron", "kronecker"), ("regmean", "kronecker")]
)
def test_methods_with_curvature_keep_the_rank_too(adapters, method, kind, tmp_path):
    curvature = save_curvature(adapters, tmp_path / "curvature", kind)
    given = recipe(adapters, method, curvature=[str(tmp_path / "curvature" / str(t)) for t in range(3)])
    record = epimer.merge(given, tmp_path / "out", progress=False)
    expected = epimer.merge_state_dicts(adapters.base, adapters.dense, method, curvature=curvature)
    assert_close(unloaded(adapters.model, tmp_path / "out", torch.float64), expected, adapters.base, 1e-3)
    assert max(one.error or 0 for one in record.tensors.values()) < 1e-4
    flat = epimer.merge_state_dicts(adapters.base, adapters.dense, "average")
    assert max(moved(expected, flat).values()) > 0.01


def test_curvature_in_the_full_space_needs_a_rank(adapters, tmp_path):
    save_curvature(adapters, tmp_path / "curvature", "kronecker")
    given = recipe(adapters, "mats", curvature=[str(tmp_path / "curvature" / str(t)) for t in range(3)])
    with pytest.raises(epimer.EpimerError, match="mats does not keep the rank of adapters"):
        epimer.merge(given, tmp_path / "out", progress=False)
    given |= {"merge_method": "epimer_kron", "parameters": {"basis": "full"}}
    with pytest.raises(epimer.EpimerError, match="epimer_kron in the full space does not keep"):
        epimer.merge(given, tmp_path / "out", progress=False)


CASES: dict[str, tuple] = {
    "patterns": (
        llama,
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 7, r".*\.1\..*q_proj": 3},
         "alpha_pattern": {"v_proj": 9}, "use_rslora": True},
        {"target_modules": ["q_proj"], "r": 2, "lora_alpha": 32},
    ),
    "own modules": (
        llama,
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
    ),
    "classifier": (
        bert,
        {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"},
        {"target_modules": ["query"], "task_type": "SEQ_CLS", "bias": "all"},
    ),
    "own biases": (
        bert,
        {"target_modules": ["query"], "task_type": "SEQ_CLS", "bias": "lora_only"},
        {"target_modules": ["query", "key"], "task_type": "SEQ_CLS"},
    ),
    "conv1d and linear": (gpt2_classifier, {"target_modules": ["c_attn", "score"]}, {"target_modules": ["c_proj"]}),
    "convolutions": (
        Convolutions,
        {"target_modules": ["one", "two", "point", "table", "map"], "bias": "lora_only"},
        {"target_modules": ["two", "table"]},
    ),
    "rank above the side": (llama, {"target_modules": ["q_proj"], "r": 20}, {"target_modules": ["q_proj"], "r": 30}),
    "some of a kind": (
        llama,
        {"target_modules": ["layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"]},
        {"target_modules": ["layers.0.self_attn.v_proj"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", ["task_arithmetic", "tsv"])
@pytest.mark.parametrize("name", CASES)
def test_all_kinds_of_adapters_become_one(name, method, tmp_path):
    build, *configs = CASES[name]
    model = save_base(tmp_path / "base", build)
    states = []
    for t, config in enumerate(configs):
        save_adapter(model, tmp_path / f"adapter{t}", seed=t + 1, **config)
        states.append(unloaded(model, tmp_path / f"adapter{t}", torch.float64))
    base = {name: W.double() for name, W in load_file(tmp_path / "base" / "model.safetensors").items()}
    models = [{"model": f"{tmp_path / 'base'}+{tmp_path / f'adapter{t}'}"} for t in range(len(configs))]
    given = {"merge_method": method, "base_model": str(tmp_path / "base"), "models": models, "output": "lora"}
    epimer.merge(given, tmp_path / "out", progress=False)
    expected = epimer.merge_state_dicts(base, [{n: state[n] for n in base} for state in states], method)
    assert_close(unloaded(model, tmp_path / "out", torch.float64), expected, base, 3e-6)
    again = open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'out'}")
    assert_close({n: again.read(n) for n in base}, expected, base, 3e-5)


def test_factors_of_bfloat16_stay_as_they_are(tmp_path):
    """Ranks add up: A is written bit by bit, B times its weight, in the adapters' own dtype."""
    model = save_base(tmp_path / "base", llama, torch.bfloat16)
    for t in range(2):
        save_adapter(model, tmp_path / f"adapter{t}", seed=t + 1, target_modules=["q_proj"])
        path = tmp_path / f"adapter{t}" / "adapter_model.safetensors"
        save_file({key: W.bfloat16() for key, W in load_file(path).items()}, path)
    given = {
        "merge_method": "task_arithmetic",
        "base_model": str(tmp_path / "base"),
        "models": [{"model": f"{tmp_path / 'base'}+{tmp_path / f'adapter{t}'}"} for t in range(2)],
        "output": "lora",
    }
    epimer.merge(given, tmp_path / "out", progress=False)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    parts = [load_file(tmp_path / f"adapter{t}" / "adapter_model.safetensors") for t in range(2)]
    assert len(found) == 4
    for key, W in found.items():
        own = [part[key] for part in parts]
        if "lora_A" in key:
            assert torch.equal(W, torch.cat(own))
        else:
            assert torch.equal(W, (0.5 * 6 / RANK * torch.cat(own, dim=1).float()).bfloat16())


@pytest.mark.parametrize("method", ["task_arithmetic", "tsv"])
def test_adapters_on_adapters_add_their_ranks(adapters, method, tmp_path):
    given = recipe(adapters, method)
    given["models"] = [{"model": f"{adapters.texts[2]}+{adapters.folder / 'adapter0'}"}, {"model": adapters.texts[0]}]
    epimer.merge(given, tmp_path / "out", progress=False)
    both = {n: adapters.dense[2][n] + adapters.dense[0][n] - W for n, W in adapters.base.items()}
    expected = epimer.merge_state_dicts(adapters.base, [both, adapters.dense[0]], method)
    assert_close(unloaded(adapters.model, tmp_path / "out", torch.float64), expected, adapters.base, 1e-5)


def test_what_is_chosen_is_chosen_among_whole_models(adapters, tmp_path, monkeypatch):
    """A sweep merges whole models to compare them; the best is written as the recipe says, as an adapter."""
    code = "def length(state):\n    return {'task': float(sum(W.double().norm() for W in state.values()))}\n"
    (tmp_path / "score_of_adapters.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    given = recipe(adapters, "tsv")
    swept = epimer.sweep(
        given, "score_of_adapters:length", methods=["average", "tsv"], scales=[1.0], keep_best=tmp_path / "out",
        progress=False,
    )  # fmt: skip
    expected = epimer.merge_state_dicts(adapters.base, adapters.dense, swept.best.method)
    assert_close(unloaded(adapters.model, tmp_path / "out", torch.float64), expected, adapters.base, 3e-6)


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ties", "dare"])
def test_methods_of_full_rank_need_a_rank(adapters, method, tmp_path):
    with pytest.raises(epimer.EpimerError, match=rf"{method} does not keep the rank of adapters.*lora_rank.*tsv"):
        epimer.merge(recipe(adapters, method), tmp_path / "out", progress=False)
    assert not list(tmp_path.iterdir())


def test_a_whole_model_needs_a_rank(adapters, tmp_path):
    given = recipe(adapters, "task_arithmetic")
    tuned = {name: W.float() for name, W in adapters.base.items()}
    name = next(name for name in tuned if name.endswith(("q_proj.weight", "c_attn.weight")))
    tuned[name] = tuned[name] + 0.1 * torch.randn(tuned[name].shape, generator=torch.Generator().manual_seed(0))
    save_file(tuned, tmp_path / "tuned.safetensors")
    given["models"][1]["model"] = str(tmp_path / "tuned.safetensors")
    with pytest.raises(epimer.EpimerError, match=r"models\[1\] .*is not an adapter of this base.*lora_rank"):
        epimer.merge(given, tmp_path / "out", progress=False)
    record = epimer.merge({**given, "lora_rank": 32}, tmp_path / "out", progress=False)
    states = [adapters.dense[0], {n: W.double() for n, W in tuned.items()}, adapters.dense[2]]
    expected = epimer.merge_state_dicts(adapters.base, states, "task_arithmetic")
    found = unloaded(adapters.model, tmp_path / "out", torch.float64)
    assert_close(found, expected, adapters.base, 1e-4)  # 32 is the shorter side of every layer
    assert name in record.tensors


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"output": "gguf"}, "one of model, lora"),
        ({"lora_rank": 0}, "an integer at least 1"),
        ({"output": "model", "lora_rank": 4}, "add 'output: lora'"),
        ({"refine": 2}, "'refine' changes dense weights"),
    ],
)
def test_recipes_that_make_no_sense(adapters, more, why, tmp_path):
    with pytest.raises(epimer.RecipeError, match=why):
        epimer.merge({**recipe(adapters, "tsv"), **more}, tmp_path / "out", progress=False)


def test_an_output_is_not_written_twice_nor_over_something_else(adapters, tmp_path):
    given = recipe(adapters, "tsv")
    first = epimer.merge(given, tmp_path / "out", progress=False)
    assert first.timings
    assert not epimer.merge(given, tmp_path / "out", progress=False).timings
    with pytest.raises(epimer.OutputError, match="--overwrite"):
        epimer.merge({**given, "merge_method": "iso_c"}, tmp_path / "out", progress=False)
    epimer.merge({**given, "merge_method": "iso_c"}, tmp_path / "out", progress=False, overwrite=True)
    assert json.loads((tmp_path / "out" / "epimer.json").read_text())["method"] == "iso_c"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_an_interrupted_run_goes_on_and_ends_in_the_same_bytes(adapters, tmp_path, monkeypatch):
    given, wrote, calls = recipe(adapters, "tsv"), Draft.wrote, []

    def interrupted(self, *args):
        if len(calls) == 7:  # between the two factors of a layer
            raise KeyboardInterrupt
        calls.append(args[0])
        wrote(self, *args)
        self.flush()

    epimer.merge(given, tmp_path / "whole", progress=False)
    monkeypatch.setattr(Draft, "wrote", interrupted)
    with pytest.raises(KeyboardInterrupt):
        epimer.merge(given, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
    again = []
    monkeypatch.setattr(Draft, "wrote", lambda self, *args: again.append(args[0]) or wrote(self, *args))
    epimer.merge(given, tmp_path / "out", progress=False)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert {*calls} & {*again} == {calls[6]}  # the layer of which only one factor was there
    assert len(again) + 6 == len(load_file(tmp_path / "out" / "adapter_model.safetensors"))


def test_the_command_line(adapters, tmp_path):
    import yaml

    given = {**recipe(adapters, "task_arithmetic")}
    del given["output"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(given))
    ran = run("merge", tmp_path / "recipe.yaml", tmp_path / "out", "--lora-rank", "2")
    assert ran.code == 0, ran.err
    assert "leave out at most" in ran.out
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["r"] == 2
    ran = run("merge", tmp_path / "recipe.yaml", tmp_path / "exact", "--lora", "--quiet")
    assert ran.code == 0, ran.err
    found = unloaded(adapters.model, tmp_path / "exact", torch.float64)
    expected = epimer.merge_state_dicts(adapters.base, adapters.dense, "task_arithmetic")
    assert_close(found, expected, adapters.base, 3e-6)


# --- extraction -------------------------------------------------------------------------------------------------------


def fine_tuned(folder: Path, build) -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    """Save a base and a model that moved from it in all tensors but the first layer's; return base and both states."""
    model = save_base(folder / "base", build)
    base = load_file(folder / "base" / "model.safetensors")
    generator, tuned = torch.Generator().manual_seed(3), {}
    for name, W in base.items():
        still = ".0." in name
        tuned[name] = W if still else W + 0.1 * torch.randn(W.shape, generator=generator)
    (folder / "tuned").mkdir()
    save_file(tuned, folder / "tuned" / "model.safetensors", metadata={"format": "pt"})
    (folder / "tuned" / "config.json").write_bytes((folder / "base" / "config.json").read_bytes())
    return model, {n: W.double() for n, W in base.items()}, {n: W.double() for n, W in tuned.items()}


@pytest.mark.parametrize("build", [llama, gpt2_classifier], ids=["llama", "conv1d"])
@pytest.mark.parametrize("rank", [3, 32])
def test_what_is_extracted_is_the_best_of_its_rank(build, rank, tmp_path):
    """Layers are the truncated SVD of the difference, their errors the rest of the spectrum; the rest is kept whole."""
    model, base, tuned = fine_tuned(tmp_path, build)
    ran = run(
        "extract-lora", tmp_path / "tuned", "--base", tmp_path / "base", "--rank", rank, "-o", tmp_path / "out",
        "--record", tmp_path / "record.json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    record = json.loads((tmp_path / "record.json").read_text())["tensors"]
    found, layers = unloaded(model, tmp_path / "out", torch.float64), 0
    for name, W in tuned.items():
        error = record.get(name, {}).get("error")
        if ".0." in name:
            assert torch.equal(found[name], base[name]), name
        elif error is None:
            torch.testing.assert_close(found[name], W, atol=1e-6, rtol=1e-6)
        else:
            U, sigma, Vh = torch.linalg.svd(W - base[name], full_matrices=False)
            best = base[name] + (U[:, :rank] * sigma[:rank]) @ Vh[:rank]
            torch.testing.assert_close(found[name], best, atol=1e-5, rtol=1e-5)
            left = float(sigma[rank:].square().sum().sqrt() / sigma.square().sum().sqrt())
            assert abs(error - left) < 1e-5
            assert f"{left:.4f}" in ran.out
            layers += 1
    assert layers >= 4
    assert "written whole, not as factors" in ran.out


def test_an_embedding_that_is_also_the_head_is_said_to_be_left_out(tmp_path):
    model, base, tuned = fine_tuned(tmp_path, gpt2)
    ran = run("extract-lora", tmp_path / "tuned", "--base", tmp_path / "base", "-r", 4, "-o", tmp_path / "out")
    assert ran.code == 0, ran.err
    state = unloaded(model, tmp_path / "out", torch.float64)
    moved = [name for name, W in tuned.items() if not torch.equal(W, base[name])]
    lost = [name for name in moved if torch.equal(state[name], base[name])]
    assert lost == ["transformer.wte.weight"]
    assert "not in the adapter: 'transformer.wte.weight', which" in ran.out


def without_prefix(folder: Path) -> None:
    """Store a model as the hub has GPT-2: without the network's first word."""
    state = load_file(folder / "model.safetensors")
    state = {name.removeprefix("transformer."): W for name, W in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, **TOKENS, num_key_value_heads=2, num_local_experts=3)
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize(
    ("build", "lost"),
    [
        (llava, {"model.vision_tower.embeddings.class_embedding"}),
        (qwen_vl, set()),
        (gpt2, {"transformer.wte.weight", "lm_head.weight"}),
        (mixtral, set()),
    ],
)
def test_what_is_extracted_has_the_networks_names_where_the_file_has_others(build, lost, tmp_path):
    """At full rank PEFT's network with the adapter is the fine-tuned one, but for what no adapter holds."""
    model, _, _ = fine_tuned(tmp_path, build)
    if build is gpt2:
        for name in ("base", "tuned"):
            without_prefix(tmp_path / name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epimer.extract_lora(str(tmp_path / "tuned"), str(tmp_path / "base"), tmp_path / "out", 48, progress=False)
    found = unloaded(model, tmp_path / "out", torch.float64)
    tuned = type(model).from_pretrained(tmp_path / "tuned").double().state_dict()
    base = {name: W.double() for name, W in model.state_dict().items()}
    still = {
        name for name, W in tuned.items() if torch.equal(found[name], base[name]) and not torch.equal(W, base[name])
    }
    assert still == lost
    assert any("not in the adapter" in str(one.message) for one in caught) == bool(lost)
    held = {name: W for name, W in base.items() if name not in lost}
    assert_close(found, {name: tuned[name] for name in held}, held, 1e-5)
    again = open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'out'}")
    whole = load_file(tmp_path / "tuned" / "model.safetensors")
    apart = {name for name, W in whole.items() if not torch.allclose(again.read(name), W, rtol=1e-4, atol=1e-5)}
    assert len(apart) <= 1  # what is lost


def test_names_that_transformers_cannot_tell_are_said_to_be_the_files(tmp_path):
    fine_tuned(tmp_path, llama)
    for name in ("base", "tuned"):
        path = tmp_path / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["OwnNetwork"]}))
    ran = run("extract-lora", tmp_path / "tuned", "--base", tmp_path / "base", "-r", 4, "-o", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "modules have the file's names" in ran.out


def test_extracting_from_the_base_itself_is_refused(tmp_path):
    for name in ("base", "copy"):
        save_base(tmp_path / name, llama)
    ran = run("extract-lora", tmp_path / "copy", "--base", tmp_path / "base", "-r", 4, "-o", tmp_path / "out")
    assert ran.code == 2
    assert "would be empty" in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "copy"]


# --- networks with a language model inside ----------------------------------------------------------------------------


@pytest.mark.parametrize("build", [llava, qwen_vl])
@pytest.mark.parametrize("method", ["task_arithmetic", "tsv"])
def test_adapters_of_vision_language_models(build, method, tmp_path):
    """Their modules are called otherwise than their tensors in the file: what PEFT merges, by the names of both."""
    model = save_base(tmp_path / "base", build)
    targets = (["q_proj", "fc1"], ["v_proj", "down_proj", "qkv"])
    states = []
    for t, target in enumerate(targets):
        save_adapter(model, tmp_path / f"adapter{t}", seed=t + 1, target_modules=target)
        states.append(unloaded(model, tmp_path / f"adapter{t}", torch.float64))
    base = {name: W.double() for name, W in model.state_dict().items()}
    models = [{"model": f"{tmp_path / 'base'}+{tmp_path / f'adapter{t}'}"} for t in range(2)]
    given = {"merge_method": method, "base_model": str(tmp_path / "base"), "models": models}
    epimer.merge({**given, "output": "lora"}, tmp_path / "lora", progress=False)
    expected = epimer.merge_state_dicts(base, [{n: state[n] for n in base} for state in states], method)
    assert_close(unloaded(model, tmp_path / "lora", torch.float64), expected, base, 3e-6)
    assert sum(distance > 0 for distance in moved(expected, base).values()) > 8
    epimer.merge(given, tmp_path / "dense", progress=False)
    dense = type(model).from_pretrained(tmp_path / "dense").state_dict()
    assert_close(dense, expected, base, 1e-4)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"use_dora": True}, "use_dora"),
    ],
)
def test_adapters_that_are_not_read_are_refused_for_what_they_are(config, why, tmp_path):
    model = save_base(tmp_path / "base", llama)
    save_adapter(model, tmp_path / "adapter", target_modules=["q_proj"])
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(epimer.CheckpointError, match=f"{why}.*merge_and_unload"):
        open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'adapter'}")


@pytest.mark.parametrize(("more", "words"), [
    ({"rank": 0}, ("'rank' parameter of extract_lora must be an integer at least 1. Got 0",)),
    ({"dtype": "int8"}, ("'dtype' parameter of extract_lora must be one of float64",)),
    ({"base": "bsae"}, ("the base: bsae does not exist. Did you mean './base'?",)),
    ({"finetuned": "./tuned"}, ("the fine-tuned model: ./tuned does not exist",)),
    ({"finetuned": "base"}, ("the fine-tuned model and the base are both base",)),
    ({"finetuned": "narrow"}, ("the fine-tuned model (narrow)['layer.weight'] has shape", "with `output: lora`")),
])  # fmt: skip
def test_errors_of_an_extraction_speak_of_no_recipe_that_nobody_wrote(tmp_path, monkeypatch, more, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, width in (("base", 8), ("one", 8), ("narrow", 4)):
        (tmp_path / name).mkdir()
        save_file({"layer.weight": torch.randn(6, width)}, tmp_path / name / "model.safetensors")
    given = {"finetuned": "one", "base": "base", "out": "out", "rank": 2} | more
    with pytest.raises(epimer.EpimerError) as caught:
        epimer.extract_lora(**given, progress=False)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "models[" not in text
    assert not text.startswith("recipe")
