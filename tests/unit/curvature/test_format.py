"""Curvature through files: the same merge as with curvature in memory, and refusals that say what to do."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from epimer.checkpoints import open_checkpoint
from epimer.curvature.format import Provenance, stored_fingerprint
from epimer.errors import CheckpointError, CurvatureError

SHAPES = {"layers.0.w": (24, 20), "layers.1.w": (16, 24), "norm.weight": (20,)}


def measured(kind, seed):
    torch.manual_seed(seed)

    def gram(side):
        X = torch.randn(side, 2 * side)
        return X @ X.T / side

    match kind:
        case "diagonal":
            return {name: epimer.Diagonal(torch.rand(shape) + 0.1) for name, shape in SHAPES.items()}
        case "kronecker":
            return {n: epimer.Kronecker(A=gram(s[1]), G=gram(s[0])) for n, s in SHAPES.items() if len(s) == 2}
        case _:
            return {
                n: epimer.Samples(g=torch.randn(6, 3, s[0]), x=torch.randn(6, 3, s[1]))
                for n, s in SHAPES.items()
                if len(s) == 2
            }


def save(metrics, folder, model=None):
    fingerprint = None
    if model is not None:
        fingerprint = stored_fingerprint(open_checkpoint(str(model)), {name: name for name in metrics})
    (kind,) = {metric.kind for metric in metrics.values()}
    epimer.Curvature(metrics, Provenance(kind, samples=6, model=fingerprint)).save(folder)


@pytest.fixture
def models(tmp_path):
    torch.manual_seed(0)
    base = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    states = [base] + [{n: W + 0.1 * torch.randn_like(W) for n, W in base.items()} for _ in range(2)]
    for t, state in enumerate(states):
        save_file(state, tmp_path / f"m{t}.safetensors")
    return states


def recipe(tmp_path, method):
    return {
        "merge_method": method,
        "base_model": str(tmp_path / "m0.safetensors"),
        "models": [
            {"model": str(tmp_path / f"m{t}.safetensors"), "curvature": str(tmp_path / f"c{t}")} for t in (1, 2)
        ],
    }


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("fisher", "diagonal"),
        ("gradient_matching", "diagonal"),
        ("epimer", "diagonal"),
        ("regmean", "kronecker"),
        ("mats", "kronecker"),
        ("epimer_kron", "kronecker"),
        ("epimer_exact", "samples"),
    ],
)
def test_a_recipe_with_curvature_merges_as_in_memory(models, tmp_path, method, kind):
    curvatures = [measured(kind, t) for t in (1, 2)]
    for t, curvature in enumerate(curvatures, 1):
        save(curvature, tmp_path / f"c{t}", tmp_path / f"m{t}.safetensors")
    epimer.merge(recipe(tmp_path, method), tmp_path / "out", progress=False)
    expected = epimer.merge_state_dicts(models[0], models[1:], method, curvature=curvatures)
    merged = open_checkpoint(str(tmp_path / "out"))
    for name in SHAPES:
        assert torch.equal(merged.read(name), expected[name])
        assert not torch.equal(merged.read(name), models[0][name])


def test_what_is_stored_is_what_is_read(tmp_path):
    curvature = measured("kronecker", 0)
    save(curvature, tmp_path / "c")
    stored = epimer.Curvature.load(tmp_path / "c")
    assert set(stored) == set(curvature)
    assert len(stored) == 2
    assert "norm.weight" not in stored
    for name, metric in curvature.items():
        assert torch.equal(stored[name].A, metric.A)
        assert torch.equal(stored[name].G, metric.G)
        assert stored.size(name) == 4 * (metric.A.numel() + metric.G.numel())
    with pytest.raises(KeyError):
        stored["norm.weight"]


def test_curvature_of_another_model_is_refused(models, tmp_path):
    for t in (1, 2):
        save(measured("diagonal", t), tmp_path / f"c{t}", tmp_path / "m1.safetensors")
    with pytest.raises(CurvatureError, match=r"c2 was measured on another model than models\[1\]"):
        epimer.merge(recipe(tmp_path, "epimer"), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
    epimer.merge(recipe(tmp_path, "epimer"), tmp_path / "out", progress=False, any_curvature=True)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_missing_curvature_is_refused_before_any_work(models, tmp_path):
    for t in (1, 2):
        whole = measured("diagonal", t)
        save({n: F for n, F in whole.items() if n != "layers.1.w"}, tmp_path / f"c{t}")
    with pytest.raises(CurvatureError, match=r"no model has curvature for 'layers\.1\.w'"):
        epimer.merge(recipe(tmp_path, "epimer"), tmp_path / "out", progress=False)
    one = recipe(tmp_path, "epimer")
    del one["models"][1]["curvature"]
    with pytest.raises(epimer.EpimerError, match=r"models\[1\] has no curvature"):
        epimer.merge(one, tmp_path / "out", progress=False)


def test_the_wrong_kind_is_refused(models, tmp_path):
    for t in (1, 2):
        save(measured("diagonal", t), tmp_path / f"c{t}")
    with pytest.raises(CurvatureError, match="c1 is diagonal curvature, but epimer_kron needs kronecker"):
        epimer.merge(recipe(tmp_path, "epimer_kron"), tmp_path / "out", progress=False)
    assert not (tmp_path / ".out.epimer").exists()


def test_models_measured_differently_are_refused(models, tmp_path):
    for t, kind in ((1, "diagonal"), (2, "kronecker")):
        save(measured(kind, t), tmp_path / f"c{t}")
    with pytest.raises(CurvatureError, match=r"c1 is diagonal curvature, .*c2 is kronecker; measure all models alike"):
        epimer.merge(recipe(tmp_path, "epimer"), tmp_path / "out", progress=False)


@pytest.mark.parametrize(("change", "words"), [({"format": 3}, "format 3"), ({"kind": "spline"}, "'spline'")])
def test_another_format_is_refused(tmp_path, change, words):
    save(measured("diagonal", 0), tmp_path / "c")
    about = json.loads((tmp_path / "c" / "curvature.json").read_text())
    (tmp_path / "c" / "curvature.json").write_text(json.dumps(about | change))
    with pytest.raises(CurvatureError, match=words):
        epimer.Curvature.load(tmp_path / "c")


def test_what_is_no_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not a curvature folder"):
        epimer.Curvature.load(tmp_path / "nowhere")


def symmetric(side, dtype):
    X = torch.randn(side, side, dtype=dtype)
    return X @ X.T + (X @ X.T).T


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 5), (513, 30)])
def test_symmetric_matrices_are_stored_as_one_triangle_without_loss(tmp_path, m, n, dtype):
    torch.manual_seed(0)
    G, A = symmetric(m, dtype), symmetric(n, dtype)
    save({"w": epimer.Kronecker(A=A, G=G)}, tmp_path / "c")
    kept = load_file(tmp_path / "c" / "curvature.safetensors")
    rows, columns = torch.triu_indices(n, n)
    assert torch.equal(kept["w.A"], A[rows, columns])
    assert (tmp_path / "c" / "curvature.safetensors").stat().st_size <= (m * m + m + n * n + n) / 2 * A.itemsize + 400
    stored = epimer.Curvature.load(tmp_path / "c")
    assert torch.equal(stored["w"].A, A)
    assert torch.equal(stored["w"].G, G)
    assert stored.nbytes == A.nbytes + G.nbytes  # what it takes in memory


def test_a_matrix_that_is_not_exactly_symmetric_is_stored_whole(tmp_path):
    A = symmetric(4, torch.float32)
    A[0, 1] += 1e-3
    save({"w": epimer.Kronecker(A=A, G=torch.eye(3))}, tmp_path / "c")
    assert torch.equal(load_file(tmp_path / "c" / "curvature.safetensors")["w.A"], A)
    assert torch.equal(epimer.Curvature.load(tmp_path / "c")["w"].A, A)


def test_a_folder_of_format_1_has_its_matrices_in_full(tmp_path):
    curvature = measured("kronecker", 0)
    save(curvature, tmp_path / "c")
    whole = {f"{name}.{part}": getattr(metric, part) for name, metric in curvature.items() for part in ("A", "G")}
    save_file(whole, tmp_path / "c" / "curvature.safetensors")
    header = json.loads((tmp_path / "c" / "curvature.json").read_text())
    old = {key: value for key, value in header.items() if key not in ("checksums", "sha256")} | {"format": 1}
    (tmp_path / "c" / "curvature.json").write_text(json.dumps(old))
    stored = epimer.Curvature.load(tmp_path / "c")
    for name, metric in curvature.items():
        assert torch.equal(stored[name].A, metric.A)
        assert torch.equal(stored[name].G, metric.G)


def test_numbers_that_are_no_triangle_are_refused(tmp_path):
    save({"w": epimer.Kronecker(A=torch.eye(3), G=torch.eye(2))}, tmp_path / "c")
    header = json.loads((tmp_path / "c" / "curvature.json").read_text())
    for key in ("checksums", "sha256"):
        del header[key]
    (tmp_path / "c" / "curvature.json").write_text(json.dumps(header))
    save_file({"w.A": torch.ones(5), "w.G": torch.ones(3)}, tmp_path / "c" / "curvature.safetensors")
    with pytest.raises(CurvatureError, match=r"'w': A has 5 numbers, which are no triangle of a matrix; measure it"):
        epimer.Curvature.load(tmp_path / "c")
