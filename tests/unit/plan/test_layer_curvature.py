"""Curvature and bases of one tensor: of a kind that the method takes, in its shape, finite, not negative."""

import numpy as np
import pytest
import torch

import epimer
from dense import basis_of, close
from epimer import (
    CurvatureError,
    Diagonal,
    EpimerError,
    Kronecker,
    ParameterError,
    Projected,
    Samples,
)
from models import MATRICES, make_base, make_curvature, make_models
from state_dicts import (
    FIRST,
    METHODS,
    SECOND,
    VECTOR,
    changed,
    double,
    draw,
    mean,
    merge,
    psd,
    randn,
    refuses,
    spoiled,
    without,
)

# --- as it is measured ---


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-3])
@pytest.mark.parametrize("name", ["fisher", "gradient_matching", "epimer"])
def test_fisher_entries_must_be_finite_and_not_negative(base, models, diagonals, name, value):
    broken = changed(diagonals, 1, block__0__weight=Diagonal(spoiled(diagonals[1][FIRST].F, value)))
    refuses(CurvatureError, lambda: merge(base, models, name, curvature=broken), "curvature[1]", f"'{FIRST}'")
    refuses(CurvatureError, lambda: epimer.diagnose_state_dicts(base, models, curvature=broken), "curvature[1]", FIRST)


def test_the_base_s_curvature_is_checked_too(base, models, diagonals):
    def with_base_curvature(metric):
        return lambda: merge(base, models, "gradient_matching", curvature=diagonals, base_curvature={FIRST: metric})

    F = diagonals[0][FIRST].F
    refuses(CurvatureError, with_base_curvature(Diagonal(spoiled(F, float("nan")))), "base_curvature", FIRST)
    refuses(CurvatureError, with_base_curvature(Diagonal(-F)), "base_curvature", FIRST)
    refuses(CurvatureError, with_base_curvature(Diagonal(F.T)), "base_curvature", FIRST)
    refuses(CurvatureError, with_base_curvature(Kronecker(A=psd(20))), "base_curvature", FIRST, "Kronecker")


def test_a_diagonal_of_the_wrong_shape_is_refused(base, models, diagonals):
    broken = changed(diagonals, 1, block__0__weight=Diagonal(torch.ones(20, 24)))
    refuses(CurvatureError, lambda: merge(base, models, "epimer", curvature=broken), "curvature[1]", FIRST, "(20, 24)")


def tilted(M):
    return M + torch.triu(torch.full_like(M, 0.1 * float(M.max())), 1)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda k: Kronecker(G=k.G, A=tilted(k.A)), "symmetric"),
        (lambda k: Kronecker(G=tilted(k.G), A=k.A), "symmetric"),
        (lambda k: Kronecker(G=k.G, A=k.A - 0.1 * k.A.trace() * torch.eye(20)), "semi-definite"),
        (lambda k: Kronecker(G=-k.G, A=-k.A), "semi-definite"),
        (lambda k: Kronecker(A=torch.ones(20, 20) - torch.eye(20)), "semi-definite"),
        (lambda k: Kronecker(G=spoiled(k.G, float("nan"))), "NaN"),
        (lambda k: Kronecker(A=spoiled(k.A, float("inf"))), "Inf"),
        (lambda k: Kronecker(G=k.A, A=k.G), "24 x 24"),
        (lambda k: Kronecker(A=torch.ones(20)), "20 x 20"),
        (lambda k: Kronecker(A=torch.ones(20, 21)), "20 x 20"),
    ],
)
def test_kronecker_factors_must_be_symmetric_positive_semi_definite_and_fit(base, models, factors, broken, said):
    curvature = changed(factors, 1, block__0__weight=broken(factors[1][FIRST]))
    for name in ("mats", "epimer_kron"):
        refuses(
            CurvatureError,
            lambda name=name: merge(base, models, name, curvature=curvature),
            "curvature[1]",
            f"'{FIRST}'",
            said,
        )


