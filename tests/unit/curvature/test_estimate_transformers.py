"""Curvature of the models people have: tiny ones of transformers, against brute force in float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import epimer
from cases import matrices, measure
from dense import matrix_of
from oracle import Case, factors, fisher, gradients, layer_uses, near

transformers = pytest.importorskip("transformers")

CLASSES = 3
VOCABULARY = 11
IGNORED = -100
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 6,
    "num_labels": CLASSES,
}


def on_classes(outputs, targets):
    return functional.cross_entropy(outputs.logits, targets, reduction="none")


def on_tokens(outputs, targets):
    return functional.cross_entropy(outputs.logits.transpose(1, 2), targets, reduction="none").sum(1)


def on_next_tokens(outputs, targets):
    losses = functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), targets[:, 1:], reduction="none")
    return losses.sum(1)


def padded(targets="classes"):
    """Return batches of padded ids; targets are classes, or the tokens themselves with padding ignored."""
    batches = []
    for n, T in ((4, 5), (2, 4)):
        ids = torch.randint(3, VOCABULARY, (n, T))
        mask = torch.ones_like(ids)
        for i in range(1, n):
            mask[i, T - i :] = 0
        given = torch.randint(CLASSES, (n,)) if targets == "classes" else ids.masked_fill(mask == 0, IGNORED)
        batches.append(({"input_ids": ids, "attention_mask": mask}, given))
    return batches


def pictures(n=4, size=8):
    return [({"pixel_values": torch.randn(n, 3, size, size).double()}, torch.randint(CLASSES, (n,)))]


def real(inputs):
    return inputs["attention_mask"].bool()


def text(model, targets, loss, tables, **options):
    return Case(model, padded(targets), loss, real, no_factors=tables, **options)


def _bert():
    config = transformers.BertConfig(**TOKENS | SMALL, max_position_embeddings=6)
    tables = [f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")]
    return text(transformers.BertForSequenceClassification(config), "classes", on_classes, tables)


def _albert():
    """One layer, used three times."""
    config = transformers.AlbertConfig(
        **TOKENS | SMALL | {"num_hidden_layers": 3}, embedding_size=4, max_position_embeddings=6
    )
    tables = [f"albert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")]
    return text(transformers.AlbertForSequenceClassification(config), "classes", on_classes, tables)


def _gpt2(loss=on_next_tokens):
    config = transformers.GPT2Config(**TOKENS, n_positions=6, n_embd=8, n_layer=1, n_head=2, n_inner=6)
    tables = ["transformer.wte.weight", "transformer.wpe.weight"]
    return text(transformers.GPT2LMHeadModel(config), "tokens", loss, tables)


def _llama():
    config = transformers.LlamaConfig(**TOKENS | SMALL, num_key_value_heads=1, max_position_embeddings=6)
    return text(transformers.LlamaForCausalLM(config), "tokens", on_next_tokens, ["model.embed_tokens.weight"])


def _opt():
    """Positions whose layer takes the mask, not the rows."""
    config = transformers.OPTConfig(
        **TOKENS, hidden_size=8, ffn_dim=6, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=8,
        max_position_embeddings=6,
    )  # fmt: skip
    tables = ["model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"]
    return text(transformers.OPTForCausalLM(config), "tokens", on_next_tokens, tables, left_out=tables[1:])


def _gemma():
    """A table whose layer multiplies, and is the head."""
    config = transformers.GemmaConfig(**TOKENS | SMALL, num_key_value_heads=1, head_dim=4, max_position_embeddings=6)
    return text(transformers.GemmaForCausalLM(config), "tokens", on_next_tokens, ["model.embed_tokens.weight"])


def _vit():
    config = transformers.ViTConfig(**SMALL, image_size=8, patch_size=4)
    lone = ["vit.embeddings.cls_token", "vit.embeddings.position_embeddings"]
    return Case(transformers.ViTForImageClassification(config), pictures(), on_classes, left_out=lone)


class Clip(nn.Module):
    """CLIP's vision tower with a head."""

    def __init__(self):
        super().__init__()
        small = {key: value for key, value in SMALL.items() if key != "num_labels"}
        self.vision = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**small, image_size=8, patch_size=4))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, pixel_values):
        return self.head(self.vision(pixel_values).pooler_output)


def _clip():
    model = Clip()
    names = [name for name, _ in model.named_parameters()]
    lone = [name for name in names if name.endswith("class_embedding")]
    tables = [name for name in names if name.endswith("position_embedding.weight")]

    def loss(outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="none")

    return Case(model, pictures(), loss, left_out=lone, no_factors=tables)


def _resnet():
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic", num_labels=CLASSES
    )
    model = transformers.ResNetForImageClassification(config)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
    return Case(model, pictures(3, 16), on_classes)


