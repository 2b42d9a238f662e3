"""Experts that are stored as one tensor are E matrices: their merge is that of E tensors, for every matrix method."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from commands import run
from epimer.geometry.metric import Diagonal, Kronecker
from epimer.methods.registry import describe_method, list_methods
from epimer.plan.jobs import plan_jobs
from epimer.plan.participants import state_dict_participants

E, H, F, T = 3, 12, 8, 2
ROOT = "model.layers.0.mlp.experts"
STACKS = ("gate_up_proj", "down_proj")
VECTORS = {f"{ROOT}.gate_up_proj_bias": (E, 2 * F), f"{ROOT}.down_proj_bias": (E, H)}


def shapes(inputs: int) -> dict[str, tuple[int, int]]:
    """Return the shape of an expert's matrices: outputs x inputs, or inputs x outputs as gpt-oss has them."""
    linear = {"gate_up_proj": (2 * F, H), "down_proj": (H, F)}
    return {name: shape if inputs else shape[::-1] for name, shape in linear.items()}


def fused(seed: int, inputs: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    every = {f"{ROOT}.{name}": (E, *shape) for name, shape in shapes(inputs).items()} | VECTORS
    every |= {"conv.weight": (4, 6, 3), "q_proj.weight": (H, H)}
    return {name: torch.randn(*shape, dtype=torch.float64, generator=generator) for name, shape in every.items()}


def apart(state: dict[str, torch.Tensor], inputs: int) -> dict[str, torch.Tensor]:
    """Return the same model with a tensor of its own for each expert's matrix, outputs x inputs."""
    parts = {name: W for name, W in state.items() if name.rpartition(".")[2] not in STACKS}
    for own in STACKS:
        for e, W in enumerate(state[f"{ROOT}.{own}"]):
            parts[f"{ROOT}.{e}.{own}.weight"] = (W if inputs else W.T).contiguous()
    return parts


def joined(state: dict[str, torch.Tensor], inputs: int) -> dict[str, torch.Tensor]:
    """Return a model with a tensor for each expert's matrix as `fused` has it."""
    whole = {name: W for name, W in state.items() if not name.endswith(tuple(f".{own}.weight" for own in STACKS))}
    for own in STACKS:
        parts = [state[f"{ROOT}.{e}.{own}.weight"] for e in range(E)]
        whole[f"{ROOT}.{own}"] = torch.stack([W if inputs else W.T for W in parts])
    return whole


def curvature_of(kind: str, inputs: int, t: int) -> tuple[dict, dict]:
    """Return curvature of the experts stored as one, and the same of the experts apart."""
    generator = torch.Generator().manual_seed(100 + t)

    def factor(n: int) -> torch.Tensor:
        X = torch.randn(2 * n, n, dtype=torch.float64, generator=generator)
        return X.T @ X / n

    one, other = {}, {}
    for own, (m, n) in shapes(1).items():
        for e in range(E):
            if kind == "diagonal":
                D = torch.rand(m, n, dtype=torch.float64, generator=generator)
                metric, turned = Diagonal(D), Diagonal(D.T.contiguous())
            else:
                A, G = factor(n), factor(m)
                metric, turned = Kronecker(A=A, G=G), Kronecker(A=G, G=A, inputs=0)
            one[f"{ROOT}.{own}[{e}]"] = metric if inputs else turned
            other[f"{ROOT}.{e}.{own}.weight"] = metric
    A, G = factor(H), factor(H)
    q = {"q_proj.weight": Diagonal(A.abs()) if kind == "diagonal" else Kronecker(A=A, G=G)}
    return one | q, other | q


MATRIX_METHODS = [name for name in list_methods() if not describe_method(name).elementwise]


@pytest.mark.parametrize("inputs", [0, 1])
@pytest.mark.parametrize("method", dict.fromkeys([*MATRIX_METHODS, "fisher", "gradient_matching", "ties", "average"]))
def test_a_stack_is_merged_as_its_matrices_are(method, inputs):
    row = describe_method(method)
    if row.needs_function or row.curvature == "samples":
        pytest.skip("needs what is not a factor")
    base, *models = (fused(seed, inputs) for seed in range(T + 1))
    more, other = {}, {}
    if row.needs_curvature:
        pairs = [curvature_of(row.curvature, inputs, t) for t in range(T)]
        more, other = {"curvature": [one for one, _ in pairs]}, {"curvature": [one for _, one in pairs]}
    if method == "gradient_matching":
        one, two = curvature_of("diagonal", inputs, 9)
        more, other = more | {"base_curvature": one}, other | {"base_curvature": two}
    merged = epimer.merge_state_dicts(base, models, method, **more)
    expected = joined(
        epimer.merge_state_dicts(apart(base, inputs), [apart(model, inputs) for model in models], method, **other),
        inputs,
    )
    assert merged.keys() == expected.keys() == base.keys()
    for name, W in expected.items():
        assert merged[name].shape == base[name].shape
        torch.testing.assert_close(merged[name], W, rtol=1e-8, atol=1e-8)
    record = merged.record.tensors[f"{ROOT}.gate_up_proj"]
    assert record.shape == tuple(base[f"{ROOT}.gate_up_proj"].shape)
    assert record.rule == ("elementwise" if row.elementwise else "matrix")
    if not row.elementwise:  # a bias of each expert is no matrix, and a convolution none that is asked for
        assert {merged.record.tensors[name].rule for name in (*VECTORS, "conv.weight")} == {"average"}


@pytest.fixture
def folders(tmp_path):
    for i, name in enumerate(("base", "one", "two")):
        (tmp_path / name).mkdir()
        save_file({k: W.float() for k, W in fused(i, 0).items()}, tmp_path / name / "model.safetensors")
    return tmp_path


def recipe(folder, method: str, **more):
    models = [{"model": str(folder / name)} for name in ("one", "two")]
    text = {"merge_method": method, "base_model": str(folder / "base"), "models": models, **more}
    (folder / "recipe.yaml").write_text(json.dumps(text))
    return folder / "recipe.yaml"


def test_the_tensor_stays_one_in_the_file(folders):
    assert run("merge", recipe(folders, "tsv"), folders / "out", "--quiet").code == 0
    merged = load_file(folders / "out" / "model.safetensors")
    base, *models = (apart({k: W.float() for k, W in fused(i, 0).items()}, 0) for i in range(3))
    expected = joined(epimer.merge_state_dicts(base, models, "tsv"), 0)
    assert merged.keys() == expected.keys()
    for name, W in expected.items():
        torch.testing.assert_close(merged[name], W, rtol=1e-4, atol=1e-5)


def test_the_plan_has_the_memory_and_the_work_of_the_matrices():
    """A stack takes the memory of one expert, and E times its time."""
    generator = torch.Generator().manual_seed(0)
    states = [{"mlp.experts.up_proj": torch.randn(4, 96, 64, generator=generator)} for _ in range(3)]
    separate = [
        {f"mlp.experts.{e}.up_proj.weight": W for e, W in enumerate(one["mlp.experts.up_proj"])} for one in states
    ]
    whole, parts = (api_plan(one, "epimer_free") for one in (states, separate))
    assert [part.memory for part in whole.parts] == [part.memory for part in parts.parts]
    assert whole.memory == parts.memory
    assert whole.jobs[0].work["leading"] + whole.jobs[0].work["bytes"] > 0
    for kernel, units in whole.jobs[0].work.items():
        assert units == pytest.approx(sum(job.work[kernel] for job in parts.jobs))
        assert units == pytest.approx(sum(part.work[kernel] for part in whole.parts))
    assert (whole.reads, whole.writes) == (parts.reads, parts.writes)


def api_plan(states, method):
    row = describe_method(method)
    participants = state_dict_participants(states[0], states[1:])
    return plan_jobs(participants, row, lambda name, depth: (row.resolve({}), [0.5, 0.5]), [], None)


def test_bases_and_diagnoses_are_of_each_matrix(folders):
    base, *models = (fused(i, 0) for i in range(3))
    basis = epimer.build_basis(base, models, rank=2)
    assert {f"{ROOT}.{own}[{e}]" for own in STACKS for e in range(E)} <= basis.keys()
    U = basis[f"{ROOT}.down_proj[1]"].U
    D = [model[f"{ROOT}.down_proj"][1] - base[f"{ROOT}.down_proj"][1] for model in models]
    stacked = torch.cat([torch.linalg.svd(one).U[:, :2] for one in D], 1)
    P = stacked @ torch.linalg.pinv(stacked)
    torch.testing.assert_close(U @ U.T, P, rtol=1e-8, atol=1e-8)
    fixed = epimer.merge_state_dicts(base, models, "epimer_free", basis=basis)
    free = epimer.merge_state_dicts(base, models, "epimer_free", rank=2, basis="tagged")
    torch.testing.assert_close(fixed[f"{ROOT}.down_proj"], free[f"{ROOT}.down_proj"], rtol=1e-7, atol=1e-7)
    found = epimer.diagnose_state_dicts(base, models)
    assert f"{ROOT}.gate_up_proj[2]" in found.layers
    assert f"{ROOT}.gate_up_proj" not in found.layers