@pytest.mark.parametrize("method", ["mats", "epimer_kron"])
@pytest.mark.parametrize(
    "broken",
    [
        lambda k: Kronecker(G=k.G, A=k.A - 0.1 * k.A.trace() * torch.eye(20)),
        lambda k: Kronecker(G=-k.G, A=-k.A),
        lambda k: Kronecker(A=torch.ones(20, 20) - torch.eye(20)),
        lambda k: Kronecker(G=k.G, A=tilted(k.A)),
    ],
)
def test_wide_factors_are_checked_on_the_directions_that_are_merged(base, models, factors, broken, method, monkeypatch):
    monkeypatch.setattr("epimer.geometry.checks.WIDE", 8)
    curvature = changed(factors, 1, block__0__weight=broken(factors[1][FIRST]))
    refuses(
        CurvatureError, lambda: merge(base, models, method, curvature=curvature), "curvature[1]", f"'{FIRST}'", "must"
    )


@pytest.mark.parametrize("column", [1, 19])
def test_a_wide_gram_that_is_indefinite_is_refused_by_name(base, models, column, monkeypatch):
    """Within a block of its diagonal (column 1), or only between two of them, where the sum of all shows it."""
    monkeypatch.setattr("epimer.geometry.checks.WIDE", 10)
    broken = torch.eye(20)
    broken[0, column] = broken[column, 0] = 4.0
    curvature = [{FIRST: Kronecker(A=M), SECOND: Kronecker(A=psd(30))} for M in (torch.eye(20), broken)]
    refuses(
        CurvatureError,
        lambda: merge(base, models, "regmean", curvature=curvature),
        "curvature[1]",
        f"'{FIRST}'",
        "A must be positive semi-definite; its lowest eigenvalue is -3",
    )