CASES = {
    "bert": _bert,
    "albert": _albert,
    "gpt2": _gpt2,
    "gpt2, shifted outside": lambda: _gpt2(on_tokens),
    "llama": _llama,
    "vit": _vit,
    "clip": _clip,
    "resnet": _resnet,
}


def build(make):
    torch.manual_seed(0)
    case = make()
    case.model.double()
    for p in case.model.parameters():  # biases start at 0, norms at 1
        p.data.add_(0.1 * torch.randn_like(p))
    return case


@pytest.fixture(params=CASES)
def case(request):
    return build(CASES[request.param])


def test_the_diagonal_is_the_mean_squared_gradient(case):
    found, s = measure(case, "diagonal"), gradients(case.model, case.batches, case.loss)
    assert set(found) == set(s) - set(case.left_out)
    assert set(found.provenance.left_out) == set(case.left_out)
    for name in found:
        assert near(found[name].F, s[name].square().mean(0)), name


@pytest.mark.parametrize("sequence", ["expand", "reduce"])
def test_kronecker_factors_are_second_moments_in_the_stored_orientation(case, sequence):
    found = measure(case, "kronecker", sequence=sequence)
    uses, transposed = layer_uses(case.model, case.batches, case.loss)
    masks = None if case.real is None else [row for inputs, _ in case.batches for row in case.real(inputs)]
    assert set(found) == matrices(case).keys()
    for name in found:
        of_gradients, of_inputs = factors(uses[name], sequence, masks)
        assert found[name].inputs == (0 if name in transposed else 1)
        G, A = (of_inputs, of_gradients) if name in transposed else (of_gradients, of_inputs)
        assert near(found[name].G, G), name
        assert near(found[name].A, A), name


def test_samples_and_ekfac_have_the_whole_gradients(case):
    samples, ekfac = measure(case, "samples"), measure(case, "ekfac")
    s = gradients(case.model, case.batches, case.loss)
    assert set(samples) == set(ekfac) == matrices(case).keys()
    for name in samples:
        m, n = len(s[name][0]), s[name][0][0].numel()
        if m * n < 100:
            assert near(matrix_of(samples[name], m, n), fisher(s[name])), name
        D = torch.randn(m, n, dtype=torch.float64)
        along = torch.einsum("nab,ab->n", s[name].flatten(2), D)
        assert near(samples[name].apply(D), torch.einsum("n,nab->ab", along, s[name].flatten(2)) / len(s[name])), name
        P, Q = ekfac[name].P, ekfac[name].Q
        assert near(ekfac[name].S, (P.T @ s[name].flatten(2) @ Q).square().mean(0)), name


@pytest.mark.parametrize("make", [_opt, _gemma], ids=["opt", "gemma"])
def test_tables_with_a_forward_of_their_own_are_right_or_left_out(make):
    case = build(make)
    found, s = measure(case, "diagonal"), gradients(case.model, case.batches, case.loss)
    assert set(found) | set(found.provenance.left_out) == set(s)
    for name in found:
        assert near(found[name].F, s[name].square().mean(0), 1e-6), name  # Gemma's norms are in float32
    assert len(found) > 8


@pytest.mark.parametrize("targets", [4, 5])
def test_the_padding_of_a_source_is_not_that_of_its_target(targets):
    """T5 with five source tokens, some of them padding, and as many target tokens, all of them real."""
    config = transformers.T5Config(**TOKENS, d_model=8, d_kv=4, d_ff=6, num_layers=1, num_heads=2)
    inputs = padded()[0][0]
    inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (4, targets))
    model = transformers.T5ForConditionalGeneration(config)
    case = build(lambda: Case(model, [(inputs, torch.randint(3, VOCABULARY, (4, targets)))], on_tokens))
    found = measure(case, "kronecker")
    real, every = int(inputs["attention_mask"].sum()), 4 * targets
    for name, count in found.provenance.counts.items():
        of_source = name.startswith("encoder") or ".EncDecAttention.k." in name or ".EncDecAttention.v." in name
        assert count == (real if of_source else every), name


def test_a_tied_head_is_reported_once_and_found_under_both_names():
    case = build(_gpt2)
    found, s = measure(case, "diagonal"), gradients(case.model, case.batches, case.loss)
    assert found.provenance.ties == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" in found
    assert "lm_head.weight" not in list(found)
    assert torch.equal(found["lm_head.weight"].F, found["transformer.wte.weight"].F)
    assert found.size("lm_head.weight") == found["transformer.wte.weight"].F.nbytes
    assert near(found["lm_head.weight"].F, s["transformer.wte.weight"].square().mean(0))


