"""Adam's moments as curvature: compared with means of recorded gradients, under the right names, or refused."""

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import SGD, Adafactor, Adam, AdamW, RMSprop
from torch.testing._internal.distributed.fake_pg import FakeStore

from epimer.curvature.optimizer_state import moments
from epimer.errors import CheckpointError, CurvatureError, EpimerError, ParameterError

SETTLE = "give names=, one name per parameter in the optimiser's order."
BETAS = (0.8, 0.95)


class Net(nn.Module):
    """Parameters of every kind: weight decay leaves out norms, by type or name, and biases, even a matrix of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.bias_table = nn.Parameter(torch.rand(7)), nn.Parameter(torch.rand(2, 3))
        self.one, self.ln, self.two, self.post_norm = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3), nn.RMSNorm(3)
        self.double()

    def forward(self, x):
        return self.post_norm(self.two(self.ln(self.one(x)).tanh() * self.scale)) * self.bias_table.sum(0)


class Tied(nn.Module):
    """An embedding that is its own output layer, and a part that the loss does not use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.unused, self.mix = nn.Embedding(6, 4), nn.Linear(4, 2), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, x):
        return self.head(self.mix(self.embed(x.abs().long() % 6)))


class Alike(nn.Module):
    """Parameters of one shape, which several orders fit."""

    def __init__(self):
        super().__init__()
        self.scale, self.bias, self.gain = (nn.Parameter(torch.full((5,), x).double()) for x in (1.5, 2.5, 3.5))

    def forward(self, x):
        return (x * self.scale + self.bias) * self.gain


def train(model, optimiser, steps=4):
    """Train, and return the gradients of each step by name."""
    generator = torch.Generator().manual_seed(1)
    gradients = []
    for _ in range(steps):
        optimiser.zero_grad()
        model(torch.randn(8, 5, generator=generator, dtype=torch.float64)).square().mean().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimiser.step()
    return gradients


def by_hand(gradients, moment="second", betas=BETAS):
    """Return the curvature by its meaning: a mean over the steps in which each weighs beta times the next."""
    power, beta = (2, betas[1]) if moment == "second" else (1, betas[0])
    weights = [beta ** (len(gradients) - 1 - t) for t in range(len(gradients))]
    found = {}
    for name in gradients[0]:
        mean = sum(w * g[name] ** power for w, g in zip(weights, gradients, strict=True)) / sum(weights)
        found[name] = mean if moment == "second" else mean**2
    return found


def check(found, expected):
    assert list(found) == list(expected)
    for name, metric in found.items():
        assert metric.kind == "diagonal"
        assert not metric.F.requires_grad
        rounding = 1e-13 * float(expected[name].max())  # gradients of several steps may cancel in their mean
        torch.testing.assert_close(metric.F, expected[name], rtol=1e-12, atol=rounding)


@pytest.fixture
def save(tmp_path):
    def write(content, name="optimizer.pt", **how):
        content = content.state_dict() if isinstance(content, torch.optim.Optimizer) else content
        torch.save(content, tmp_path / name, **how)
        return tmp_path / name

    return write


@pytest.fixture(scope="module")
def once():
    model = Net()
    optimiser = AdamW(model.parameters(), betas=BETAS)
    return model, train(model, optimiser), optimiser.state_dict()


@pytest.fixture
def trained(once):
    """A model, its gradients by step, and the state of the AdamW that was given its parameters in order."""
    model, gradients, state = once
    return model, gradients, copy.deepcopy(state)


# the numbers


@pytest.mark.parametrize("moment", ["first", "second"])
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (Adam, {}),
        (AdamW, {"weight_decay": 0.1}),
        (Adam, {"amsgrad": True}),
        (AdamW, {"foreach": True}),
        (AdamW, {"fused": True}),
        (Adam, {"betas": (0.0, 0.999)}),
    ],
    ids=["Adam", "AdamW", "amsgrad", "foreach", "fused", "no mean of gradients"],
)
def test_the_moments_are_means_of_the_gradients(save, kind, how, moment):
    model = Net()
    optimiser = kind(model.parameters(), **{"lr": 0.05, "betas": BETAS} | how)
    gradients = train(model, optimiser)
    found = moments(save(optimiser), model, moment=moment)
    check(found, by_hand(gradients, moment, how.get("betas", BETAS)))
    assert list(found) == [name for name, _ in model.named_parameters()]


