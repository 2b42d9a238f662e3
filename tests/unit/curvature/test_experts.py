"""Experts in one tensor have the curvature of experts in tensors of their own, on the tokens routed to them."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

import epimer
from commands import run
from epimer.errors import EpimerWarning
from epimer.tasks.task import next_tokens, sample_losses

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 19,
}
ROUTING = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4}
WIDTHS = {"intermediate_size": 10, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 8, "head_dim": 6}
FAMILIES = {
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig"),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig"),
}


def build(family: str, kernel: str) -> nn.Module:
    torch.manual_seed(0)
    model, config = (getattr(transformers, name) for name in FAMILIES[family])
    settings = config(**SIZES, **ROUTING, **WIDTHS, pad_token_id=0, initializer_range=0.4, tie_word_embeddings=False)
    network = model._from_config(settings, experts_implementation=kernel).double().eval()
    with torch.no_grad():
        for W in network.parameters():
            W += 0.2 * torch.randn(W.shape, dtype=W.dtype)
    return network


class Apart(nn.Module):
    """The same experts as plain linear layers, which hooks see."""

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        self.gate = copy.copy(fused)._apply_gate
        self.products = nn.ModuleDict()
        for name in ("gate_up_proj", "down_proj"):
            layers = []
            for e in range(fused.num_experts):
                W = getattr(fused, name)[e].detach()
                W = W.T if fused.is_transposed else W
                layer = nn.Linear(W.shape[1], W.shape[0], bias=fused.has_bias, dtype=W.dtype)
                layer.weight = nn.Parameter(W.clone())
                if fused.has_bias:
                    layer.bias = nn.Parameter(getattr(fused, f"{name}_bias")[e].detach().clone())
                layers.append(layer)
            self.products[name] = nn.ModuleList(layers)

    def forward(self, x, index, weights):
        total = torch.zeros_like(x)
        for e in index.unique().tolist():
            token, place = torch.where(index == e)
            y = self.gate(self.products["gate_up_proj"][e](x[token]))
            y = self.products["down_proj"][e](y) * weights[token, place, None]
            total = total.index_add(0, token, y)
        return total


def apart(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.mlp.experts = Apart(layer.mlp.experts)
    return model


def texts():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, SIZES["vocab_size"], (1, n), generator=generator) for n in (7, 4, 6, 5, 3)]


def padded(rows):
    longest = max(row.shape[1] for row in rows)
    ids = torch.cat([nn.functional.pad(row, (0, longest - row.shape[1])) for row in rows])
    mask = torch.cat([nn.functional.pad(torch.ones_like(row), (0, longest - row.shape[1])) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}, next_tokens(ids, mask)


def measured(model, batches, kind, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EpimerWarning)
        return epimer.estimate_curvature(model, batches, sample_losses, kind=kind, labels="true", **options)


CASES = [("gpt-oss", "eager"), ("gpt-oss", "grouped_mm"), ("qwen3-moe", "grouped_mm"), ("mixtral", "batched_mm")]


@pytest.mark.parametrize(("family", "kernel"), CASES)
@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
def test_each_expert_is_measured_on_its_routed_tokens(family, kernel, kind):
    """Padded batches of experts in one tensor against single samples through linear layers."""
    model = build(family, kernel)
    rows = texts()
    found = measured(model, [padded(rows[:3]), padded(rows[3:])], kind)
    expected = measured(apart(model), [padded([row]) for row in rows], kind)
    transposed = family == "gpt-oss"
    for i in range(2):
        for own in ("gate_up_proj", "down_proj"):
            for e in range(4):
                one = found[f"model.layers.{i}.mlp.experts.{own}[{e}]"]
                other = expected[f"model.layers.{i}.mlp.experts.products.{own}.{e}.weight"]
                if kind == "diagonal":
                    torch.testing.assert_close(one.F.T if transposed else one.F, other.F, rtol=1e-9, atol=1e-12)
                else:
                    assert one.inputs == (0 if transposed else 1)
                    A, G = (one.G, one.A) if transposed else (one.A, one.G)
                    torch.testing.assert_close(A, other.A, rtol=1e-9, atol=1e-12)
                    torch.testing.assert_close(G, other.G, rtol=1e-9, atol=1e-12)
            if kind == "diagonal" and transposed:
                biases = torch.stack(
                    [expected[f"model.layers.{i}.mlp.experts.products.{own}.{e}.bias"].F for e in range(4)]
                )
                one = found[f"model.layers.{i}.mlp.experts.{own}_bias"]
                torch.testing.assert_close(one.F, biases, rtol=1e-9, atol=1e-12)
    routed = sum(found.provenance.counts[f"model.layers.0.mlp.experts.down_proj[{e}]"] for e in range(4))
    assert routed == 2 * sum(row.shape[1] for row in rows)  # every real token goes to two experts


@pytest.mark.parametrize("family", ["gpt-oss", "mixtral"])
def test_experts_count_no_padding_that_no_mask_tells_of(family):
    model, rows = build(family, "eager"), texts()
    batches = [padded(rows[:3]), *(padded([row]) for row in rows)]
    together, *alone = [({"input_ids": inputs["input_ids"]}, targets) for inputs, targets in batches]
    found, expected = measured(model, [together], "kronecker"), measured(model, alone[:3], "kronecker")
    assert found.provenance.counts == expected.provenance.counts
    assert any("experts" in name for name in found)
    for name, metric in found.items():
        torch.testing.assert_close(metric.A, expected[name].A, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(metric.G, expected[name].G, rtol=1e-9, atol=1e-12)


def test_the_diagonal_is_autograds():
    """The mean of squared gradients of single samples, straight from autograd."""
    model, rows = build("gpt-oss", "eager"), texts()
    found = measured(model, [padded(rows)], "diagonal")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    W, total = dict(model.named_parameters())[name], 0
    for row in rows:
        inputs, targets = padded([row])
        (gradient,) = torch.autograd.grad(sample_losses(model(**inputs), targets).sum(), W)
        total = total + gradient.square()
    for e in range(4):
        torch.testing.assert_close(found[f"{name}[{e}]"].F, total[e] / len(rows), rtol=1e-8, atol=1e-12)


def test_a_measurement_leaves_the_model_as_it_was_and_merges():
    model = build("gpt-oss", "eager")
    inputs, _ = padded(texts())
    with torch.no_grad():
        before = model(**inputs).logits
    curvature = measured(model, [padded(texts())], "kronecker")
    assert all("forward" not in module.__dict__ for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, before)
    base = {name: W.detach() for name, W in model.named_parameters()}
    models = [base, {name: W + 0.1 * torch.randn(W.shape, dtype=W.dtype) for name, W in base.items()}]
    rules = [("*router*", "average")]
    merged = epimer.merge_state_dicts(base, models, "epimer_kron", curvature=[dict(curvature)] * 2, rules=rules)
    assert merged.record.tensors["model.layers.0.mlp.experts.gate_up_proj"].rule == "matrix"


def test_a_projected_measurement_is_the_projection():
    model, rows = build("qwen3-moe", "grouped_mm"), texts()
    base = {name: W.detach() for name, W in model.named_parameters()}
    name = "model.layers.0.mlp.experts.down_proj[2]"
    models = [{n: W + torch.randn(W.shape, dtype=W.dtype) for n, W in base.items()} for _ in range(2)]
    basis = {name: epimer.build_basis(base, models, rank=2)[name]}
    one = measured(model, [padded(rows)], "kronecker", basis=basis)[name]
    whole = measured(model, [padded(rows)], "kronecker", layers=["*layers.0.mlp.experts.down_proj"])[name]
    U, V = basis[name].U, basis[name].V
    torch.testing.assert_close(one.G, U.T @ whole.G @ U, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(one.A, V.T @ whole.A @ V, rtol=1e-9, atol=1e-12)


class Unknown(nn.Module):
    """Experts of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(2, 6, 6))

    def forward(self, x):
        return torch.einsum("nk,eok->no", x, self.up_proj)


