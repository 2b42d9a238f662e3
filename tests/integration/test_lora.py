"""Adapters over a base, against PEFT: what PEFT merges and unloads is what `base+adapter` reads and merges as."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor

import epimer
from epimer.checkpoints import open_checkpoint
from epimer.geometry.linalg import LowRank
from epimer.geometry.svd import top_svd

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
    save_adapter,
    save_base,
    unloaded,
)

pytestmark = [*PEFT_REMARKS, pytest.mark.usefixtures("no_progress_bars")]


CASES = {
    "linear": (llama, {"target_modules": ["q_proj", "down_proj"]}),
    "all linear": (llama, {"target_modules": "all-linear"}),
    "rslora": (llama, {"target_modules": ["q_proj", "up_proj"], "use_rslora": True}),
    "patterns": (
        llama,
        {
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"layers.1.self_attn.q_proj": 2, "v_proj": 7},
            "alpha_pattern": {"^model.layers.0.self_attn.v_proj": 11, "q_proj": 3, "self_attn.v_proj": 5},
        },
    ),
    "patterns rslora": (
        llama,
        {
            "target_modules": ["q_proj", "v_proj"],
            "use_rslora": True,
            "rank_pattern": {r".*\.1\..*q_proj": 3},
            "alpha_pattern": {"v_proj": 9},
        },
    ),
    "rank above the side": (llama, {"target_modules": ["q_proj", "gate_proj"], "r": 40}),
    "saved modules": (llama, {"target_modules": ["k_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    "orthogonal start": (llama, {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"}),
    "conv1d": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "conv1d, found out by PEFT": (gpt2, {"target_modules": ["c_attn", "c_proj"]}),
    "conv1d and embeddings": (gpt2, {"target_modules": ["c_attn", "wte", "wpe"], "fan_in_fan_out": True}),
    "biases": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    "own biases": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "lora_only"}),
    "classifier": (bert, {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"}),
    "classifier, own biases": (bert, {"target_modules": ["query"], "task_type": "SEQ_CLS", "bias": "lora_only"}),
    "conv1d classifier": (gpt2_classifier, {"target_modules": ["c_proj"], "task_type": "SEQ_CLS"}),
    "convolutions": (Convolutions, {"target_modules": ["one", "two", "point", "table", "map"], "bias": "lora_only"}),
    "embeddings": (llama, {"target_modules": ["q_proj", "embed_tokens"]}),
    "head": (llama, {"target_modules": ["q_proj", "lm_head"]}),
    "embeddings rslora": (llama, {"target_modules": ["embed_tokens", "lm_head"], "use_rslora": True}),
    "classifier, all biases": (bert, {"target_modules": ["query"], "task_type": "SEQ_CLS", "bias": "all"}),
    "conv1d and linear": (gpt2_classifier, {"target_modules": ["attn.c_proj", "score"]}),
    "conv1d and linear, wide": (gpt2_classifier, {"target_modules": ["c_attn", "score"]}),
}


@pytest.mark.parametrize("name", CASES)
def test_reading_equals_merge_and_unload(name, tmp_path):
    build, config = CASES[name]
    base = save_base(tmp_path / "base", build)
    save_adapter(base, tmp_path / "adapter", **config)
    expected = unloaded(base, tmp_path / "adapter")
    opened = open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'adapter'}")
    before = load_file(tmp_path / "base" / "model.safetensors")
    assert opened.headers.keys() == before.keys()
    changed = [name for name, W in before.items() if not torch.equal(W, expected[name])]
    assert len(changed) >= 2
    for tensor in before:
        found = opened.read(tensor)
        torch.testing.assert_close(found, expected[tensor], atol=2e-6, rtol=1e-6, msg=lambda m, t=tensor: f"{t}: {m}")
        if tensor not in changed:
            assert torch.equal(found, before[tensor]), tensor


DORA = {
    "linear": (llama, {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
    "conv1d": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True, "bias": "lora_only"}),
    "table": (llama, {"target_modules": ["embed_tokens", "v_proj"]}),
    "convolutions": (Convolutions, {"target_modules": ["one", "two", "point", "map"]}),
}


@pytest.mark.parametrize("name", DORA)
def test_dora_is_read_as_peft_merges_it_in_float64(name, tmp_path):
    build, config = DORA[name]
    base = save_base(tmp_path / "base", build, torch.float64)
    save_adapter(base, tmp_path / "adapter", use_dora=True, **config)
    save_adapter(base, tmp_path / "plain", **config)
    expected, plain = (unloaded(base, tmp_path / kind, torch.float64) for kind in ("adapter", "plain"))
    opened = open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'adapter'}")
    before = load_file(tmp_path / "base" / "model.safetensors")
    changed = [tensor for tensor, W in before.items() if not torch.equal(W, expected[tensor])]
    assert sum(float((expected[tensor] - plain[tensor]).abs().max()) > 0.01 for tensor in changed) >= 3
    for tensor, W in before.items():
        found = opened.read(tensor)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected[tensor], atol=1e-13, rtol=1e-12, msg=lambda m, t=tensor: f"{t}: {m}")
        rows = (1, len(W) - 1)
        torch.testing.assert_close(opened.read(tensor, rows), expected[tensor][slice(*rows)], atol=1e-13, rtol=1e-12)
        assert (opened.delta(tensor, opened.base) is None) == (tensor in changed)


@pytest.mark.parametrize("method", ["average", "tsv", "ties"])
def test_dora_merges_into_a_model_and_not_into_an_adapter(method, tmp_path):
    base = save_base(tmp_path / "base", llama)
    kinds = {
        "dora": {"use_dora": True, "target_modules": ["q_proj", "up_proj"]},
        "plain": {"target_modules": ["q_proj"]},
    }
    states = []
    for seed, (name, config) in enumerate(kinds.items(), 1):
        save_adapter(base, tmp_path / name, seed=seed, **config)
        states.append(unloaded(base, tmp_path / name, torch.float64))
    models = [{"model": f"{tmp_path / 'base'}+{tmp_path / name}"} for name in kinds]
    given = {"merge_method": method, "base_model": str(tmp_path / "base"), "models": models}
    epimer.merge(given, tmp_path / "out", progress=False)
    before = {name: W.double() for name, W in load_file(tmp_path / "base" / "model.safetensors").items()}
    expected = epimer.merge_state_dicts(before, [{name: state[name] for name in before} for state in states], method)
    for name, W in load_file(tmp_path / "out" / "model.safetensors").items():
        torch.testing.assert_close(W.double(), expected[name], atol=2e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    with pytest.raises(epimer.EpimerError, match=r"dora.*DoRA.*lora_rank"):
        epimer.merge({**given, "output": "lora"}, tmp_path / "lora", progress=False)
    assert not (tmp_path / "lora").exists()


def test_reading_a_bfloat16_base_is_nearer_the_exact_sum_than_peft(tmp_path):
    """PEFT rounds B·A and then the sum to bfloat16, we return the sum in float32."""
    base = save_base(tmp_path / "base", llama, torch.bfloat16)
    save_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    opened = open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'adapter'}")
    factors = {k: W.double() for k, W in load_file(tmp_path / "adapter" / "adapter_model.safetensors").items()}
    rounded = unloaded(base, tmp_path / "adapter")
    name = "model.layers.0.self_attn.q_proj.weight"
    stem = f"base_model.model.{name.removesuffix('.weight')}"
    before = base.state_dict()[name].double()
    exact = before + 6 / RANK * factors[f"{stem}.lora_B.weight"] @ factors[f"{stem}.lora_A.weight"]
    found = opened.read(name)
    torch.testing.assert_close(found.double(), exact, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.to(torch.bfloat16), rounded[name], atol=1e-3, rtol=2**-7)
    assert (found.double() - exact).abs().max() < 0.01 * (rounded[name].double() - exact).abs().max()


def test_adapters_that_rewrote_their_base_are_refused(tmp_path):
    """PiSSA, OLoRA and their like take their start out of the base's weights, so W + B·A is not what was trained."""
    base = save_base(tmp_path / "base", llama)
    save_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    for start in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"):
        config["init_lora_weights"] = start
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(epimer.CheckpointError, match=start):
            open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'adapter'}")