def test_one_step_is_that_gradient_squared(save):
    model = Net()
    optimiser = Adam(model.parameters())
    (gradient,) = train(model, optimiser, steps=1)
    for moment in ("first", "second"):
        check(moments(save(optimiser), model, moment=moment), {name: g.square() for name, g in gradient.items()})


@pytest.mark.parametrize("step", [4, 4.0, torch.tensor(4), torch.tensor([4.0])], ids=repr)
def test_steps_of_every_kind(save, trained, step):
    model, gradients, state = trained
    for entry in state["state"].values():
        entry["step"] = step
    check(moments(save(state), model), by_hand(gradients))


def test_each_group_has_its_betas_and_may_count_the_steps(save):
    model = Net()
    every = [p for name, p in model.named_parameters() if not name.startswith("two")]
    optimiser = AdamW([*named(model, every), {"params": list(model.two.named_parameters("two")), "betas": (0.5, 0.7)}])
    gradients = train(model, optimiser)
    expected = by_hand(gradients, betas=(0.9, 0.999))
    expected |= {n: F for n, F in by_hand(gradients, betas=(0.5, 0.7)).items() if n.startswith("two")}
    check(moments(save(optimiser), model), expected)
    state = optimiser.state_dict()
    for entry in state["state"].values():
        del entry["step"]
    for group in state["param_groups"]:  # as apex does
        group["step"] = 4
    check(moments(save(state), model), expected)