@pytest.mark.parametrize("wide", [8, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_that_rounding_left_slightly_indefinite_are_accepted(base, models, dtype, wide, monkeypatch):
    monkeypatch.setattr("epimer.geometry.checks.WIDE", wide)
    X = randn(3, 20, dtype=torch.float32)
    A = (X.T @ X / 3).to(dtype)
    assert float(torch.linalg.eigvalsh(A.double())[0]) < 0
    curvature = [{FIRST: Kronecker(A=A), SECOND: Kronecker(A=psd(30))}] * 2
    merged = epimer.merge_state_dicts(base, models, "mats", curvature=curvature)
    assert close(merged[FIRST].double(), mean(models, FIRST), 1e-6)  # one curvature for all: the mean


def test_a_zero_factor_is_a_task_without_curvature(base, models):
    curvature = [{k: Kronecker(A=c * torch.eye(n)) for k, (_, n) in MATRICES.items()} for c in (0.0, 1.0)]
    merged = epimer.merge_state_dicts(base, models, "regmean", curvature=curvature)
    assert close(merged[FIRST].double(), models[1][FIRST].double(), 1e-6)


def test_regmean_needs_the_input_factor(base, models, factors):
    broken = changed(factors, 1, block__0__weight=Kronecker(G=factors[1][FIRST].G))
    refuses(CurvatureError, lambda: merge(base, models, "regmean", curvature=broken), "curvature[1]", FIRST, "A")


@pytest.mark.parametrize(
    ("g", "x"),
    [
        ((9, 24), (9, 20)),
        ((9, 2, 20), (9, 2, 24)),
        ((9, 2, 24), (8, 2, 20)),
        ((9, 2, 24), (9, 3, 20)),
        ((0, 2, 24), (0, 2, 20)),
    ],
)
def test_samples_of_the_wrong_shape_are_refused(base, models, samples, g, x):
    broken = changed(samples, 1, block__0__weight=Samples(g=torch.ones(g), x=torch.ones(x)))
    refuses(
        CurvatureError,
        lambda: merge(base, models, "epimer_exact", curvature=broken),
        "curvature[1]",
        f"'{FIRST}'",
        str(g),
        str(x),
    )


def test_samples_must_be_finite(base, models, samples):
    one = samples[1][FIRST]
    for broken in (Samples(g=spoiled(one.g, float("nan")), x=one.x), Samples(g=one.g, x=spoiled(one.x, float("inf")))):
        curvature = changed(samples, 1, block__0__weight=broken)
        refuses(
            CurvatureError,
            lambda curvature=curvature: merge(base, models, "epimer_exact", curvature=curvature),
            "curvature[1]",
            f"'{FIRST}'",
        )


@pytest.mark.parametrize(
    "broken",
    [
        Diagonal([1.0, 2.0]),
        Diagonal(np.ones((24, 20))),
        Diagonal(None),
        Diagonal(torch.ones(24, 20, dtype=torch.complex64)),
    ],
)
def test_a_diagonal_that_holds_no_real_tensor_is_refused(base, models, diagonals, broken):
    curvature = changed(diagonals, 1, block__0__weight=broken)
    refuses(CurvatureError, lambda: merge(base, models, "epimer", curvature=curvature), "curvature[1]", f"'{FIRST}'")


@pytest.mark.parametrize("broken", [np.eye(20), "A", torch.eye(20, dtype=torch.complex64)])
def test_a_factor_that_is_no_real_tensor_is_refused(base, models, factors, broken):
    curvature = changed(factors, 1, block__0__weight=Kronecker(A=broken))
    refuses(CurvatureError, lambda: merge(base, models, "mats", curvature=curvature), "curvature[1]", f"'{FIRST}'")


def test_factors_of_integers_count_as_numbers(base, models):
    integer, real = (
        [{k: Kronecker(A=(c * torch.eye(n)).to(dtype)) for k, (_, n) in MATRICES.items()} for c in (1, 3)]
        for dtype in (torch.int64, torch.float32)
    )
    first = epimer.merge_state_dicts(base, models, "regmean", curvature=integer)
    assert close(first[FIRST].double(), 0.25 * models[0][FIRST].double() + 0.75 * models[1][FIRST].double(), 1e-6)
    assert torch.equal(first[FIRST], epimer.merge_state_dicts(base, models, "regmean", curvature=real)[FIRST])


def test_factors_in_half_precision_do_not_overflow(base, models):
    # their doubles do not fit in float16
    curvature = [{k: Kronecker(A=(c * torch.eye(n)).half()) for k, (_, n) in MATRICES.items()} for c in (2e4, 6e4)]
    merged = epimer.merge_state_dicts(base, models, "regmean", curvature=curvature)
    small, large = (float(torch.tensor(c).half()) for c in (2e4, 6e4))
    expected = (small * models[0][FIRST].double() + large * models[1][FIRST].double()) / (small + large)
    assert close(merged[FIRST].double(), expected, 1e-6)


@pytest.mark.parametrize("unit", [1e-60, 1e60])
@pytest.mark.parametrize("name", ["fisher", "epimer"])
def test_curvature_that_float32_cannot_hold_is_refused_beside_float32_models(base, models, diagonals, name, unit):
    curvature = [{k: Diagonal(unit * v.F) for k, v in one.items()} for one in diagonals]
    named = ("curvature[0]", f"'{FIRST}'", "float32")
    refuses(CurvatureError, lambda: epimer.merge_state_dicts(base, models, name, curvature=curvature), *named)
    wide = [double(state) for state in (base, *models)]
    merged = epimer.merge_state_dicts(wide[0], wide[1:], name, curvature=curvature)
    expected = epimer.merge_state_dicts(wide[0], wide[1:], name, curvature=diagonals)
    assert close(merged[FIRST], expected[FIRST], 1e-9)


@pytest.mark.parametrize("name", [m for m in METHODS if epimer.describe_method(m).needs_curvature])
def test_a_method_that_needs_curvature_says_which_kind(base, models, name):
    kind = epimer.describe_method(name).curvature
    refuses(CurvatureError, lambda: epimer.merge_state_dicts(base, models, name), name, "curvature=", kind.title())


@pytest.mark.parametrize("name", ["epimer", "fisher", "mats", "epimer_exact"])
def test_curvature_missing_for_a_matrix_is_refused(base, models, name):
    curvature = make_curvature(base, epimer.describe_method(name).curvature, 2)
    for_none = [{k: v for k, v in one.items() if k != FIRST} for one in curvature]
    refuses(CurvatureError, lambda: merge(base, models, name, curvature=for_none), "no model", f"'{FIRST}'")
    refuses(CurvatureError, lambda: merge(base, models, name, curvature=[{}, {}]), "no model", f"'{FIRST}'")
    for_one = without(curvature, 1, FIRST)
    refuses(CurvatureError, lambda: merge(base, models, name, curvature=for_one), "curvature[1]", f"'{FIRST}'")
    refuses(
        CurvatureError,
        lambda: epimer.diagnose_state_dicts(base, models, curvature=for_one),
        "curvature[1]",
        f"'{FIRST}'",
    )


def test_curvature_missing_for_one_model_of_a_vector_is_refused(base, models, diagonals):
    broken = without(diagonals, 1, VECTOR)
    refuses(CurvatureError, lambda: merge(base, models, "fisher", curvature=broken), "curvature[1]", f"'{VECTOR}'")
    for_none = without(without(diagonals, 0, VECTOR), 1, VECTOR)
    merged = merge(base, models, "fisher", curvature=for_none)
    assert close(merged[VECTOR].double(), mean(models, VECTOR), 1e-6)
    assert "averaged" in merged.record.tensors[VECTOR].note


@pytest.mark.parametrize(
    ("name", "wrong", "needed"),
    [
        ("epimer", Kronecker(A=psd(20)), "Diagonal"),
        ("fisher", Kronecker(A=psd(20)), "Diagonal"),
        ("mats", Diagonal(torch.ones(24, 20)), "Kronecker"),
        ("epimer_exact", Diagonal(torch.ones(24, 20)), "Samples"),
        ("epimer", torch.ones(24, 20), "Diagonal"),
        ("gradient_matching", "fisher.pt", "Diagonal"),
    ],
)
def test_the_wrong_kind_of_curvature_is_refused(base, models, name, wrong, needed):
    good = make_curvature(base, epimer.describe_method(name).curvature, 2)
    broken = changed(good, 1, block__0__weight=wrong)
    refuses(
        CurvatureError,
        lambda: merge(base, models, name, curvature=broken),
        "curvature[1]",
        f"'{FIRST}'",
        type(wrong).__name__,
        needed,
    )


def test_mixed_kinds_are_refused(base, models, diagonals):
    bases = epimer.build_basis(base, models, rank=2)
    mixed = [diagonals[0], {k: Projected(H=torch.eye(4), basis=bases[k]) for k in MATRICES}]
    named = ("curvature[1]", f"'{FIRST}'", "diagonal", "projected")
    refuses(CurvatureError, lambda: merge(base, models, "epimer", curvature=mixed), *named)


def test_a_diagnosis_refuses_mixed_kinds(base, models, diagonals, factors):
    mixed = [diagonals[0], factors[1]]
    named = ("curvature[1]", f"'{FIRST}'", "diagonal", "kronecker")
    refuses(CurvatureError, lambda: epimer.diagnose_state_dicts(base, models, curvature=mixed), *named)


def test_curvature_must_be_one_mapping_per_model(base, models, diagonals):
    for broken, named in (
        (diagonals[0], "list"),
        (3, "list"),
        (iter(diagonals), "list"),
        (diagonals[:1], "1 entries for 2"),
        ([*diagonals, diagonals[0]], "3 entries for 2"),
        ([diagonals[0], None], "curvature[1]"),
        ([diagonals[0], diagonals[1][FIRST]], "curvature[1]"),
    ):
        for call in (
            lambda broken=broken: merge(base, models, "epimer", curvature=broken),
            lambda broken=broken: epimer.diagnose_state_dicts(base, models, curvature=broken),
        ):
            refuses(CurvatureError, call, "curvature", named)


# --- projected on a basis ---


def projections(bases, diagonals):
    """SᵀHS on each matrix's basis, by forming S."""
    made = []
    for one in diagonals:
        mapping = {}
        for key, basis in bases.items():
            S = basis_of(basis, *MATRICES[key]).double()
            mapping[key] = S.T @ (one[key].F.reshape(-1, 1) * S)
        made.append(mapping)
    return made


def test_projected_curvature_merges_as_what_it_was_projected_from():
    base = make_base(torch.float64)
    models, diagonals = make_models(base, 2), make_curvature(base, "diagonal", 2)
    bases = epimer.build_basis(base, models, rank=2)
    matrices = projections(bases, diagonals)
    expected = epimer.merge_state_dicts(base, models, "epimer", curvature=diagonals, rank=2)
    by_argument = epimer.merge_state_dicts(
        base, models, "epimer", basis=bases, curvature=[{k: Projected(H=H) for k, H in m.items()} for m in matrices]
    )
    by_metric = epimer.merge_state_dicts(
        base, models, "epimer", curvature=[{k: Projected(H=H, basis=bases[k]) for k, H in m.items()} for m in matrices]
    )
    for key in MATRICES:
        assert close(by_argument[key], expected[key], 1e-9)
        assert close(by_metric[key], expected[key], 1e-9)


def test_the_record_tells_the_rank_of_the_basis_that_was_used(base, models, diagonals):
    bases = epimer.build_basis(base, models, rank=2)
    merged = epimer.merge_state_dicts(base, models, "epimer", curvature=diagonals, basis=bases)
    assert merged.record.tensors[FIRST].rank == 2


def test_the_diagnosis_tells_the_rank_of_the_basis_that_was_used(base, models, diagonals):
    bases = epimer.build_basis(base, models, rank=2)
    assert epimer.diagnose_state_dicts(base, models, curvature=diagonals, basis=bases).layers[FIRST].theory.rank == 2


@pytest.mark.parametrize("size", [4, 20])  # 20 would fit the default basis by chance
def test_projected_curvature_without_a_basis_is_refused(base, models, size):
    curvature = [{k: Projected(H=torch.eye(size)) for k in MATRICES}] * 2
    named = ("curvature[0]", f"'{FIRST}'", "basis")
    refuses(CurvatureError, lambda: merge(base, models, "epimer", curvature=curvature), *named)


@pytest.mark.parametrize("size", [4, 20])
def test_a_diagnosis_refuses_projected_curvature_without_a_basis(base, models, size):
    curvature = [{k: Projected(H=torch.eye(size if k == FIRST else 18)) for k in MATRICES}] * 2
    named = ("curvature[0]", f"'{FIRST}'", "basis")
    refuses(CurvatureError, lambda: epimer.diagnose_state_dicts(base, models, curvature=curvature), *named)


@pytest.mark.parametrize(
    ("method", "kind", "wrong"),
    [
        ("epimer", "tagged", {"H": torch.eye(3)}),
        ("epimer", "tagged", {"G": torch.eye(4), "A": torch.eye(3)}),
        ("epimer_kron", "tensor", {"G": torch.eye(3), "A": torch.eye(4)}),
        ("epimer_kron", "tensor", {"H": torch.eye(4)}),
    ],
)
def test_projected_curvature_that_does_not_fit_its_basis_is_refused(base, models, method, kind, wrong):
    bases = epimer.build_basis(base, models, rank=2, basis=kind)
    right = {k: Projected(G=torch.eye(4), A=torch.eye(4)) for k in MATRICES}
    curvature = [right, right | {FIRST: Projected(**wrong)}]
    named = ("curvature[1]", f"'{FIRST}'")
    refuses(CurvatureError, lambda: merge(base, models, method, curvature=curvature, basis=bases), *named)


@pytest.mark.parametrize("wrong", [{"H": torch.eye(3)}, {"G": torch.eye(4), "A": torch.eye(3)}])
def test_a_diagnosis_refuses_projected_curvature_that_does_not_fit_its_basis(base, models, wrong):
    bases = epimer.build_basis(base, models, rank=2)
    right = {k: Projected(G=torch.eye(4), A=torch.eye(4)) for k in MATRICES}
    curvature = [right, right | {FIRST: Projected(**wrong)}]
    named = ("curvature[1]", f"'{FIRST}'")
    refuses(CurvatureError, lambda: epimer.diagnose_state_dicts(base, models, curvature=curvature, basis=bases), *named)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"H": torch.eye(4), "A": torch.eye(4)},
        {"H": -torch.eye(4)},
        {"H": torch.ones(4, 3)},
        {"A": torch.eye(4) / 0},
    ],
)
def test_projected_curvature_is_checked_as_any_other(base, models, wrong):
    bases = epimer.build_basis(base, models, rank=2)
    right = {k: Projected(H=torch.eye(4)) for k in MATRICES}
    curvature = [right, right | {FIRST: Projected(**wrong)}]
    refuses(
        CurvatureError,
        lambda: merge(base, models, "epimer", curvature=curvature, basis=bases),
        "curvature[1]",
        f"'{FIRST}'",
    )