def test_experts_of_an_unknown_kind_are_said_before_measuring():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.head = Unknown(), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.experts(x))

    torch.manual_seed(0)
    seen = []

    def batches():
        seen.append(len(caught))
        yield torch.randn(5, 6), torch.randint(3, (5,))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = epimer.estimate_curvature(Model(), batches(), sample_losses, kind="kronecker")
    assert seen == [1]
    assert str(caught[0].message) == (
        "the curvature of 'experts.up_proj' is left out: experts of a kind that is not known. Methods that need it "
        "refuse them; give '*.experts.*' the rule 'average', or take a method that needs no curvature."
    )
    assert list(found) == ["head.weight"]
    assert found.provenance.left_out == {"experts.up_proj": "its layer is of a kind that is not known"}


WORDS = [f"w{i}" for i in range(SIZES["vocab_size"])]


def saved(folder, family: str):
    """Save a tiny model, with words as tokens, and the texts to measure it on."""
    model = build(family, "eager").float()
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0").save_pretrained(folder)
    rows = [{"text": " ".join(WORDS[i] for i in row[0].tolist())} for row in texts()]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_curvature_has_the_names_that_experts_have_on_disk(tmp_path, family):
    """Mixtral's experts are three tensors each on disk, and joined in memory; gpt-oss's are one tensor in both."""
    folder = tmp_path / "model"
    model = saved(folder, family)
    options = ("--task", "causal-lm", "--data", folder / "d.jsonl", "--labels", "true", "--batch-size", 2)
    ran = run("curvature", folder, *options, "-o", tmp_path / "c")
    assert ran.code == 0, ran.err
    found = epimer.Curvature.load(tmp_path / "c")
    expected = measured(apart(model.double()), [padded([row]) for row in texts()], "kronecker")
    for e in range(4):
        up = expected[f"model.layers.1.mlp.experts.products.gate_up_proj.{e}.weight"]
        down = expected[f"model.layers.1.mlp.experts.products.down_proj.{e}.weight"]
        if family == "gpt-oss":
            one = found[f"model.layers.1.mlp.experts.gate_up_proj[{e}]"]
            pairs = [(one.G, up.A), (one.A, up.G)]
        else:
            w1, w3, w2 = (found[f"model.layers.1.block_sparse_moe.experts.{e}.w{i}.weight"] for i in (1, 3, 2))
            half = len(up.G) // 2
            pairs = [(w1.A, up.A), (w3.A, up.A), (w1.G, up.G[:half, :half]), (w3.G, up.G[half:, half:])]
            pairs += [(w2.A, down.A), (w2.G, down.G)]
        for one, other in pairs:
            torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-5)
    assert not [name for name in found.provenance.left_out if "experts" in name and "bias" not in name]
    base = {name: W + 0.1 for name, W in load_file(folder / "model.safetensors").items()}
    save_file(base, tmp_path / "base.safetensors")
    router = "*router.weight" if family == "gpt-oss" else "*.gate.weight"
    recipe = {"merge_method": "epimer_kron", "base_model": str(tmp_path / "base.safetensors")}
    recipe["rules"] = [[router, "average"]]
    recipe["models"] = [{"model": str(folder), "curvature": str(tmp_path / "c")}] * 2
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    ran = run("merge", tmp_path / "recipe.yaml", tmp_path / "out")
    assert ran.code == 0, ran.err
    record = json.loads((tmp_path / "out" / "epimer.json").read_text())["tensors"]
    assert {one["rule"] for name, one in record.items() if "experts" in name and "bias" not in name} == {"matrix"}


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_are_measured_as_linear_layers(family):
    model = build(family, "eager")
    torch.manual_seed(1)
    ids = torch.randint(1, 19, (4, 5))
    mask = torch.ones_like(ids)
    data = [
        ({"input_ids": ids[i : i + 2], "attention_mask": mask[:2]}, next_tokens(ids[i : i + 2], mask[:2]))
        for i in (0, 2)
    ]
    measured = epimer.estimate_curvature(model, data, sample_losses, kind="diagonal", labels="true")
    routers = {n: p for n, p in model.named_parameters() if n.split(".")[-2] in ("router", "gate")}
    assert len(routers) >= 2
    assert routers.keys() <= set(measured)
    squares = dict.fromkeys(routers, 0.0)
    for i in range(4):
        loss = sample_losses(model(input_ids=ids[i : i + 1]), next_tokens(ids[i : i + 1], mask[:1])).sum()
        for name, g in zip(routers, torch.autograd.grad(loss, list(routers.values())), strict=True):
            squares[name] = squares[name] + g.square() / 4
    for name in routers:
        assert torch.allclose(measured[name].F, squares[name], rtol=1e-6, atol=1e-12), name