def named(model, parameters):
    """Return a group of named parameters."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [{"params": [(names[id(p)], p) for p in parameters]}]


@pytest.mark.parametrize("moment", ["first", "second"])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_narrow_states_are_widened_before_anything_is_computed(save, trained, stored, moment):
    model, _, state = trained
    expected = {}
    for (name, _), entry in zip(model.named_parameters(), state["state"].values(), strict=True):
        m, v = (entry[key].to(stored) for key in ("exp_avg", "exp_avg_sq"))
        entry["exp_avg"], entry["exp_avg_sq"] = m, v
        expected[name] = v.double() / (1 - 0.95**4) if moment == "second" else (m.double() / (1 - 0.8**4)) ** 2
    for name, metric in moments(save(state), model, moment=moment).items():
        assert metric.F.dtype == (torch.float64 if stored == torch.float64 else torch.float32)
        torch.testing.assert_close(metric.F.double(), expected[name], rtol=4e-7, atol=0)


def test_the_file_is_not_needed_afterwards(save, trained):
    model, gradients, state = trained
    path = save(state)
    found = moments(path, model)
    path.write_bytes(bytes(path.stat().st_size))
    check(found, by_hand(gradients))


# the names


def split(model, first):
    """Return two groups: the parameters with the names in `first`, and the others."""
    return [{"params": [p for n, p in model.named_parameters() if (n in first) == ahead]} for ahead in (True, False)]


ORDERS = {
    "in order": lambda model: model.parameters(),
    "in order, in two parts": lambda model: [{"params": list(model.parameters())[a:b]} for a, b in ((0, 5), (5, 9))],
    "an empty group": lambda model: [{"params": list(model.parameters())}, {"params": []}],
    "the Trainer's": lambda model: split(model, ["scale", "one.weight", "two.weight"]),
    "nanoGPT's": lambda model: split(model, ["bias_table", "one.weight", "two.weight"]),
    "reversed, with names": lambda model: reversed(list(model.named_parameters())),
    "groups with names": lambda model: [
        {"params": list(part.named_parameters(prefix))} for prefix, part in reversed(list(model.named_children()))
    ],
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_usual_orders_are_recognised(save, order):
    model = Net()
    optimiser = AdamW(ORDERS[order](model), betas=BETAS)
    gradients = train(model, optimiser)
    held = {id(p) for group in optimiser.param_groups for p in group["params"]}
    expected = by_hand([{n: g[n] for n, p in model.named_parameters() if id(p) in held} for g in gradients])
    assert len(expected) == (9 if order != "groups with names" else 7)
    check(moments(save(optimiser), model), expected)
    check(moments(save(optimiser), Net().to("meta")), expected)


def test_other_orders_need_names(save):
    model = Net()
    names = [name for name, _ in model.named_parameters()][::-1]
    optimiser = AdamW(list(model.parameters())[::-1], betas=BETAS)
    gradients = train(model, optimiser)
    with pytest.raises(CurvatureError) as caught:
        moments(save(optimiser), model)
    assert str(caught.value).endswith(
        "optimizer.pt does not fit the model: in the model's order 'scale' has shape (7,), but the state of parameter "
        "0 has (3,), and no usual split into two groups fits; give the model that was trained, or " + SETTLE
    )
    check(moments(save(optimiser), model, names=names), by_hand(gradients))


def test_names_that_are_given_come_before_those_in_the_file(save):
    model = Alike()
    optimiser = AdamW(model.named_parameters(), betas=BETAS)
    expected = by_hand(train(model, optimiser))
    check(moments(save(optimiser), model), expected)
    turned = moments(save(optimiser), model, names=["gain", "bias", "scale"])
    check(turned, {"scale": expected["gain"], "bias": expected["bias"], "gain": expected["scale"]})


def test_names_as_keys(save, trained):
    """As FSDP and torch.distributed write the whole state."""
    model, gradients, state = trained
    names = [name for name, _ in model.named_parameters()]
    state["state"] = {names[key]: entry for key, entry in reversed(state["state"].items())}
    state["param_groups"][0]["params"] = names[::-1]
    check(moments(save(state), model), by_hand(gradients))


def test_two_orders_that_fit_need_names(save):
    model = Alike()
    optimiser = AdamW(split(model, ["scale", "gain"]), betas=BETAS)
    gradients = train(model, optimiser)
    with pytest.raises(CurvatureError) as caught:
        moments(save(optimiser), model)
    assert str(caught.value).endswith(
        "optimizer.pt fits the model in two ways: parameter 1 is 'bias' with the model's order and 'gain' with "
        "weight decay first; " + SETTLE
    )
    check(moments(save(optimiser), model, names=["scale", "gain", "bias"]), by_hand(gradients))


def test_two_orders_that_say_the_same_of_what_was_stepped_are_one(save):
    model = Alike()
    optimiser = AdamW(split(model, ["scale", "gain"]), betas=BETAS)
    gradients = train(model, optimiser)
    state = optimiser.state_dict()
    del state["state"][1], state["state"][2]
    check(moments(save(state), model), {"scale": by_hand(gradients)["scale"]})


@pytest.mark.parametrize("given", ["trained", "all"])
@pytest.mark.parametrize("order", ["in order", "the Trainer's"])
def test_frozen_parameters_are_left_out(save, given, order):
    model = Net()
    model.one.requires_grad_(False)
    groups = list(ORDERS[order](model))
    if given == "trained" and order == "in order":
        groups = [p for p in groups if p.requires_grad]
    elif given == "trained":
        groups = [{"params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    optimiser = AdamW(groups, betas=BETAS)
    gradients = train(model, optimiser)
    assert len(gradients[0]) == 7
    check(moments(save(optimiser), model), by_hand(gradients))


def test_a_model_that_forgot_what_was_frozen_is_told_so(save):
    model = Net()
    model.one.requires_grad_(False)
    optimiser = AdamW(p for p in model.parameters() if p.requires_grad)
    train(model, optimiser)
    with pytest.raises(CurvatureError, match=r"it has 7 parameters, the model 9 \(9 of them require a gradient\)"):
        moments(save(optimiser), Net())


@pytest.mark.parametrize("names", [None, ["embed.weight"], ["head.weight"]], ids=["found", "given", "given, the twin"])
def test_tied_weights_are_one_and_unused_ones_are_left_out(save, names):
    model = Tied()
    optimiser = AdamW(model.parameters(), betas=BETAS)
    gradients = train(model, optimiser)
    rest = ["unused.weight", "unused.bias", "mix.weight", "mix.bias"]
    found = moments(save(optimiser), model, names=names and names + rest)
    check(found, by_hand(gradients))
    assert list(found) == ["embed.weight", "mix.weight", "mix.bias"]


def test_a_parameter_at_step_0_is_left_out(save, trained):
    model, gradients, state = trained
    state["state"][0]["step"] = torch.tensor(0.0)
    check(moments(save(state), model), {n: F for n, F in by_hand(gradients).items() if n != "scale"})
    for entry in state["state"].values():
        entry["step"] = 0
    with pytest.raises(CurvatureError, match="has taken no step yet"):
        moments(save(state), model)


# where the state lies


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"model": {"w": torch.ones(2)}, "optimizer": state, "epoch": 3},
        lambda state: {"model_state_dict": {}, "optimizer_state_dict": state, "loss": 0.5},
        lambda state: {"state_dict": {}, "optimizer_states": [state], "lr_schedulers": []},
    ],
    ids=["nanoGPT", "PyTorch tutorial", "Lightning"],
)
def test_a_checkpoint_that_holds_the_state(save, trained, wrap):
    model, gradients, state = trained
    check(moments(save(wrap(state), "last.ckpt"), model), by_hand(gradients))


@pytest.mark.parametrize("name", ["optimizer.pt", "optimizer.bin"])
def test_a_checkpoint_folder(save, trained, tmp_path, name):
    model, gradients, state = trained
    save(state, name)
    check(moments(tmp_path, model), by_hand(gradients))
    check(moments(str(tmp_path), model), by_hand(gradients))


def test_an_old_torch_file(save, trained):
    model, gradients, state = trained
    check(moments(save(state, _use_new_zipfile_serialization=False), model), by_hand(gradients))


# refusals


def refused(path, kind=CheckpointError, model=None, **how):
    """Return why a file is refused; a refusal is one line that names it."""
    with pytest.raises(EpimerError) as caught:
        moments(path, model or Net(), **how)
    assert type(caught.value) is kind
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "how", "words"),
    [
        (SGD, {}, r"has no state (its settings are 'lr', 'momentum', 'dampening' and "),
        (
            SGD,
            {"momentum": 0.9},
            "is the state of SGD or Muon: parameter 0 has 'momentum_buffer', expected exp_avg and",
        ),
        (RMSprop, {}, "is the state of another optimiser: parameter 0 has 'step', 'square_avg', expected exp_avg and"),
        (Adafactor, {}, "is the state of another optimiser: parameter 0 has 'step', 'variance', expected exp_avg and"),
    ],
    ids=["SGD", "momentum", "RMSprop", "Adafactor"],
)
def test_other_optimisers_are_refused(save, kind, how, words):
    model = Net()
    optimiser = kind(model.parameters(), lr=0.01, **how)
    train(model, optimiser)
    assert words in refused(save(optimiser), CurvatureError)


FACTORED = {"step": 4, "exp_avg_sq_row": torch.ones(5), "exp_avg_sq_col": torch.ones(7), "RMS": 1.0}
BLOCKS = {
    "step": 4,
    "state1": torch.ones(7, 5, dtype=torch.uint8),
    "state2": torch.ones(7, 5, dtype=torch.uint8),
    "absmax2": torch.ones(1),
}
PACKED = {"step": 4, "__bnb_optimizer_quant_state__": {"state2": torch.ones(7, dtype=torch.uint8)}}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (FACTORED, "is the state of Adafactor: parameter 2 has 'step', 'exp_avg_sq_row', 'exp_avg_sq_col' and 1 more"),
        (
            BLOCKS,
            "is the state of an 8-bit optimiser (bitsandbytes): parameter 2 has 'step', 'state1', 'state2' and 1 ",
        ),
        (PACKED, "is the state of an 8-bit optimiser (bitsandbytes): parameter 2 has 'step', '__bnb_optimizer_quant"),
        ({"momentum_buffer": torch.ones(7, 5)}, "is the state of SGD or Muon: parameter 2 has 'momentum_buffer', expe"),
    ],
    ids=["Adafactor", "8-bit", "8-bit, packed", "Muon"],
)
def test_one_foreign_entry_is_enough(save, trained, entry, words):
    """These keep whole moments of small parameters, so that the others look like Adam's."""
    _, _, state = trained
    state["state"][2] = entry
    message = refused(save(state), CurvatureError)
    assert words in message
    assert message.endswith("(Adam or AdamW); measure curvature on data.")


