"""Decompositions that fail at the first try: taken again, told, and refused by name where nothing helps."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

import epimer
from epimer.errors import NumericalError
from epimer.geometry import decompositions
from epimer.geometry.decompositions import eigh, eigvalsh, fallbacks, pinv, qr, solve, thin_svd

SOURCE = Path(epimer.__file__).parent
GUARDED = {
    "eig", "eigh", "eigvals", "eigvalsh", "svd", "svdvals", "qr", "cholesky", "cholesky_ex", "cholesky_solve",
    "cholesky_inverse", "lstsq", "solve", "solve_ex", "solve_triangular", "triangular_solve", "inv", "inv_ex",
    "inverse", "pinv", "pinverse", "lu", "lu_factor", "lu_solve", "ldl_factor", "geqrf", "lobpcg", "svd_lowrank",
    "pca_lowrank",
}  # fmt: skip
METHODS_OF_TENSORS = {"svd", "qr", "cholesky", "inverse", "pinverse", "lu", "geqrf", "lstsq", "det", "logdet"}


def direct_calls(text: str) -> list[str]:
    """Return the decompositions of torch and numpy that a module's text refers to itself."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            library = owner.rpartition(".")[2] in ("torch", "linalg", "np", "numpy")
            if (library and node.attr in GUARDED) or (not library and node.attr in METHODS_OF_TENSORS):
                found.append(ast.unparse(node))
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("linalg") and node.level == 0:
            found += [alias.name for alias in node.names if alias.name in GUARDED and "torch" in (node.module or "")]
    return found


def test_every_decomposition_goes_through_the_guarded_entry():
    modules = [file for file in SOURCE.rglob("*.py") if file != Path(decompositions.__file__)]
    assert len(modules) > 100
    assert {str(file): calls for file in modules if (calls := direct_calls(file.read_text(encoding="utf-8")))} == {}


def test_the_search_for_direct_calls_finds_them():
    calls = ["torch.linalg.eigh(H)", "X.qr()", "np.linalg.solve(A, b)", "problem.solve(b)"]
    text = "\n".join(["import torch", "from torch.linalg import svd", *calls])
    assert sorted(direct_calls(text)) == ["X.qr", "np.linalg.solve", "svd", "torch.linalg.eigh"]


def graded_gram(seed: int, n: int = 16, top: float = 153.0) -> torch.Tensor:
    """Return XᵀX of columns between 10^-top and 10^top, on which LAPACK's eigensolver fails now and then."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, n, generator=generator, dtype=torch.float64)
    X = X * 10.0 ** torch.linspace(-top, top, n, dtype=torch.float64)
    H = X.T @ X
    return 0.5 * (H + H.T)


def fails(H: torch.Tensor) -> bool:
    try:
        return not bool(torch.linalg.eigh(H).eigenvalues.isfinite().all())
    except torch.linalg.LinAlgError:
        return True


def test_gram_matrices_on_which_the_eigensolver_fails_are_decomposed():
    failed = [H for H in map(graded_gram, range(60)) if fails(H)]
    if not failed:
        pytest.skip("this LAPACK decomposes them all")
    for H in failed:
        size = float(H.abs().max())
        with fallbacks() as told:
            values, vectors = eigh(H)
        assert told == ["eigh rescaled in float64"]
        assert torch.allclose(vectors.T @ vectors, torch.eye(16, dtype=torch.float64), atol=1e-12)
        assert torch.allclose((vectors * (values / size)) @ vectors.T, H / size, atol=1e-12)
        assert torch.equal(eigvalsh(H).sort().values, eigvalsh(H))
        stack = torch.stack([torch.eye(16, dtype=torch.float64), H])
        assert torch.equal(eigh(stack).values, torch.stack([torch.ones(16, dtype=torch.float64), values]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_try_is_torchs_own_result_bit_by_bit(dtype):
    A = torch.randn(30, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    with fallbacks() as told:
        assert all(map(torch.equal, eigh(A.T @ A), torch.linalg.eigh(A.T @ A)))
        assert torch.equal(eigvalsh(A.T @ A), torch.linalg.eigvalsh(A.T @ A))
        assert all(map(torch.equal, thin_svd(A), torch.linalg.svd(A, full_matrices=False)))
        assert all(map(torch.equal, qr(A), torch.linalg.qr(A)))
        assert torch.equal(solve(A.T @ A, A[0]), torch.linalg.solve(A.T @ A, A[0]))
        assert torch.equal(pinv(A.T @ A, 1e-6), torch.linalg.pinv(A.T @ A, hermitian=True, rtol=1e-6))
    assert told == []


@pytest.mark.parametrize("name", ["eigh", "eigvalsh", "thin_svd", "qr"])
def test_another_driver_takes_over_where_torchs_fails(name, monkeypatch):
    def broken(*args, **kwargs):
        raise torch.linalg.LinAlgError("did not converge")

    A = torch.randn(9, 9, generator=torch.Generator().manual_seed(1))
    H, known = A.T @ A, getattr(torch.linalg, name.removeprefix("thin_"))(A.T @ A)
    monkeypatch.setattr(torch.linalg, name.removeprefix("thin_"), broken)
    with fallbacks() as told:
        found = getattr(decompositions, name)(H)
    assert told == [f"{name.removeprefix('thin_')} rescaled in float64 by another driver"]
    parts = (found,) if isinstance(found, torch.Tensor) else found
    assert all(part.dtype == torch.float32 for part in parts)
    values = {"eigh": 0, "eigvalsh": 0, "thin_svd": 1, "qr": 1}[name]
    expected = known if name == "eigvalsh" else known[values]
    assert torch.allclose(parts[values].abs(), expected.abs(), rtol=1e-4, atol=1e-5)
    if name in ("thin_svd", "qr"):
        product = (parts[0] * parts[1]) @ parts[2] if name == "thin_svd" else parts[0] @ parts[1]
        assert torch.allclose(product, H, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(
        np.linalg, name.removeprefix("thin_"), lambda *a, **k: (_ for _ in ()).throw(np.linalg.LinAlgError)
    )
    with pytest.raises(NumericalError, match=r"of a 9 x 9 matrix with entries up to [\d.]+ did not converge"):
        getattr(decompositions, name)(H)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("decompose", [eigh, eigvalsh, thin_svd, qr])
def test_a_matrix_that_overflowed_is_refused_in_one_line(decompose, value):
    H = torch.eye(5, dtype=torch.float64)
    H[1, 2] = H[2, 1] = value
    with pytest.raises(NumericalError, match=r"of a 5 x 5 matrix with NaN or Inf in 2 of its entries") as error:
        decompose(H)
    assert "\n" not in str(error.value)


def test_eigenvalues_beyond_the_precision_are_refused_and_not_inf():
    with pytest.raises(NumericalError, match=r"leaves torch\.float32"):
        eigh(torch.full((8, 8), 3e38))


def test_a_singular_system_has_its_solution_of_least_norm():
    H = torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(solve(H, torch.tensor([4.0, 0.0], dtype=torch.float64)), torch.tensor([2.0, 0.0]).double())