def test_an_adapter_in_a_torch_file_reads_the_same(tmp_path):
    base = save_base(tmp_path / "base", llama)
    save_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    opened = open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'adapter'}")
    name = "model.layers.1.self_attn.q_proj.weight"
    first, fingerprint = opened.read(name), opened.fingerprint
    torch.save(load_file(tmp_path / "adapter" / "adapter_model.safetensors"), tmp_path / "adapter_model.bin")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").rename(tmp_path / "adapter" / "adapter_model.bin")
    again = open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'adapter'}")
    assert torch.equal(again.read(name), first)
    assert again.fingerprint == fingerprint


TIED = {
    "an update of the table": {"target_modules": ["c_attn", "wte"]},
    "a table of its own": {"target_modules": ["c_attn"], "modules_to_save": ["wte"]},
    "a head of its own": {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("name", TIED)
def test_adapters_of_tied_models_compute_what_peft_computes(name, kind, tmp_path):
    """An update of a tied table moves the head too; a table or head of its own unties them in PEFT, or is refused."""
    base = save_base(tmp_path / "base", gpt2)
    save_adapter(base, tmp_path / "adapter", fan_in_fan_out=True, **TIED[name])
    if kind == "bin":
        (tmp_path / "base" / "model.safetensors").unlink()
        torch.save(base.state_dict(), tmp_path / "base" / "pytorch_model.bin")
    models = [{"model": f"{tmp_path / 'base'}+{tmp_path / 'adapter'}"}]
    try:
        recipe = {"merge_method": "average", "base_model": str(tmp_path / "base"), "models": models}
        epimer.merge(recipe, tmp_path / "out", progress=False)
    except epimer.EpimerError as error:
        assert name != "an update of the table"
        assert str(tmp_path / "adapter") in str(error)  # noqa: PT017
        return
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    wanted = peft.PeftModel.from_pretrained(copied(base), tmp_path / "adapter").merge_and_unload().eval()
    words = torch.arange(2, 20)[None]
    torch.testing.assert_close(found(words).logits, wanted(words).logits, atol=1e-4, rtol=1e-4)


def test_an_update_of_a_tied_table_is_said_as_the_live_adapter_computes_something_else(tmp_path):
    base = save_base(tmp_path / "base", gpt2)
    save_adapter(base, tmp_path / "adapter", fan_in_fan_out=True, **TIED["an update of the table"])
    live = peft.PeftModel.from_pretrained(copied(base), tmp_path / "adapter").eval()
    words = torch.arange(2, 20)[None]
    logits = live(words).logits
    assert not torch.allclose(logits, live.merge_and_unload()(words).logits, atol=1e-2)
    models = [{"model": f"{tmp_path / 'base'}+{tmp_path / 'adapter'}"}]
    recipe = {"merge_method": "average", "base_model": str(tmp_path / "base"), "models": models}
    with pytest.warns(UserWarning, match=r"updates 'transformer\.wte\.weight', which the base also uses as its head"):
        epimer.merge(recipe, tmp_path / "out", progress=False)


# --- merges ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=ADAPTERS)
def adapters(request, tmp_path_factory):
    return Adapters(tmp_path_factory.mktemp(request.param), request.param)


# Factors and sums are float32 and the result is rounded to it, so a small step on large weights (a layer norm's) keeps
# six digits. Spectral methods are given the same subspaces, but lose digits where singular values are close or tasks
# overlap; 1e-4 is a bound, 1e-6 is what they reach here. The reference is float64 because in float32 W + B·A - W has
# full rank: its rounding noise would be given directions of its own, which factors do not have.
EXACT, SPECTRAL = 1e-5, 1e-4
METHODS = [
    ("average", {}, EXACT),
    ("task_arithmetic", {"scale": 0.7}, EXACT),
    ("dare", {"seed": 4}, EXACT),
    ("tsv", {}, SPECTRAL),
    ("tsv", {"rank": 2}, SPECTRAL),
    ("tsv", {"coefficients": "projected"}, SPECTRAL),
    ("iso_c", {}, SPECTRAL),
    ("epimer_free", {}, SPECTRAL),
    ("epimer_free", {"anchor": "iso_c", "calibrate": None}, SPECTRAL),
    ("epimer_free", {"anchor": "sum", "rank": 3}, SPECTRAL),
    ("epimer_free", {"aggregator": "mean"}, SPECTRAL),
    ("epimer_free", {"basis": "tagged", "aggregator": "sum"}, SPECTRAL),
    ("epimer_free", {"basis": "full", "aggregator": "mean"}, SPECTRAL),
    ("wudi", {}, SPECTRAL),
]


def spelled(value) -> str | None:
    return "-".join(f"{k}={v}" for k, v in value.items()) or "defaults" if isinstance(value, dict) else None


@pytest.mark.parametrize(("method", "parameters", "tolerance"), METHODS, ids=spelled)
def test_merging_adapters_equals_merging_the_models_they_make(adapters, method, parameters, tolerance):
    expected = epimer.merge_state_dicts(adapters.base, adapters.dense, method, **parameters)
    found = adapters.merged(method, **parameters)
    shutil.rmtree(adapters.folder / "out")
    adapters.close(found, expected, tolerance)
    still = [name for name, W in adapters.base.items() if torch.equal(W, expected[name])]
    assert all(torch.equal(found[name].double(), adapters.base[name]) for name in still)


@pytest.mark.parametrize("density", [0.2, 0.4])
def test_trimming_adapters_equals_trimming_the_models_they_make(adapters, density):
    """An entry that lies at a model's threshold up to rounding may fall on either side of it: one per model."""
    expected = epimer.merge_state_dicts(adapters.base, adapters.dense, "ties", density=density)
    found = adapters.merged("ties", density=density)
    shutil.rmtree(adapters.folder / "out")
    apart = [(found[n].double() - W).abs() > 1e-6 * W.abs().clamp_min(1) for n, W in expected.items()]
    assert sum(int(entries.sum()) for entries in apart) <= len(adapters.dense)


@pytest.mark.parametrize("method", ["average", "tsv", "iso_c", "epimer_free"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_adapters_merge_with_dense_models(adapters, method, order, tmp_path):
    """One model of the recipe is dense; where an adapter leaves a tensor alone, zeros stand beside factors."""
    generator = torch.Generator().manual_seed(9)
    moved = {n: (W + 0.05 * torch.randn(W.shape, generator=generator)).float() for n, W in adapters.base.items()}
    save_file(moved, tmp_path / "dense.safetensors")
    everyone = [adapters.texts[0], str(tmp_path / "dense.safetensors"), adapters.texts[2]]
    states = [adapters.dense[0], {n: W.double() for n, W in moved.items()}, adapters.dense[2]]
    found = adapters.merged(method, [everyone[t] for t in order])
    shutil.rmtree(adapters.folder / "out")
    expected = epimer.merge_state_dicts(adapters.base, [states[t] for t in order], method)
    adapters.close(found, expected, EXACT if method == "average" else SPECTRAL)


@pytest.mark.parametrize("method", ["task_arithmetic", "tsv"])
def test_an_adapter_of_another_model_of_the_family_counts_from_the_base(adapters, method, tmp_path):
    """The base of the adapter is a fine-tuned model: its task vector is the fine-tuning and the adapter together."""
    generator = torch.Generator().manual_seed(9)
    moved = {n: (W + 0.05 * torch.randn(W.shape, generator=generator)).float() for n, W in adapters.base.items()}
    save_file(moved, tmp_path / "tuned.safetensors")
    over = f"{tmp_path / 'tuned.safetensors'}+{adapters.folder / 'adapter0'}"
    step = {n: adapters.dense[0][n] - W for n, W in adapters.base.items()}
    state = {n: moved[n].double() + step[n] for n in step}
    found = adapters.merged(method, [over, adapters.texts[0]])
    shutil.rmtree(adapters.folder / "out")
    expected = epimer.merge_state_dicts(adapters.base, [state, adapters.dense[0]], method)
    adapters.close(found, expected, EXACT if method == "task_arithmetic" else SPECTRAL)


def test_adapters_can_be_stacked(adapters):
    """base+first+second adds both updates; what the second replaces is the second's."""
    text = f"{adapters.texts[0]}+{adapters.folder / 'adapter1'}"
    opened = open_checkpoint(text)
    replaced = {n for n in adapters.base if n.endswith(".bias")}
    for name, W in adapters.base.items():
        first, second = (adapters.dense[t][name] - W for t in (0, 1))
        wanted = W + second + (0 if name in replaced else first)
        torch.testing.assert_close(opened.read(name).double(), wanted, atol=2e-6, rtol=1e-6)
    found = adapters.merged("task_arithmetic", [text, adapters.texts[2]], scale=2.0)
    shutil.rmtree(adapters.folder / "out")
    both = {n: adapters.dense[0][n] + adapters.dense[1][n] - W for n, W in adapters.base.items()}
    expected = epimer.merge_state_dicts(adapters.base, [both, adapters.dense[2]], "task_arithmetic", scale=2.0)
    adapters.close(found, expected, EXACT)


@pytest.mark.parametrize("method", ["task_arithmetic", "tsv", "epimer_free"])
def test_adapters_of_a_bfloat16_base_are_added_before_rounding(method, tmp_path):
    """Each factor counts in full: the result is the exact one, rounded once."""
    given = Adapters(tmp_path, "llama", torch.bfloat16)
    found = given.merged(method)
    expected = epimer.merge_state_dicts(given.base, given.dense, method)
    for name, W in expected.items():
        assert found[name].dtype == torch.bfloat16
        once = W.to(torch.bfloat16)
        assert (found[name] != once).double().mean() <= 0.01, name  # ties that the last float32 digit decides
        torch.testing.assert_close(found[name].double(), W, atol=1e-6, rtol=2**-8)


def test_iso_cts_of_adapters_does_not_depend_on_rounding(adapters):
    found = adapters.merged("iso_cts")
    shutil.rmtree(adapters.folder / "out")
    adapters.close(found, epimer.merge_state_dicts(adapters.base, adapters.dense, "iso_cts"), SPECTRAL)


# --- factors stay factors -------------------------------------------------------------------------------------------


def save_factors(folder: Path, name: str, B: Tensor, A: Tensor) -> None:
    """Write a plain adapter of one layer, scaling 1, by hand."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": len(A), "lora_alpha": len(A), "fan_in_fan_out": False}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    stem = f"base_model.model.{name}"
    factors = {f"{stem}.lora_A.weight": A.contiguous(), f"{stem}.lora_B.weight": B.contiguous()}
    save_file(factors, folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """One 3000 x 3000 layer and two adapters whose rows and columns are orthogonal to each other's."""
    folder, side = tmp_path_factory.mktemp("wide"), 3000
    generator = torch.Generator().manual_seed(0)
    (folder / "base").mkdir()
    W = 0.02 * torch.randn(side, side, generator=generator)
    save_file({"layer.weight": W}, folder / "base" / "model.safetensors")
    Q, P = (torch.linalg.qr(torch.randn(side, 2 * RANK, generator=generator).double()).Q for _ in range(2))
    total = W.double()
    for t in range(2):
        mine = slice(t * RANK, (t + 1) * RANK)
        mix_B, mix_A = (torch.randn(RANK, RANK, generator=generator).double() for _ in range(2))
        B, A = (Q[:, mine] @ mix_B).float(), (mix_A @ P[:, mine].T).float()
        save_factors(folder / f"adapter{t}", "layer", B, A)
        total = total + B.double() @ A.double()
    return folder, total


@pytest.mark.parametrize(("method", "built"), [("tsv", False), ("epimer_free", False), ("task_arithmetic", True)])
def test_spectral_methods_build_no_dense_task_vector(wide, method, built, monkeypatch, tmp_path):
    """Tasks that share no direction do not interfere, so TSV-M and EpiMer give the sum of their task vectors."""
    folder, total = wide
    called, dense = [], LowRank.dense
    monkeypatch.setattr(LowRank, "dense", lambda self: called.append(self.shape) or dense(self))
    given = {
        "merge_method": method,
        "base_model": str(folder / "base"),
        "models": [{"model": f"{folder / 'base'}+{folder / f'adapter{t}'}"} for t in range(2)],
        "scale": 2 if method == "task_arithmetic" else 1,
    }
    epimer.merge(given, tmp_path / "out", progress=False)
    assert bool(called) == built
    found = load_file(tmp_path / "out" / "model.safetensors")["layer.weight"]
    before = load_file(folder / "base" / "model.safetensors")["layer.weight"]
    error = torch.linalg.vector_norm(found - total) / torch.linalg.vector_norm(total - before)
    assert error < 1e-5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PRODUCTS = {
    "tall": (draw(50, 4), draw(4, 30, seed=1), 4),
    "broad": (draw(20, 5), draw(5, 70, seed=1), 5),
    "rank one": (draw(40, 1), draw(1, 25, seed=1), 1),
    "more columns than rows": (draw(9, 24), draw(24, 31, seed=1), 9),
    "more columns than either side": (draw(9, 40), draw(40, 7, seed=1), 7),
    "B is zero": (torch.zeros(12, 4, dtype=torch.float64), draw(4, 9), 0),
    "A is zero": (draw(12, 4), torch.zeros(4, 9, dtype=torch.float64), 0),
    "columns twice": (draw(30, 3)[:, [0, 1, 2, 0, 1]], draw(5, 20, seed=1), 3),
    "rows twice": (draw(30, 5), draw(2, 20, seed=1)[[0, 1, 1, 0, 0]], 2),
    "columns that cancel": (
        draw(30, 2)[:, [0, 0, 1]],
        draw(3, 20, seed=1)[[0, 0, 1]] * torch.tensor([[1], [-1], [1]]),
        1,
    ),
    "a zero column": (draw(30, 3) * torch.tensor([1, 0, 1]), draw(3, 20, seed=1), 2),
    "large and small": (draw(30, 3) * torch.tensor([1e6, 1, 1e-3]), draw(3, 20, seed=1), 3),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("k", [2, 100])
def test_the_svd_of_factors_is_that_of_their_product(name, k):
    B, A, rank = PRODUCTS[name]
    found = top_svd(LowRank(B, A), k)
    U, sigma, Vh = torch.linalg.svd(B @ A, full_matrices=False)
    size = max(float(sigma[0]), 1.0)
    kept = min(rank, k)
    assert len(found.sigma) == kept
    assert found.U.shape == (len(B), kept)
    assert found.V.shape == (A.shape[1], kept)
    torch.testing.assert_close(found.sigma, sigma[:kept], atol=1e-10 * size, rtol=0)
    assert float(sigma[kept:].max() if kept == rank and kept < len(sigma) else 0) <= 1e-10 * size
    eye = torch.eye(kept, dtype=torch.float64)
    for factor in (found.U, found.V):
        torch.testing.assert_close(factor.T @ factor, eye, atol=1e-10, rtol=0)
    best = (U[:, :kept] * sigma[:kept]) @ Vh[:kept]
    torch.testing.assert_close((found.U * found.sigma) @ found.V.T, best, atol=1e-10 * size, rtol=0)


def test_factors_behave_as_their_product():
    B, A, X, Y = draw(9, 3), draw(3, 7, seed=1), draw(7, 4, seed=2), draw(5, 9, seed=3)
    D, dense, other = LowRank(B, A), B @ A, LowRank(draw(9, 2, seed=4), draw(2, 7, seed=5))
    more = draw(9, 7, seed=6)
    for found, wanted in (
        (D.dense(), dense),
        (D.T.dense(), dense.T),
        (D @ X, dense @ X),
        (Y @ D, Y @ dense),
        ((2.5 * D).dense(), 2.5 * dense),
        ((D * 2.5).dense(), 2.5 * dense),
        ((D + other).dense(), dense + other.B @ other.A),
        (D + more, dense + more),
        (more + D, dense + more),
    ):
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    assert isinstance(D + other, LowRank)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    base = save_base(folder / "base", llama)
    save_adapter(base, folder / "adapter", target_modules=["q_proj", "down_proj"])
    return folder, base


def refused(base: Path, adapter: Path, out: Path, *words: str) -> None:
    """Assert that base+adapter is refused, alone and in a recipe, in one line with these words, and nothing written."""
    text = f"{base}+{adapter}"
    with pytest.raises(epimer.CheckpointError) as alone:
        open_checkpoint(text)
    recipe = {"merge_method": "average", "base_model": str(base), "models": [{"model": text}, {"model": str(base)}]}
    with pytest.raises(epimer.EpimerError) as merged:
        epimer.merge(recipe, out, progress=False)
    assert "models[0]" in str(merged.value)
    for error in (alone, merged):
        assert "\n" not in str(error.value)
        for word in (*words, str(adapter)):
            assert word in str(error.value)
    assert not out.exists()


def edited(pair: Path, folder: Path, change) -> Path:
    """Return a copy of the pair's adapter, its tensors changed."""
    shutil.copytree(pair / "adapter", folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_lengths_of_dora_that_its_config_or_its_layers_do_not_have_are_refused(pair, tmp_path):
    folder, base = pair
    save_adapter(base, tmp_path / "dora", target_modules=["q_proj"], use_dora=True)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    for change, words in (
        (lambda tensors: tensors.pop(name), ["use_dora", "lora_magnitude_vector", "0.self_attn.q_proj"]),
        (lambda tensors: tensors.update({name: torch.ones(31)}), ["31 lengths", "32 outputs", "0.self_attn.q_proj"]),
    ):
        shutil.copytree(tmp_path / "dora", tmp_path / "broken")
        tensors = load_file(tmp_path / "broken" / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "broken" / "adapter_model.safetensors")
        refused(folder / "base", tmp_path / "broken", tmp_path / "out", *words)
        shutil.rmtree(tmp_path / "broken")
    config = json.loads((tmp_path / "dora" / "adapter_config.json").read_text())
    (tmp_path / "dora" / "adapter_config.json").write_text(json.dumps({**config, "use_dora": False}))
    refused(folder / "base", tmp_path / "dora", tmp_path / "out", "lora_magnitude_vector")


def test_other_kinds_of_adapter_are_refused(pair, tmp_path):
    folder, base = pair
    config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    peft.get_peft_model(copied(base), config).save_pretrained(tmp_path / "ia3")
    refused(folder / "base", tmp_path / "ia3", tmp_path / "out", "IA3", "only LORA")


def test_lora_with_a_bias_of_its_own_is_refused(tmp_path):
    base = save_base(tmp_path / "base", bert)
    with warnings.catch_warnings():  # PEFT takes the bias for a matrix that was cut short
        warnings.filterwarnings("ignore", "Adapter 'default': .* have invalid shape")
        save_adapter(base, tmp_path / "adapter", target_modules=["query"], lora_bias=True)
    refused(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", "query.lora_B.bias", "not plain LoRA")


def test_an_adapter_of_a_wider_base_is_refused(pair, tmp_path):
    folder, _ = pair
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 48}, **TOKENS)
    wider = transformers.LlamaForCausalLM(config)
    save_adapter(wider, tmp_path / "wider", target_modules=["down_proj"])
    words = ("down_proj.weight", "48 x 48", "(32, 48)", "adapter of this base?")
    refused(folder / "base", tmp_path / "wider", tmp_path / "out", *words)


def test_an_adapter_of_another_architecture_is_refused(pair, tmp_path):
    folder, _ = pair
    save_adapter(save_base(tmp_path / "gpt2", gpt2), tmp_path / "adapter", target_modules=["c_attn"])
    words = ("h.0.attn.c_attn.lora_A.weight", "belongs to no tensor", str(folder / "base"))
    refused(folder / "base", tmp_path / "adapter", tmp_path / "out", *words)


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_half_an_update_is_refused(pair, tmp_path, part):
    module = "model.layers.1.mlp.down_proj"
    adapter = edited(pair[0], tmp_path / "half", lambda W: W.pop(f"base_model.model.{module}.{part}.weight"))
    refused(pair[0] / "base", adapter, tmp_path / "out", "only one of lora_A and lora_B", module)


@pytest.mark.parametrize("B", [torch.ones(32, RANK - 1), torch.ones(0)], ids=["one column less", "no matrix"])
def test_factors_that_do_not_fit_each_other_are_refused(pair, tmp_path, B):
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    adapter = edited(pair[0], tmp_path / "cut", lambda W: W.update({name: B}))
    refused(pair[0] / "base", adapter, tmp_path / "out", "model.layers.1.mlp.down_proj")


@pytest.mark.parametrize("shape", [(64, 32), (32, 60)])
def test_a_replaced_tensor_of_another_shape_is_refused(pair, tmp_path, shape):
    """As after tokens were added: PEFT saves the resized table."""
    table = {"base_model.model.model.embed_tokens.weight": torch.zeros(shape)}
    adapter = edited(pair[0], tmp_path / "resized", lambda W: W.update(table))
    refused(pair[0] / "base", adapter, tmp_path / "out", "model.embed_tokens.weight", str(shape), "(60, 32)")


def within(seconds: float, call: Callable[[], object]) -> None:
    """Run something that may never return."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert ended, f"still running after {seconds} seconds"
    if ended[0] is not None:
        raise ended[0]


def test_nan_in_a_factor_ends_the_merge_and_names_the_model_and_the_tensor(pair, tmp_path):
    def spoil(tensors):
        tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"][0, 0] = torch.nan

    adapter = edited(pair[0], tmp_path / "spoiled", spoil)
    good = f"{pair[0] / 'base'}+{pair[0] / 'adapter'}"
    models = [{"model": good}, {"model": f"{pair[0] / 'base'}+{adapter}"}]
    recipe = {"merge_method": "tsv", "base_model": str(pair[0] / "base"), "models": models}
    for _ in range(100):  # readers and workers may be anywhere when it happens
        with pytest.raises(epimer.TensorError, match=r"models\[1\].*model\.layers\.1\.mlp\.down_proj\.weight.*NaN"):
            within(10, lambda: epimer.merge(recipe, tmp_path / "out", progress=False, workers=3))
        assert [file.name for file in tmp_path.iterdir()] == ["spoiled"]


def test_an_adapter_alone_is_no_model(pair, tmp_path):
    adapter = str(pair[0] / "adapter")
    with pytest.raises(epimer.CheckpointError, match=r"is a LoRA adapter, not a whole model; write it as BASE\+"):
        open_checkpoint(adapter)
    recipe = {"merge_method": "average", "base_model": str(pair[0] / "base"), "models": [{"model": adapter}]}
    with pytest.raises(epimer.EpimerError, match=r"models\[0\].*is a LoRA adapter"):
        epimer.merge(recipe, tmp_path / "out", progress=False)


def test_a_model_is_no_adapter(pair):
    base = pair[0] / "base"
    with pytest.raises(epimer.CheckpointError, match=r"is not a LoRA adapter: expected a folder with adapter_config"):
        open_checkpoint(f"{base}+{base}")
