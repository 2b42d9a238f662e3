"""Merges at the edges of arithmetic: whatever finite numbers come in, finite ones come out or one line that names them.

Task vectors and curvature near overflow and underflow, with entries, columns or spectra spread over the whole range of
their precision, with repeated and clustered singular values, of low rank and zero, for every method, basis and metric.
"""

import json
import random
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch

import epimer
from commands import assert_refused, run
from epimer.geometry.metric import EKFAC, Diagonal, Kronecker, Samples
from epimer.methods.registry import describe_method, list_methods
from epimer.testing import relative_difference, usual_count
from models import make_curvature

TOP = {torch.float32: 37.0, torch.float64: 300.0}  # power of 10 that nearly overflows
SHAPES = ((24, 16), (40, 12), (9, 31))
KINDS = ("huge", "near overflow", "tiny", "denormal", "mixed", "graded", "repeated", "clustered", "rank 1", "zero",
         "hilbert", "spread")  # fmt: skip
METRICS = {"epimer": "diagonal", "epimer_kron": "kronecker", "epimer_full": "ekfac", "epimer_exact": "samples",
           "epimer_free": "task-gram"}  # fmt: skip
WHOLE = [name for name in list_methods() if not describe_method(name).needs_function]


def matrix(kind: str, m: int, n: int, generator: torch.Generator, top: float) -> torch.Tensor:
    """Return an ill-conditioned matrix in float64, its entries within 10^±top, or below for denormal ones."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def powers(*exponents: float) -> torch.Tensor:
        return 10.0 ** torch.linspace(*exponents, dtype=torch.float64)

    k = min(m, n)
    Q, P = torch.linalg.qr(draw(m, k)).Q, torch.linalg.qr(draw(n, k)).Q
    match kind:
        case "huge":
            return draw(m, n) * 10.0 ** (top / 2)
        case "near overflow":
            return draw(m, n).clamp(-3, 3) * 10.0 ** (top - 1.2)
        case "tiny":
            return draw(m, n) * 10.0 ** (-top / 2)
        case "denormal":
            return draw(m, n) * 10.0 ** (-top - 4)
        case "mixed":
            exponents = 2 * torch.rand(m, n, generator=generator, dtype=torch.float64) - 1
            return draw(m, n) * 10.0 ** (exponents * (top - 1))
        case "graded":
            return draw(m, n) * powers(2 - top, top - 2, n)
        case "repeated":
            return Q @ P.T
        case "clustered":
            return (Q * (1 + 1e-7 * draw(k))) @ P.T
        case "rank 1":
            return draw(m, 1) @ draw(1, n) * 10.0 ** (top / 3)
        case "zero":
            return torch.zeros(m, n, dtype=torch.float64)
        case "hilbert":
            return 1 / (torch.arange(m)[:, None] + torch.arange(n) + 1.0).double()
    return (Q * powers(top - 3, 3 - top, k)) @ P.T


def metric(name: str, kind: str, m: int, n: int, generator: torch.Generator, dtype: torch.dtype):
    """Return curvature whose entries, factors or gradients are ill-conditioned."""
    top = TOP[dtype]

    def gram(size: int) -> torch.Tensor:
        X = matrix(kind, size, size, generator, top / 2)
        return (X.T @ X).to(dtype)

    match name:
        case "diagonal":
            return Diagonal(matrix(kind, m, n, generator, top).abs().to(dtype))
        case "samples":
            g, x = (matrix(kind, 12, size, generator, top / 4).reshape(6, 2, size).to(dtype) for size in (m, n))
            return Samples(g=g, x=x)
        case "ekfac":
            P, Q = (torch.linalg.qr(torch.randn(s, s, generator=generator).double()).Q.to(dtype) for s in (m, n))
            return EKFAC(S=matrix(kind, m, n, generator, top).abs().to(dtype), P=P, Q=Q)
    return Kronecker(G=gram(m), A=gram(n))


def merge(method: str, kinds, curvature: str, metric_name: str | None, seed: int, dtype=torch.float32, **options):
    """Merge task vectors of these kinds; return whether there is a merge, finite, and not one line of refusal."""
    generator, T = torch.Generator().manual_seed(seed), usual_count(describe_method(method))
    m, n = SHAPES[seed % len(SHAPES)]
    base = {"a.weight": torch.zeros(m, n, dtype=dtype), "a.bias": torch.zeros(n, dtype=dtype)}
    models = []
    for kind in (kinds * T)[:T]:
        D = matrix(kind, m, n, generator, TOP[dtype]).to(dtype)
        models.append({"a.weight": D, "a.bias": D[0].clone()})
    if metric_name not in (None, "task-gram"):
        made = [metric(metric_name, curvature, m, n, generator, torch.float32) for _ in models]
        options["curvature"] = [{"a.weight": one} for one in made]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", epimer.EpimerWarning)
            merged = epimer.merge_state_dicts(base, models, method, **options)
    except epimer.EpimerError as error:
        text = str(error)
        assert "\n" not in text
        assert "'a.weight'" in text or "'a.bias'" in text or "zero throughout" in text, text
        return False
    assert all(bool(W.isfinite().all()) for W in merged.values())
    return True


@pytest.mark.parametrize("method", WHOLE)
def test_every_method_merges_or_refuses_in_one_line(method):
    choices, row = random.Random(method), describe_method(method)
    for seed in range(14):
        kinds = [choices.choice(KINDS) for _ in range(choices.choice((1, 3)))]
        curvature, dtype = choices.choice(KINDS), choices.choice((torch.float32, torch.float64))
        merge(method, kinds, curvature, row.curvature if row.needs_curvature else None, seed, dtype)


@pytest.mark.parametrize("method", METRICS)
@pytest.mark.parametrize("basis", ["tagged", "tensor", "full"])
def test_every_basis_and_metric_merges_or_refuses_in_one_line(method, basis):
    choices, merged = random.Random(f"{method} {basis}"), 0
    for seed, (kind, curvature) in enumerate((one, choices.choice(KINDS)) for one in KINDS):
        options = {
            "basis": basis,
            "aggregator": choices.choice(("mean", "sum", "anchored")),
            "normalize": choices.choice(("trace", "common", "none")),
            "damping": choices.choice((0.0, 1e-12, 1.0)),
        }
        merged += merge(method, [kind], curvature, METRICS[method], seed, **options)
    assert merged >= 8  # most is merged, not refused: only what leaves float32 itself has to be


@pytest.mark.parametrize("power", [-100, -60, 60, 100])
@pytest.mark.parametrize("method", ["tsv", "iso_c", "iso_cts", "regmean", "mats", "wudi", *METRICS])
def test_the_size_of_task_vectors_does_not_matter(method, power):
    """A merge is proportional to its task vectors, also where their squares leave float32."""
    generator = torch.Generator().manual_seed(0)
    deltas = [torch.randn(24, 20, generator=generator) for _ in range(3)]
    name, kind = "block.0.weight", describe_method(method).curvature
    base, arguments = {name: torch.zeros(24, 20)}, {}
    if kind not in (None, "task-gram"):
        arguments["curvature"] = make_curvature(base, kind)
    usual = epimer.merge_state_dicts(base, [{name: D} for D in deltas], method, **arguments)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", epimer.EpimerWarning)
        scaled = epimer.merge_state_dicts(base, [{name: D * 2.0**power} for D in deltas], method, **arguments)
    assert relative_difference(scaled[name].double() / 2.0**power, usual) < 1e-5


def test_a_layer_that_overflows_in_float32_is_merged_in_float64_and_the_record_says_so():
    generator = torch.Generator().manual_seed(0)
    base = {"a.weight": torch.zeros(24, 20), "b.weight": torch.zeros(24, 20)}
    deltas = [torch.randn(24, 20, generator=generator) for _ in range(3)]
    models = [{"a.weight": D * 2.0**100, "b.weight": D} for D in deltas]
    factors = [{"block.0.weight": torch.zeros(24, 20)}, "kronecker"]
    curvature = [dict.fromkeys(base, one["block.0.weight"]) for one in make_curvature(*factors)]
    with pytest.warns(epimer.EpimerWarning, match=r"solved in float64: 'a.weight'\. Look at the largest entries"):
        merged = epimer.merge_state_dicts(base, models, "epimer_full", curvature=curvature)
    assert merged.record.tensors["a.weight"].status == "retried"
    assert merged.record.tensors["a.weight"].note == "in float64, as its merge overflowed"
    assert merged.record.tensors["b.weight"].status == "converged"
    assert relative_difference(merged["a.weight"].double() / 2.0**100, merged["b.weight"]) < 1e-5


def test_what_leaves_float64_too_names_the_tensor_and_the_model():
    generator = torch.Generator().manual_seed(0)
    D = torch.randn(12, 10, generator=generator, dtype=torch.float64)
    models = [{"a.weight": D}, {"a.weight": 1e200 * D.flip(0)}]
    with pytest.raises(epimer.TensorError, match=r"'a\.weight': .*reaches 3.*e\+200 in models\[1\]: give it the rule"):
        epimer.merge_state_dicts({"a.weight": torch.zeros_like(D)}, models, "epimer_free")


def save_adapter(folder: Path, B: torch.Tensor, A: torch.Tensor, base: Path) -> None:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": len(A), "lora_alpha": len(A), "target_modules": ["layer"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    factors = {"base_model.model.layer.lora_A.weight": A, "base_model.model.layer.lora_B.weight": B}
    safetensors.torch.save_file(factors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize("output", ["model", "lora"])
@pytest.mark.parametrize("method", ["task_arithmetic", "tsv", "iso_c", "iso_cts", "wudi", "epimer_free"])
def test_adapters_merge_or_are_refused_in_one_line(tmp_path, method, output):
    base, merged = tmp_path / "base", 0
    base.mkdir()
    safetensors.torch.save_file({"layer.weight": torch.zeros(24, 16)}, base / "model.safetensors")
    for seed, kind in enumerate(KINDS):
        generator, texts = torch.Generator().manual_seed(seed), []
        for t in range(3):
            B, A = (matrix(kind, *shape, generator, 18.5).float() for shape in ((24, 4), (4, 16)))
            save_adapter(tmp_path / f"{seed}-{t}", B, A, base)
            texts.append(f"{base}+{tmp_path / f'{seed}-{t}'}")
        recipe = {"merge_method": method, "base_model": str(base), "models": [{"model": text} for text in texts]}
        recipe |= {"output": "lora", "lora_rank": 8} if output == "lora" else {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", epimer.EpimerWarning)
                epimer.merge(recipe, tmp_path / f"out{seed}", progress=False)
        except epimer.EpimerError as error:
            text = str(error)
            assert "'layer.weight'" in text or "empty" in text
            assert "\n" not in text
            continue
        file = "model.safetensors" if output == "model" else "adapter_model.safetensors"
        written = safetensors.torch.load_file(tmp_path / f"out{seed}" / file)
        assert all(bool(W.isfinite().all()) for W in written.values())
        merged += 1
    assert merged >= 7


def test_the_command_line_refuses_with_code_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    D = torch.randn(12, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, W in {"base": torch.zeros_like(D), "one": D, "two": 1e200 * D.flip(0)}.items():
        Path(name).mkdir()
        safetensors.torch.save_file({"a.weight": W}, Path(name) / "model.safetensors")
    recipe = {"merge_method": "epimer_free", "base_model": "base", "models": [{"model": "one"}, {"model": "two"}]}
    Path("recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    ran = run("merge", "recipe.yaml", "out")
    assert_refused(ran, "error: 'a.weight': ", "in models[1]: give it the rule 'average' or 'copy'")
    assert ran.code == 2
    assert not Path("out").exists()


@pytest.mark.parametrize("metric_name", [None, "diagonal", "kronecker", "samples"])
def test_a_diagnosis_and_a_basis_are_made_or_refused_in_one_line(metric_name):
    choices, made = random.Random(str(metric_name)), 0
    for seed, kind in enumerate(KINDS):
        generator = torch.Generator().manual_seed(seed)
        base = {"a.weight": torch.zeros(24, 16)}
        models = [{"a.weight": matrix(kind, 24, 16, generator, 37.0).float()} for _ in range(3)]
        curvature, spread = None, choices.choice(KINDS)
        if metric_name is not None:
            factors = [metric(metric_name, spread, 24, 16, generator, torch.float32) for _ in models]
            curvature = [{"a.weight": one} for one in factors]
        assert epimer.build_basis(base, models).keys() == {"a.weight"}
        try:
            diagnosis = epimer.diagnose_state_dicts(base, models, curvature=curvature)
        except epimer.EpimerError as error:
            text = str(error)
            assert "'a.weight'" in text
            assert "\n" not in text
            continue
        assert set(diagnosis.layers) == {"a.weight"}
        made += 1
    assert made >= 8


@pytest.mark.parametrize("basis", ["tagged", "tensor", "full"])
def test_ill_conditioning_is_told_by_tensor(basis):
    """One of two tensors has singular curvature, and damping does not lift it."""
    generator = torch.Generator().manual_seed(0)
    base = {"a.weight": torch.zeros(24, 20), "b.weight": torch.zeros(24, 20)}
    models = [{name: torch.randn(24, 20, generator=generator) for name in base} for _ in range(3)]

    def factor(size: int, *, singular: bool) -> torch.Tensor:
        x = torch.randn(size, 1 if singular else 4 * size, generator=generator, dtype=torch.float64)
        return x @ x.T

    curvature = []
    for _ in models:
        pairs = {name: [factor(size, singular=name == "a.weight") for size in (24, 20)] for name in base}
        curvature.append({name: Kronecker(G=G, A=A) for name, (G, A) in pairs.items()})
    options = {"basis": basis, "aggregator": "mean", "damping": 0.0, "curvature": curvature}
    with pytest.warns(epimer.EpimerWarning, match=r"singular curvature, damped: 'a.weight'\. Raise damping"):
        merged = epimer.merge_state_dicts(base, models, "epimer_kron", **options)
    assert merged.record.tensors["a.weight"].status == "damped"
    assert merged.record.tensors["b.weight"].status in ("exact", "converged")
    if basis != "tagged":  # whose systems are solved directly
        with pytest.warns(epimer.EpimerWarning, match="stopped above the tolerance: 'b.weight'"):
            merged = epimer.merge_state_dicts(base, models, "epimer_kron", **{**options, "iterations": 1})
        assert merged.record.tensors["b.weight"].status == "stalled"
        assert merged.record.tensors["b.weight"].residual > 1e-5
