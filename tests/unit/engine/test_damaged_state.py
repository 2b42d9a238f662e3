"""Our own files, damaged: what does not verify is not used, so a result is the undamaged one's or there is none.

Each kind of state is made by a real run, damaged at random (seeded), and used again. `python
tests/unit/engine/test_damaged_state.py 2000` tries that many cases of each.
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
from damage import damaged_bytes, damaged_data, damaged_json, damaged_lines, damaged_safetensors
from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.writer import Draft
from epimer.curvature.basis import StoredBasis
from epimer.curvature.kept_inputs import KeptInputs
from epimer.errors import EpimerError

SHAPES = {"0.weight": (12, 10), "0.bias": (12,), "2.weight": (8, 12), "2.bias": (8,)}
CASES = 60


class State:
    """One kind of state in a folder: made once, then used from a damaged copy."""

    def __init__(self, root: Path) -> None:
        self.models = root / "models"
        self.pristine = root / "pristine"
        self.pristine.mkdir()
        make_models(self.models, copies=isinstance(self, CopiedBasis))
        self.make(self.pristine)
        self.expected = self.use(self.copy(root / "first"))

    def copy(self, place: Path) -> Path:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.pristine, place)
        return place

    def recipe(self, method="average", **more):
        models = [{"model": str(self.models / f"m{t}")} for t in (1, 2)]
        return {"merge_method": method, "base_model": str(self.models / "m0"), "models": models, **more}

    def make(self, folder: Path) -> None:
        """Make the state in an empty folder."""
        raise NotImplementedError

    def damage(self, folder: Path, rng: random.Random) -> None:
        """Damage it."""
        raise NotImplementedError

    def use(self, folder: Path):
        """Return what is made of it."""
        raise NotImplementedError

    def failure(self, place: Path, seed: int) -> str | None:
        """Return what is wrong with a use of damaged state, if anything is."""
        rng = random.Random(seed)
        folder = self.copy(place)
        self.damage(folder, rng)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.simplefilter("ignore", epimer.EpimerWarning)
                result = self.use(folder)
        except EpimerError as error:
            return None if one_line(str(error)) else f"more than a line: {error!r}"
        except BaseException as error:
            return f"{type(error).__name__}"
        return None if result == self.expected else "another result"


def one_line(text: str) -> bool:
    with contextlib.suppress(UnicodeEncodeError):
        return len(text.encode().splitlines()) == 1
    return False


def make_models(folder: Path, *, copies: bool) -> None:
    torch.manual_seed(0)
    base = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    states = [base, *({name: W + 0.1 * torch.randn_like(W) for name, W in base.items()} for _ in range(2))]
    for t, state in enumerate(states):
        place = folder / f"m{min(t, 1) if copies else t}"
        (folder / f"m{t}").mkdir(parents=True)
        save_file(state if place == folder / f"m{t}" else states[1], folder / f"m{t}" / "model.safetensors")


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
        lines = journal.read_bytes().splitlines(keepends=True)
        match rng.randrange(8):
            case 0:
                shard.write_bytes(damaged_bytes(shard.read_bytes(), rng))
            case 1:
                journal.write_bytes(b"".join(damaged_lines(lines, rng)))
            case 2:
                journal.write_bytes(damaged_bytes(journal.read_bytes(), rng))
            case _:
                i = rng.randrange(len(lines))
                with contextlib.suppress(ValueError):  # a line that is not JSON is damaged as bytes
                    lines[i] = damaged_line(lines[i], rng)
                journal.write_bytes(b"".join(lines))

    def use(self, folder):
        epimer.merge(self.recipe(self.method, **self.more), folder / "out", progress=False, workers=1)
        return contents(folder / "out")


def damaged_line(line: bytes, rng: random.Random) -> bytes:
    """Return a line of a journal with damage to the values of its JSON."""
    start = line.index(b"{")
    return line[:start] + json.dumps(damaged_data(json.loads(line[start:]), rng)).encode() + b"\n"


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
        file = folder / "out" / "epimer.json"
        file.write_bytes(damaged_json(file.read_bytes(), rng))

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
        basis = None
        if self.basis:
            epimer.make_basis(self.recipe(self.method), folder / "basis", kind=self.basis, rank=2, progress=False)
            basis = StoredBasis(folder / "basis")
        for t in (1, 2):
            torch.manual_seed(t)
            batches = [(torch.randn(6, 10), torch.randint(8, (6,))) for _ in range(3)]
            curvature = epimer.estimate_curvature(
                Network(states[t]),
                batches,
                nn.CrossEntropyLoss(reduction="sum"),
                kind=self.kind,
                basis=basis,
                progress=False,
            )
            ids = torch.randint(5, (3, 4), dtype=torch.int32)
            ones = torch.ones(3, 4, dtype=torch.uint8)
            inputs = KeptInputs("causal-lm", "auto", {"input_ids": ids, "attention_mask": ones}, ones.bool())
            epimer.Curvature(curvature.metrics, curvature.provenance, inputs=inputs).save(folder / f"c{t}")

    def damage(self, folder, rng):
        files = [folder / "c1" / name for name in ("curvature.json", "curvature.safetensors")]
        files = [*files, *files, folder / "c1" / "inputs.safetensors"]
        file = rng.choice(files)
        damaged = damaged_json if file.suffix == ".json" else damaged_safetensors
        file.write_bytes(damaged(file.read_bytes(), rng))

    def use(self, folder):
        curvature = epimer.Curvature.load(folder / "c1")
        inputs = curvature.inputs
        kept = [] if inputs is None else [(name, W.tolist()) for name, W in inputs.tensors.items()]
        sizes = [curvature.nbytes, sorted(curvature.clipped.items()), repr(curvature), sorted(curvature), kept]
        rules = {"*.bias": "fisher"} if self.kind == "diagonal" else {}  # so that all of it is read
        recipe = self.recipe(self.method, rules=rules, parameters={"rank": 2} if self.basis else {})
        for t in (1, 2):
            recipe["models"][t - 1]["curvature"] = str(folder / f"c{t}")
        if self.basis:
            recipe["basis"] = str(folder / "basis")
        epimer.merge(recipe, folder / "out", progress=False)
        return sizes, contents(folder / "out")


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
        file = folder / "basis" / rng.choice(("basis.json", "basis.safetensors", "basis.safetensors"))
        damaged = damaged_json if file.suffix == ".json" else damaged_safetensors
        file.write_bytes(damaged(file.read_bytes(), rng))

    def use(self, folder):
        parameters = {"rank": 2, "basis": self.kind}
        recipe = self.recipe("epimer_free", basis=str(folder / "basis"), parameters=parameters)
        epimer.merge(recipe, folder / "out", progress=False)
        return contents(folder / "out")


class TensorBasis(Basis):
    kind = "tensor"


class CopiedBasis(Basis):
    """A basis of two copies of one model, whose stacked factors are rank-deficient."""

    kind = "tensor"


KINDS = [
    Journal, JournalWithPrepass, JournalOfRanks, JournalOfAdapter, Record, ReplacedRecord, ReportedRecord, Measured,
    Kronecker, Ekfac, Samples, ProjectedKronecker, ProjectedOnTensor, ProjectedHessian, ProjectedGgn, Basis,
    TensorBasis, CopiedBasis,
]  # fmt: skip


def failures(kind: type[State], root: Path, cases: int) -> Counter[str]:
    """Return what went wrong in how many cases."""
    state = kind(root)
    found = (state.failure(root / "case", seed) for seed in range(cases))
    return Counter(text for text in found if text)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_state_is_not_used(kind, tmp_path):
    assert not failures(kind, tmp_path, CASES)


if __name__ == "__main__":
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as root:
            print(kind.__name__, sys.argv[1], dict(failures(kind, Path(root), int(sys.argv[1]))), flush=True)
