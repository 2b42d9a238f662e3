"""Our own files, damaged: what does not verify is not used, so a result is the undamaged one's or there is none.

Each kind of state is made by a real run, damaged at random (seeded), and used again. Without checksums, as earlier
versions wrote it, or with ones that a stranger made to fit, damage may go unnoticed, but is never an internal error.
`python tests/unit/engine/test_damaged_state.py 2000` tries that many cases of each.
"""

import contextlib
import hashlib
import json
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this file is run as a script

import epimer
from commands import assert_refused, run
from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.writer import Draft
from epimer.curvature.basis import StoredBasis
from epimer.curvature.kept_inputs import KeptInputs
from epimer.errors import EpimerError, OutputError
from fuzz.mutations import damage_content, mutated_bytes, mutated_journal

SHAPES = {"0.weight": (12, 10), "0.bias": (12,), "2.weight": (8, 12), "2.bias": (8,)}
CASES = 20

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own use of it


class State:
    """One kind of state in a folder: made once, then used from a damaged copy."""

    copies = False
    """whether the models are copies of one"""

    def __init__(self, root: Path) -> None:
        self.models = root / "models"
        self.pristine = root / "pristine"
        self.pristine.mkdir()
        make_models(self.models, copies=self.copies)
        self.make(self.pristine)
        self.expected = self.use(self.copy(root / "first"))

    def copy(self, place: Path) -> Path:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.pristine, place)
        return place

    def recipe(self, method="average", **more):
        models = [{"model": str(self.models / f"m{t}")} for t in (1, 2)]
        return {"merge_method": method, "base_model": str(self.models / "m0"), "models": models, **more}

    def recipe_in(self, folder: Path) -> dict:
        """Return the recipe that uses the state of a folder."""
        return self.recipe()

    def make(self, folder: Path) -> None:
        """Make the state in an empty folder."""
        raise NotImplementedError

    def damage(self, folder: Path, rng: random.Random) -> None:
        """Damage it."""
        raise NotImplementedError

    def use(self, folder: Path):
        """Return what is made of it."""
        raise NotImplementedError

    def without_checksums(self, folder: Path) -> None:
        """Remove the checksums."""
        for file in folder.rglob("*.json"):
            data = json.loads(file.read_bytes())
            data = {key: value for key, value in data.items() if key not in ("sha256", "checksums")}
            if isinstance(data.get("inputs"), dict):
                data["inputs"].pop("checksums", None)
            file.write_text(json.dumps(data))

    def failure(self, place: Path, seed: int, *, checksums: bool = True) -> str | None:
        """Return what is wrong with a use of damaged state, if anything is."""
        rng, self.checksums = random.Random(seed), checksums
        folder = self.copy(place)
        if not checksums:
            self.without_checksums(folder)
        self.damage(folder, rng)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.simplefilter("ignore", epimer.EpimerWarning)
                result = self.use(folder)
        except EpimerError as error:
            return None if one_line(str(error)) else f"more than a line: {error!r}"
        except Exception as error:
            return type(error).__name__
        return None if result == self.expected or not checksums else "another result"


def one_line(text: str) -> bool:
    with contextlib.suppress(UnicodeEncodeError):
        return len(text.encode().splitlines()) == 1
    return False


def make_models(folder: Path, *, copies: bool) -> None:
    """Save a base and two models, of which the second may be a copy of the first."""
    torch.manual_seed(0)
    base = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    one, two = ({name: W + 0.1 * torch.randn_like(W) for name, W in base.items()} for _ in range(2))
    for t, state in enumerate((base, one, one if copies else two)):
        (folder / f"m{t}").mkdir(parents=True)
        save_file(state, folder / f"m{t}" / "model.safetensors")


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Journal(State):
    """A merge that was interrupted."""

    method, more, stop = "average", {}, 3

    def make(self, folder):
        put, made = Draft.wrote, []

        def dying(draft, key, *rest):
            put(draft, key, *rest)
            made.append(key)
            if len(made) == self.stop:
                draft.flush()
                raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Draft, "wrote", dying)
            with pytest.raises(KeyboardInterrupt):
                epimer.merge(self.recipe(self.method, **self.more), folder / "out", progress=False, workers=1)

    def damage(self, folder, rng):
        root = folder / ".out.epimer"
        journal, (shard,) = root / "journal.jsonl", root.glob("model/*.safetensors")
        if self.checksums and rng.random() < 0.1:
            shard.write_bytes(mutated_bytes(rng, shard.read_bytes()))
        else:
            journal.write_bytes(mutated_journal(rng, journal.read_bytes(), forged=not self.checksums))

    def use(self, folder):
        epimer.merge(self.recipe(self.method, **self.more), folder / "out", progress=False, workers=1)
        return contents(folder / "out")