@pytest.mark.parametrize(("inside", "shift"), [(True, 1), (False, 0)])
def test_labels_are_drawn_where_the_loss_looks_for_them(inside, shift):
    case = build(lambda: _gpt2(on_next_tokens if inside else on_tokens))
    case.model.transformer.wte.weight.data.mul_(100)
    drawn = []

    def loss(outputs, targets):
        drawn.append(targets)
        return case.loss(outputs, targets)

    ids, mask = (case.batches[0][0][key] for key in ("input_ids", "attention_mask"))
    targets = ids.masked_fill(mask == 0, IGNORED)
    epimer.estimate_curvature(case.model, [(case.batches[0][0], targets)], loss, kind="diagonal")
    logits = case.model.eval()(input_ids=ids, attention_mask=mask).logits
    best = logits.topk(2).indices  # sampled by importance: one of two, where the third is out of the question
    sure = logits.topk(3).values[..., 1:].diff().abs()[..., 0] > 9
    checked = 0
    for n in range(len(ids)):
        for t in range(shift, ids.shape[1]):
            if not mask[n, t]:
                assert drawn[-1][n, t] == IGNORED
            elif sure[n, t - shift]:
                assert drawn[-1][n, t] in best[n, t - shift]
                checked += 1
    assert checked > 5
    assert not torch.equal(best[:, 1:], best[:, :-1])


@pytest.mark.parametrize("key", ["logits", 0])
def test_a_loss_may_take_the_output_apart_as_it_likes(key):
    case = build(_gpt2)
    plain = measure(case, "diagonal", labels="model")
    case.loss = lambda outputs, targets: functional.cross_entropy(
        outputs[key][:, :-1].transpose(1, 2), targets[:, 1:], reduction="none"
    ).sum(1)
    found = measure(case, "diagonal", labels="model")
    for name in plain:
        assert near(found[name].F, plain[name].F)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_the_gauss_newton_matrix_of_a_language_model_is_its_expected_fisher(attention):
    case = build(_gpt2)
    case.model.set_attn_implementation(attention)
    case.batches = [({key: value[:2, :3] for key, value in case.batches[0][0].items()}, case.batches[0][1][:2, :3])]
    base = {name: p.detach() for name, p in case.model.named_parameters() if name in matrices(case)}
    models = [{name: W + torch.randn_like(W) for name, W in base.items()} for _ in range(2)]
    basis = epimer.build_basis(base, models, rank=1)
    ggn = measure(case, "ggn", basis=basis)
    expected = measure(case, "samples", basis=basis, labels="expected")
    assert len(basis) == 4
    for name in basis:
        assert near(ggn[name].H, expected[name].H, 1e-9), name


def test_gradient_checkpointing_changes_nothing():
    for make in (_bert, _gpt2, _llama):
        case = build(make)
        plain = measure(case, "diagonal")
        for reentrant in (False, True):
            case.model.train()
            case.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            found = measure(case, "diagonal")
            case.model.gradient_checkpointing_disable()
            assert set(found) == set(plain)
            for name in plain:
                assert near(found[name].F, plain[name].F), (name, reentrant)


def test_regmean_of_conv1d_solves_least_squares_on_the_layers_outputs():
    """GPT-2's Conv1D stores inputs x outputs: min_W Σ_t ‖X_t W - X_t W_t‖² has W = (Σ X_tᵀX_t)⁻¹ Σ X_tᵀX_t W_t."""
    cases = [build(_gpt2) for _ in range(2)]
    for t, case in enumerate(cases):
        torch.manual_seed(t + 1)
        for p in case.model.parameters():
            p.data.add_(0.1 * torch.randn_like(p))
        case.batches = padded("tokens") * 4
        torch.manual_seed(t + 5)
        case.batches = [batch for _ in range(4) for batch in padded("tokens")]
    curvatures = [measure(case, "kronecker", samples=None) for case in cases]
    states = [{name: W.detach() for name, W in case.model.named_parameters()} for case in cases]
    rules = [("*w?e.weight", "average")]
    merged = epimer.merge_state_dicts(None, states, "regmean", curvature=curvatures, off_diagonal=1.0, rules=rules)
    assert len(curvatures[0]) == 4
    for name in curvatures[0]:
        grams, total = 0, 0
        for case, state in zip(cases, states, strict=True):
            uses, _ = layer_uses(case.model, case.batches, case.loss)
            masks = [row for inputs, _ in case.batches for row in real(inputs)]
            X = torch.cat([use.x[mask] for (use,), mask in zip(uses[name], masks, strict=True)])
            grams, total = grams + X.T @ X / len(X), total + X.T @ X / len(X) @ state[name]
        assert near(merged[name], torch.linalg.solve(grams, total), 1e-7), name