def test_an_optimiser_that_never_stepped_is_refused(save):
    assert "has no state (it never stepped)" in refused(save(AdamW(Net().parameters())), CurvatureError)


GATHER = "gather it where it was trained (FSDP: state dict type FULL_STATE_DICT), or measure curvature on data."


@pytest.mark.parametrize(
    "name",
    [
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "mp_rank_00_model_states.pt",
        "rank0-of-2-optimizer.pt",
        "optimizer_0_rank1.bin",
        "__0_0.distcp",
    ],
)
def test_a_shard_is_known_by_its_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"whatever")
    assert refused(tmp_path / name).endswith("is part of a sharded optimiser's state; " + GATHER)
    assert f"holds a sharded optimiser's state ('{name}'); {GATHER}" in refused(tmp_path)


@pytest.mark.parametrize("name", ["optimizer_0", "global_step100"])
def test_a_folder_of_shards_is_known_by_its_name(tmp_path, name):
    (tmp_path / name).mkdir()
    assert GATHER in refused(tmp_path / name)
    assert f"('{name}')" in refused(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        {"optimizer_state_dict": {"zero_stage": 2, "base_optimizer_state": []}, "ds_version": "0.16"},
        {"optimizer_state_dict": {"zero_stage": 2, "param_groups": []}},
        {"optimizer": {"state": {}, "param_groups": []}, "shard_metadata": {}},
    ],
    ids=["DeepSpeed", "DeepSpeed, inside", "XLA"],
)
def test_a_shard_is_known_by_its_content(save, content):
    assert refused(save(content)).endswith("is part of a sharded optimiser's state; " + GATHER)