class JournalWithPrepass(Journal):
    """An interrupted merge whose journal holds the result of a pre-pass."""

    method = "ties"


class JournalOfRanks(Journal):
    """An interrupted merge with ranks and residuals in its records."""

    method, more = "epimer_free", {"parameters": {"rank": 2}}


class JournalOfAdapter(Journal):
    """An interrupted merge into an adapter."""

    method, more, stop = "tsv", {"output": "lora", "lora_rank": 2, "rules": {"*.bias": "copy"}}, 2


class Record(State):
    """A finished folder: the same merge again, another one over it, and a report read its epimer.json."""

    def make(self, folder):
        epimer.merge(self.recipe(), folder / "out", progress=False)

    def damage(self, folder, rng):
        damage_content(rng, folder / "out" / "epimer.json")

    def use(self, folder):
        return epimer.merge(self.recipe(), folder / "out", progress=False).lasting()


class ReplacedRecord(Record):
    """A finished folder that another merge replaces."""

    def use(self, folder):
        epimer.merge(self.recipe("task_arithmetic"), folder / "out", progress=False, overwrite=True)
        return contents(folder / "out")


class ReportedRecord(Record):
    """A finished folder of which a report is made."""

    def use(self, folder):
        from epimer.report.read import read_records

        return [record.to_dict() for _, record in read_records([folder / "out" / "epimer.json"]).entries]


class Network(nn.Sequential):
    """What the models' tensors are of."""

    def __init__(self, state: dict) -> None:
        super().__init__(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 8))
        self.load_state_dict(state)


def open_state(folder: Path) -> dict:
    checkpoint = open_checkpoint(str(folder))
    return {name: checkpoint.read(name) for name in checkpoint.headers}


class Measured(State):
    """Curvature of both models, and its basis where it is projected: read, looked at, merged."""

    kind, method, basis = "diagonal", "epimer", None

    def make(self, folder):
        states = [open_state(self.models / f"m{t}") for t in range(3)]
        basis, loss = None, nn.CrossEntropyLoss(reduction="sum")
        if self.basis:
            epimer.make_basis(self.recipe(self.method), folder / "basis", kind=self.basis, rank=2, progress=False)
            basis = StoredBasis(folder / "basis")
        for t in (1, 2):
            torch.manual_seed(t)
            batches = [(torch.randn(6, 10), torch.randint(8, (6,))) for _ in range(3)]
            curvature = epimer.estimate_curvature(
                Network(states[t]), batches, loss, kind=self.kind, basis=basis, progress=False
            )
            ids = torch.randint(5, (3, 4), dtype=torch.int32)
            ones = torch.ones(3, 4, dtype=torch.uint8)
            inputs = KeptInputs("causal-lm", "auto", {"input_ids": ids, "attention_mask": ones}, ones.bool())
            epimer.Curvature(curvature.metrics, curvature.provenance, inputs=inputs).save(folder / f"c{t}")

    def damage(self, folder, rng):
        files = [folder / "c1" / name for name in ("curvature.json", "curvature.safetensors")]
        files = [*files, *files, folder / "c1" / "inputs.safetensors"]
        damage_content(rng, rng.choice(files))

    def use(self, folder):
        curvature = epimer.Curvature.load(folder / "c1")
        inputs = curvature.inputs
        kept = [] if inputs is None else [(name, W.tolist()) for name, W in inputs.tensors.items()]
        sizes = [curvature.nbytes, sorted(curvature.clipped.items()), repr(curvature), sorted(curvature), kept]
        epimer.merge(self.recipe_in(folder), folder / "out", progress=False)
        return sizes, contents(folder / "out")

    def recipe_in(self, folder):
        rules = {"*.bias": "fisher"} if self.kind == "diagonal" else {}  # so that all of it is read
        recipe = self.recipe(self.method, rules=rules, parameters={"rank": 2} if self.basis else {})
        for t in (1, 2):
            recipe["models"][t - 1]["curvature"] = str(folder / f"c{t}")
        return recipe | ({"basis": str(folder / "basis")} if self.basis else {})


class Kronecker(Measured):
    kind, method = "kronecker", "epimer_kron"


class Ekfac(Measured):
    kind, method = "ekfac", "epimer_kron"


class Samples(Measured):
    kind, method = "samples", "epimer_exact"


class ProjectedKronecker(Measured):
    kind, method, basis = "kronecker", "epimer_kron", "tagged"


