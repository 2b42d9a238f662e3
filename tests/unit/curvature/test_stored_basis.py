"""Basis folders are checked when they are opened: owners, shapes, types, parts and what the header says."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from epimer.curvature.basis import StoredBasis, save_basis
from epimer.errors import EpimerError, ParameterError

M, N, RANK = 8, 6, 2


def models(count=2):
    torch.manual_seed(0)
    base = {"w": torch.randn(M, N)}
    return base, [{"w": base["w"] + torch.randn(M, N)} for _ in range(count)]


def stored(folder, kind="tagged", copies=False):
    """Write a basis as an earlier version did: without checksums."""
    base, given = models()
    made = epimer.build_basis(base, given[:1] * 2 if copies else given, rank=RANK, basis=kind)
    save_basis(made.items(), folder, about={"rank": RANK, "models": ["base", "one", "two"]})
    header = json.loads((folder / "basis.json").read_text())
    header = {key: value for key, value in header.items() if key not in ("sha256", "checksums")}
    (folder / "basis.json").write_text(json.dumps(header))
    return made


def tensors(change):
    def apply(folder):
        file = folder / "basis.safetensors"
        state = load_file(file)
        change(state)
        save_file({name: W.contiguous().clone() for name, W in state.items()}, file)

    return apply


def part(name, value):
    return tensors(lambda state: state.update({f"w.{name}": value(state[f"w.{name}"])}))


def header(**changes):
    def apply(folder):
        file = folder / "basis.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return apply


DAMAGE = {
    "owner too high": (part("owner", lambda o: o + 1), "owner reaches from 1 to 2, expected 0 to 1"),
    "owner negative": (part("owner", lambda o: o - 1), "owner reaches from -1 to 0, expected 0 to 1"),
    "owner of floats": (part("owner", torch.Tensor.double), "owner is torch.float64 of shape (4,)"),
    "fewer owners": (part("owner", lambda o: o[:-1]), "owner is torch.int64 of shape (3,), expected 4"),
    "fewer values": (part("sigma", lambda s: s[:-1]), "expected 3 of torch.int64"),
    "a column less": (part("U", lambda U: U[:, :-1]), "expected 4 columns each"),
    "a table": (part("sigma", lambda s: s[:, None]), "sigma has shape (4, 1), expected a vector"),
    "a vector": (part("V", torch.Tensor.flatten), "V has shape (24,), expected a matrix"),
    "integers": (part("U", torch.Tensor.int), "U is torch.int32, expected floats"),
    "no sigma": (tensors(lambda state: state.pop("w.sigma")), "has no sigma for 'w'"),
    "left": (tensors(lambda state: state.update({"w.left": state["w.U"]})), "left has no place there"),
    "mix": (tensors(lambda state: state.update({"w.mix": torch.eye(3)})), "mix has shape (3, 3), expected 4 rows"),
    "foreign": (tensors(lambda state: state.update({"w.x": torch.eye(3)})), "holds 'w.x', expected tensors' U, V"),
    "kind": (header(kind="span"), "'span' basis"),
    "fingerprint": (header(fingerprint=None), "fingerprint: input should be a valid string"),
    "rank": (header(rank="two"), "rank: input should be a valid integer"),
    "models": (header(models=3), "models: input should be a valid list. Got 3 instead"),
    "half a character": (header(note="\ud800"), "holds half a character"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_no_basis_is_refused_when_it_is_opened(tmp_path, case):
    stored(tmp_path / "b")
    assert list(StoredBasis(tmp_path / "b")) == ["w"]
    damage, words = DAMAGE[case]
    damage(tmp_path / "b")
    with pytest.raises(EpimerError) as error:
        StoredBasis(tmp_path / "b", "here.basis")
    assert words in str(error.value)
    assert str(error.value).startswith("here.basis")


def test_a_tensor_basis_of_copies_needs_both_its_sides(tmp_path):
    made = stored(tmp_path / "b", "tensor", copies=True)
    assert torch.equal(StoredBasis(tmp_path / "b")["w"].U, made["w"].U)
    part("left", lambda U: U[:-1])(tmp_path / "b")
    with pytest.raises(EpimerError, match="left and right have 7 and 6 rows, expected 8 and 6"):
        StoredBasis(tmp_path / "b")
    tensors(lambda state: state.pop("w.left"))(tmp_path / "b")
    with pytest.raises(EpimerError, match="has no left for 'w'"):
        StoredBasis(tmp_path / "b")


def test_numbers_that_are_not_finite_are_refused_when_they_are_read(tmp_path):
    stored(tmp_path / "b")
    part("U", lambda U: torch.full_like(U, torch.nan))(tmp_path / "b")
    with pytest.raises(EpimerError, match=r"'w\.U' holds NaN or Inf in 32 of 32 entries; build it again"):
        StoredBasis(tmp_path / "b")["w"]


def test_a_basis_in_memory_is_checked_too():
    base, given = models()
    made = epimer.build_basis(base, given, rank=RANK)["w"]
    for wrong, words in (
        (replace(made, owner=made.owner + 1), "owner reaches from 1 to 2, expected 0 to 1"),
        (replace(made, sigma=made.sigma[:-1]), "expected 3 of torch.int64"),
    ):
        with pytest.raises(ParameterError, match=words):
            epimer.merge_state_dicts(base, given, "epimer_free", basis={"w": wrong})