def test_flattened_parameters_are_refused(save, trained):
    _, _, state = trained
    state["param_groups"][0]["param_names"] = [f"_fsdp_wrapped_module.{i}._flat_param" for i in range(9)]
    assert refused(save(state)).endswith("has the state of parameters that FSDP has flattened; " + GATHER)


def test_a_shard_is_known_by_its_tensors(save, trained):
    _, _, state = trained
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        state["state"][0]["exp_avg_sq"] = distribute_tensor(state["state"][0]["exp_avg_sq"], mesh, [Shard(0)])
        path = save(state)
    finally:
        dist.destroy_process_group()
    assert refused(path).endswith("parameter 0 has exp_avg_sq as a DTensor, expected a plain tensor; " + GATHER)


def test_what_is_not_there_is_refused(tmp_path):
    assert "cannot be read: No such file" in refused(tmp_path / "optimizer.pt")
    assert "holds no optimizer.pt; expected a Trainer's checkpoint folder" in refused(tmp_path)
    (tmp_path / "checkpoint-20").mkdir()
    assert refused(tmp_path).endswith("is a whole run, expected one checkpoint of it; give one of 'checkpoint-20'.")
    os.mkfifo(tmp_path / "pipe.pt")
    assert "is not a regular file" in refused(tmp_path / "pipe.pt")


def test_a_link_out_of_the_folder_is_refused(save, trained, tmp_path):
    save(trained[2], "elsewhere.pt")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "optimizer.pt").symlink_to(tmp_path / "elsewhere.pt")
    assert "leads out of the folder" in refused(tmp_path / "checkpoint")