def test_projections_on_different_bases_are_refused(base, models):
    first, second = epimer.build_basis(base, models, rank=2), epimer.build_basis(base, models[::-1], rank=2)
    curvature = [{k: Projected(H=torch.eye(4), basis=bases[k]) for k in MATRICES} for bases in (first, second)]
    named = ("curvature[1]", f"'{FIRST}'", "bas")
    refuses(CurvatureError, lambda: merge(base, models, "epimer", curvature=curvature), *named)
    refuses(CurvatureError, lambda: epimer.diagnose_state_dicts(base, models, curvature=curvature), *named)


def test_a_basis_serves_layers_too_small_for_one():
    base, models = draw((8, 6), tasks=3)
    base, models = base | {"tiny": randn(2, 6)}, [m | {"tiny": randn(2, 6, seed=5)} for m in models]
    curvature = [{k: Diagonal(randn(*base[k].shape, seed=t).square()) for k in base} for t in range(3)]
    bases = epimer.build_basis(base, models, rank=2)
    merged = epimer.merge_state_dicts(base, models, "epimer", curvature=curvature, basis=bases)
    expected = epimer.merge_state_dicts(base, models, "epimer", curvature=curvature, rank=2)
    assert all(close(merged[k], expected[k]) for k in base)
    assert merged.record.tensors["tiny"].status == "clamped"