class ProjectedOnTensor(Measured):
    kind, method, basis = "kronecker", "epimer_kron", "tensor"


class ProjectedHessian(Measured):
    kind, method, basis = "hessian", "epimer", "tagged"


class ProjectedGgn(Measured):
    kind, method, basis = "ggn", "epimer", "tagged"


class Basis(State):
    """A basis folder: merged in."""

    kind = "tagged"

    def make(self, folder):
        epimer.make_basis(self.recipe("epimer_free"), folder / "basis", kind=self.kind, rank=2, progress=False)

    def damage(self, folder, rng):
        damage_content(rng, folder / "basis" / rng.choice(("basis.json", "basis.safetensors", "basis.safetensors")))

    def use(self, folder):
        epimer.merge(self.recipe_in(folder), folder / "out", progress=False)
        return contents(folder / "out")

    def recipe_in(self, folder):
        parameters = {"rank": 2, "basis": self.kind}
        return self.recipe("epimer_free", basis=str(folder / "basis"), parameters=parameters)


class TensorBasis(Basis):
    kind = "tensor"


class CopiedBasis(Basis):
    """A basis of two copies of one model, whose stacked factors are rank-deficient."""

    kind, copies = "tensor", True


KINDS = [
    Journal, JournalWithPrepass, JournalOfRanks, JournalOfAdapter, Record, ReplacedRecord, ReportedRecord, Measured,
    Kronecker, Ekfac, Samples, ProjectedKronecker, ProjectedOnTensor, ProjectedHessian, ProjectedGgn, Basis,
    TensorBasis, CopiedBasis,
]  # fmt: skip


def failures(kind: type[State], root: Path, cases: int, *, checksums: bool = True) -> Counter[str]:
    """Return what went wrong in how many cases."""
    state = kind(root)
    found = (state.failure(root / "case", seed, checksums=checksums) for seed in range(cases))
    return Counter(text for text in found if text)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_state_is_not_used(kind, tmp_path):
    assert not failures(kind, tmp_path, CASES)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_that_no_checksum_tells_is_no_internal_error(kind, tmp_path):
    assert not failures(kind, tmp_path, CASES, checksums=False)


@pytest.mark.parametrize(
    ("kind", "file", "words"),
    [
        (Kronecker, "c1/curvature.json", "curvature of models[0]: "),
        (Kronecker, "c1/curvature.safetensors", "is damaged: its checksum does not fit; measure it again"),
        (Basis, "basis/basis.json", "basis: "),
        (Basis, "basis/basis.safetensors", "is damaged: its checksum does not fit; build it again"),
        (Record, "out/epimer.json", "choose another name, or pass --overwrite"),
    ],
)
def test_a_command_says_it_in_a_line(kind, file, words, tmp_path):
    state = kind(tmp_path)
    folder = state.copy(tmp_path / "case")
    data = bytearray((folder / file).read_bytes())
    data[-5] ^= 1  # in the last tensor, or in the checksum of a header
    (folder / file).write_bytes(data)
    (folder / "recipe.yaml").write_text(json.dumps(state.recipe_in(folder)))
    ran = run("merge", folder / "recipe.yaml", folder / "out")
    assert_refused(ran, words)
    assert (folder / "out").exists() == (kind is Record)
    assert not list(folder.glob(".out*"))


def test_a_damaged_record_is_not_replaced(tmp_path):
    state = Record(tmp_path)
    file = tmp_path / "first" / "out" / "epimer.json"
    file.write_bytes(file.read_bytes().replace(b'"method": "average"', b'"method": "tsv"'))
    with pytest.raises(OutputError, match=r"is not replaced: .*epimer\.json was damaged or edited"):
        epimer.merge(state.recipe("tsv"), tmp_path / "first" / "out", progress=False, overwrite=True)


def test_a_record_of_an_earlier_version_is_read(tmp_path):
    state = Record(tmp_path)
    state.without_checksums(tmp_path / "first")
    assert b"sha256" not in (tmp_path / "first" / "out" / "epimer.json").read_bytes()
    read = state.use(tmp_path / "first")
    assert read["tensors"] == state.expected["tensors"]
    assert {key for key in read if read[key] != state.expected[key]} <= {"sha256", "checksums"}


if __name__ == "__main__":
    for kind in KINDS:
        for checksums in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                found = failures(kind, Path(folder), int(sys.argv[1]), checksums=checksums)
            told = "" if checksums else ", without checksums"
            sys.stdout.write(f"{kind.__name__}{told}: {found.total()} of {sys.argv[1]} {dict(found)}\n")
            sys.stdout.flush()