def deepseek() -> nn.Module:
    """A model whose routers multiply in float32, whatever their weights are."""
    torch.manual_seed(0)
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    widths = {"intermediate_size": 10, "moe_intermediate_size": 10, "num_key_value_heads": 2, "initializer_range": 0.4}
    config = transformers.DeepseekV3Config(**SIZES | sizes | ranks | widths, pad_token_id=0)
    return transformers.DeepseekV3ForCausalLM._from_config(config, experts_implementation="eager").eval()


ROUTER = "model.layers.1.mlp.gate.weight"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_routers_that_cast_their_weights_are_measured(dtype):
    model = deepseek().to(dtype)
    rows = [padded([row]) for row in texts()]
    found = measured(model, rows, "diagonal")
    assert not [name for name in found.provenance.left_out if ".experts" not in name]
    square = torch.zeros(model.get_parameter(ROUTER).shape)
    for inputs, targets in rows:
        loss = sample_losses(model(**inputs), targets).sum()
        square += torch.autograd.grad(loss, model.get_parameter(ROUTER))[0].float().square() / len(rows)
    near = {"rtol": 1e-4, "atol": 1e-9} if dtype != torch.bfloat16 else {"rtol": 0.05, "atol": 1e-4}
    torch.testing.assert_close(found[ROUTER].F.float(), square, **near)