def test_damaged_files_are_refused(save, trained):
    path = save(trained[2])
    whole = path.read_bytes()
    for end in (0, 1, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert "cut short" in refused(path) if end > 1 else refused(path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123\n")
    assert "is a Git LFS pointer" in refused(path)


class Marks:
    """When unpickled, makes a folder: what a hostile checkpoint would do."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_code_in_the_file_is_not_executed(save, trained, tmp_path, new):
    _, _, state = trained
    state["param_groups"][0]["lr"] = Marks(tmp_path / "marker")
    path = save(state, _use_new_zipfile_serialization=new)
    message = refused(path)
    assert "would have to be executed to be read, which epimer never does" in message
    assert message.endswith("torch.save(optimizer.state_dict(), path).")
    assert not (tmp_path / "marker").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "marker").is_dir()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"w": torch.ones(2), "b": torch.ones(1)}, "holds no optimiser's state but 'w', 'b'; expected optimizer.state"),
        (torch.ones(2), "holds no optimiser's state but a Tensor"),
        ({}, "holds no optimiser's state but a dict"),
        ({"optimizer_states": []}, "holds the state of 0 optimisers; save one on its own"),
        ({"optimizer_states": [{}, {}]}, "holds the state of 2 optimisers; save one on its own"),
        ({"param_groups": []}, "is not a whole optimizer.state_dict(): expected 'state' and 'param_groups'"),
        ({"state": {}, "param_groups": [{"lr": 1}]}, "has a group without numbered 'params'"),
        ({"state": {}, "param_groups": [{"params": [[0]]}]}, "has a group without numbered 'params'"),
        ({"state": {}, "param_groups": [{"params": [0, 1, 0]}]}, "has a parameter in two places"),
        ({"state": {7: {}}, "param_groups": [{"params": [0, 1]}]}, "has state that is no parameter's: '7'"),
        ({"state": {0: torch.ones(2)}, "param_groups": [{"params": [0]}]}, "parameter 0 has a Tensor as state"),
    ],
)
def test_what_is_no_optimiser_state_is_refused(save, content, words):
    assert words in refused(save(content))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"exp_avg_sq": torch.full((7,), torch.nan)},
            "'scale' has a second moment that is no curvature: F holds NaN or",
        ),
        (
            {"exp_avg_sq": torch.full((7,), -1.0)},
            "'scale' has a second moment that is no curvature: F must not be nega",
        ),
        (
            {"exp_avg_sq": torch.ones(7, dtype=torch.uint8)},
            "parameter 0 has exp_avg_sq of type torch.uint8, expected a",
        ),
        ({"exp_avg_sq": torch.ones(7, dtype=torch.cfloat)}, "parameter 0 has exp_avg_sq of type torch.complex64, expe"),
        ({"exp_avg_sq": None}, "parameter 0 has exp_avg_sq of type NoneType, expected a floating-point tensor"),
        ({"step": None}, "'scale' has no count of steps that can be used"),
        ({"step": torch.ones(7)}, "'scale' has no count of steps that can be used"),
        ({"step": -1}, "'scale' has no count of steps that can be used"),
        ({"step": 10**400}, "'scale' has no count of steps that can be used"),
        ({"step": float("nan")}, "'scale' has no count of steps that can be used"),
    ],
)
def test_state_that_is_no_curvature_is_refused(save, trained, change, words):
    _, _, state = trained
    state["state"][0] |= change
    assert words in refused(save(state), CurvatureError)


def test_a_first_moment_that_overflows_is_refused(save, trained):
    _, _, state = trained
    state["state"][0]["exp_avg"] = torch.full((7,), 1e30)
    moments(save(state), Net())
    assert "'scale' has a first moment that is no curvature" in refused(save(state), CurvatureError, moment="first")


@pytest.mark.parametrize("stored", ["sparse", "huge", "meta"])
def test_tensors_that_are_not_plain_are_refused(save, trained, stored):
    _, _, state = trained
    moment = {
        "sparse": torch.ones(7).to_sparse(),
        "huge": torch.ones(1).expand(2**40),
        "meta": torch.ones(7).to("meta"),
    }
    state["state"][0]["exp_avg_sq"] = moment[stored]
    assert "parameter 0 has exp_avg_sq that " in refused(save(state))


@pytest.mark.parametrize(
    "betas", [None, (0.9,), (0.9, 0.99, 0.999), (0.9, 1.0), (-0.1, 0.9), ("a", "b"), 0.9], ids=repr
)
def test_betas_that_are_none_are_refused(save, trained, betas):
    _, _, state = trained
    state["param_groups"][0]["betas"] = betas
    assert "expected two numbers in [0, 1): Adam or AdamW" in refused(save(state), CurvatureError)


def test_names_in_the_file_that_do_not_fit_are_refused(save, trained):
    model, _, state = trained
    names = [name for name, _ in model.named_parameters()]

    def told(given, kind=CurvatureError):
        state["param_groups"][0]["param_names"] = given
        return refused(save(state), kind)

    renamed = told(["one.wait" if name == "one.weight" else name for name in names])
    assert "has 'one.wait', which is no parameter of the model; " + SETTLE + " Did you mean 'one.weight'?" in renamed
    assert "'bias_table' has shape (2, 3), but the state of parameter 0 has (7,); " + SETTLE in told(
        ["bias_table", "scale", *names[2:]]
    )
    assert "has 'scale' twice" in told(["scale", "scale", *names[2:]])
    assert "param_names are not one per parameter" in told(names[1:], CheckpointError)


def test_names_that_are_given_and_do_not_fit_are_refused(save, trained):
    model, _, state = trained
    names, path = [name for name, _ in model.named_parameters()], save(state)

    def told(given):
        with pytest.raises(ParameterError) as caught:
            moments(path, model, names=given)
        return str(caught.value)

    assert told(names[:2]) == f"names has 2 entries for the 9 parameters in {path}; {SETTLE}"
    assert told("scale") == "The 'names' parameter must be a list of names. Got 'scale' instead."
    assert told([1, 2]) == "The 'names' parameter must be a list of names. Got [1, 2] instead."
    assert told([*names[:8], "gain"]) == "names has 'gain', which is no parameter of the model; correct it."
    assert told([*names[:8], "scale"]) == "names has 'scale' twice (tied parameters are one); correct it."
    misfit = "'post_norm.weight' has shape (3,), but the state of parameter 0 has (7,)"
    assert told(names[::-1]) == f"{path} does not fit names: {misfit}; correct it."


def test_another_moment_is_refused(save, trained):
    with pytest.raises(ParameterError, match=r"The 'moment' parameter must be first or second\. Got 'third' inst"):
        moments(save(trained[2]), Net(), moment="third")


ODD = [None, 0, -1, True, "x", b"x", 1j, [], {}, [0], {0: 0}, {"params": 1}, float("inf"), torch.ones(2), torch.ones(0)]


@pytest.mark.slow
def test_whatever_stands_in_the_file_the_refusal_is_ours(save, trained):
    """Each entry of the nested state dict in turn is replaced by odd values: read, or refused in one line."""
    model, _, state = trained
    small = {"state": {0: state["state"][0], 1: state["state"][1]}, "param_groups": [state["param_groups"][0]]}
    small["param_groups"][0] |= {"params": [0, 1], "param_names": ["scale", "bias_table"]}
    refusals, read = [], 0
    for place in ((), *paths(small)):
        for value in ODD:
            try:
                found = moments(path := save(replaced(small, place, value)), model)
            except EpimerError as error:
                refusals.append(str(error))
            else:
                read += 1
                assert set(found) <= {"scale", "bias_table"}
                assert all(metric.F.isfinite().all() for metric in found.values())
    assert all(str(path) in refusal and "\n" not in refusal for refusal in refusals)
    assert len(refusals) > 150
    assert read > 150


def replaced(content, place, value):
    """Return nested dicts and lists with the entry at `place` replaced."""
    if not place:
        return value
    content = copy.copy(content)
    content[place[0]] = replaced(content[place[0]], place[1:], value)
    return content


def paths(content):
    """Yield the way to every entry of nested dicts and lists."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in entries:
        yield (key,)
        yield from ((key, *rest) for rest in paths(value))