def test_a_basis_without_directions_takes_curvature_without_entries(base):
    copies = [dict(base), dict(base)]
    bases = epimer.build_basis(base, copies, rank=2)
    curvature = [{k: Projected(H=torch.zeros(0, 0)) for k in MATRICES}] * 2
    merged = epimer.merge_state_dicts(base, copies, "epimer", curvature=curvature, basis=bases)
    assert torch.equal(merged[FIRST], base[FIRST])


@pytest.mark.parametrize("broken", ["missing", "of another layer", "a tensor", "a name"])
@pytest.mark.parametrize("use", ["merge", "diagnosis"])
def test_a_basis_must_have_every_matrix_and_fit_it(base, models, diagonals, use, broken):
    bases = epimer.build_basis(base, models, rank=2)
    given = {
        "missing": {SECOND: bases[SECOND]},
        "of another layer": bases | {FIRST: bases[SECOND]},
        "a tensor": bases | {FIRST: torch.ones(24, 4)},
        "a name": bases | {FIRST: "tagged"},
    }[broken]

    def call():
        if use == "merge":
            return epimer.merge_state_dicts(base, models, "epimer", curvature=diagonals, basis=given)
        return epimer.diagnose_state_dicts(base, models, curvature=diagonals, basis=given)

    refuses(EpimerError, call, "basis", f"'{FIRST}'")


@pytest.mark.parametrize("broken", ["tensor", 3])
def test_a_diagnosis_takes_a_basis_only_as_a_mapping(base, models, broken):
    refuses(ParameterError, lambda: epimer.diagnose_state_dicts(base, models, basis=broken), "basis")


def test_a_diagnosis_refuses_a_tensor_basis(base, models, diagonals):
    bases = epimer.build_basis(base, models, rank=2, basis="tensor")
    refuses(EpimerError, lambda: epimer.diagnose_state_dicts(base, models, curvature=diagonals, basis=bases), "basis")


def test_an_entrywise_method_has_no_subspace_to_choose(base, models, diagonals):
    for given in ({"basis": "tagged"}, {"rank": 2}, {"aggregator": "anchored"}):
        refuses(ParameterError, lambda given=given: merge(base, models, "fisher", **given), "fisher", *given)