def test_capacity_for_a_whole_batch_is_measured_with_batches_of_one():
    """NLLB's experts take a number of tokens of the batch, first come first served, and leave out the rest."""
    torch.manual_seed(0)
    sides = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sides |= {"encoder_ffn_dim": 10, "decoder_ffn_dim": 10, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
    routing = {
        "num_experts": 3,
        "expert_capacity": 6,
        "second_expert_policy": "all",
        "moe_eval_capacity_token_fraction": -1.0,
    }
    config = transformers.NllbMoeConfig(
        vocab_size=19, d_model=12, **sides, **routing, pad_token_id=0, decoder_start_token_id=2, init_std=0.4
    )
    model = transformers.NllbMoeForConditionalGeneration(config).double().eval()
    generator = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(3, 19, (6, 5), generator=generator) for _ in range(2))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    ones = [{name: value[n : n + 1] for name, value in batch.items()} for n in range(6)]
    with pytest.warns(EpimerWarning, match="depends on the other samples of its batch"):
        found = epimer.estimate_curvature(model, [batch], kind="diagonal", labels="true", progress=False)
    alone = epimer.estimate_curvature(model, ones, kind="diagonal", labels="true", progress=False)
    assert found.keys() == alone.keys()
    for name in found:
        torch.testing.assert_close(found[name].F, alone[name].F, rtol=1e-6, atol=1e-12)
