"""What epimer itself wrote: curvature and basis folders, journals, finished outputs; and optimisers' states."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import torch
from torch import nn

import epimer
from epimer.checkpoints.writer import Draft
from epimer.checksums import HASH
from epimer.curvature.format import Provenance, model_fingerprint
from epimer.curvature.kept_inputs import KeptInputs
from epimer.curvature.optimizer_state import moments
from epimer.errors import EpimerError
from fuzz.harness import Reader
from fuzz.mutations import as_python, damage_content, damage_files, mutated, mutated_journal
from fuzz.readers.checkpoints import damaged_torch_file
from fuzz.readers.models import (
    SHAPES,
    damage_numbers,
    damage_record,
    merge_and_compare,
    recipe,
    same_files,
    tensors,
    write_models,
)

MATRICES = [name for name, shape in SHAPES.items() if len(shape) == 2]


# curvature


def _metric(kind: str, shape: tuple[int, ...], seed: int):
    draw = torch.Generator().manual_seed(seed)
    if kind == "diagonal":
        return epimer.Diagonal(torch.rand(shape, generator=draw))
    m, n = shape
    g, x = torch.randn(7, 1, m, generator=draw), torch.randn(7, 1, n, generator=draw)
    if kind == "samples":
        return epimer.Samples(g=g, x=x)
    G, A = g.flatten(0, 1), x.flatten(0, 1)
    return epimer.Kronecker(G=G.T @ G / 7, A=A.T @ A / 7)


METHODS = {"diagonal": "epimer", "kronecker": "epimer_kron", "samples": "epimer_exact"}


def _build_curvature(folder: Path) -> None:
    write_models(folder, "base", "one", "two")
    ids, mask = torch.tensor([[1, 2, 3]], dtype=torch.int32), torch.ones(1, 3, dtype=torch.uint8)
    counted = torch.tensor([[True, True, False]])
    kept = KeptInputs("causal-lm", "auto", {"input_ids": ids, "attention_mask": mask}, counted)
    for kind in METHODS:
        for t, name in enumerate(("one", "two"), 1):
            metrics = {key: _metric(kind, SHAPES[key], 10 * t + i) for i, key in enumerate(MATRICES)}
            fingerprint = model_fingerprint({key: tensors(t)[key] for key in MATRICES})
            provenance = Provenance(
                kind, samples=7, tokens=7, labels="true", seed=0, model=fingerprint, counts=dict.fromkeys(MATRICES, 7),
                left_out={"model.norm.weight": "it is a vector"}, ties={"lm_head.weight": "model.embed_tokens.weight"},
            )  # fmt: skip
            epimer.Curvature(metrics, provenance, inputs=kept).save(folder / f"{kind}-{name}")


def _damage_curvature(rng: Random, folder: Path) -> None:
    kind = rng.choice(tuple(METHODS))
    (folder / "which").write_text(kind)
    _damage_measured(rng, folder / f"{kind}-{rng.choice(('one', 'two'))}", "curvature")


def _damage_measured(rng: Random, place: Path, name: str) -> None:
    """Damage a folder of curvature or of a basis, half of them as earlier versions wrote them."""
    if rng.random() < 0.5:
        _without_checksums(place / f"{name}.json")
    dice = rng.random()
    if dice < 0.4:
        damage_content(rng, place / f"{name}.json")
    elif dice < 0.65:
        damage_content(rng, rng.choice(sorted(place.glob("*.safetensors"))))
    elif dice < 0.95:
        damage_numbers(rng, place / f"{name}.safetensors")
    else:
        damage_files(rng, rng.choice(sorted(place.iterdir())))


def _without_checksums(path: Path) -> None:
    """Make a header as earlier versions wrote it, which is why damage to it reaches further."""
    header = json.loads(path.read_text())
    for part in (header, header.get("inputs") or {}):
        part.pop(HASH, None)
        part.pop("checksums", None)
    path.write_text(json.dumps(header))


def _read_curvature(folder: Path) -> None:
    kind = (folder / "which").read_text() if (folder / "which").exists() else "kronecker"
    for name in ("one", "two"):
        curvature = epimer.Curvature.load(folder / f"{kind}-{name}")
        assert curvature.nbytes >= 0
        if curvature.inputs is not None:
            assert len(curvature.inputs) >= 1
        for key in curvature:
            curvature[key]
    made = recipe(folder, METHODS[kind])
    for entry, name in zip(made["models"], ("one", "two"), strict=True):
        entry["curvature"] = str(folder / f"{kind}-{name}")
    merge_and_compare(made, folder / "out")


# bases


def _build_basis(folder: Path) -> None:
    _build_curvature(folder)
    for kind in ("tagged", "tensor"):
        made = recipe(folder, "epimer_kron", parameters={"rank": 2})
        epimer.make_basis(made, folder / f"basis-{kind}", kind=kind, progress=False)


def _damage_basis(rng: Random, folder: Path) -> None:
    kind = rng.choice(("tagged", "tensor"))
    (folder / "which").write_text(kind)
    _damage_measured(rng, folder / f"basis-{kind}", "basis")


def _read_basis(folder: Path) -> None:
    kind = (folder / "which").read_text() if (folder / "which").exists() else "tagged"
    parameters = {"rank": 2, "basis": kind}
    made = recipe(folder, "epimer_kron", parameters=parameters, basis=str(folder / f"basis-{kind}"))
    for entry, name in zip(made["models"], ("one", "two"), strict=True):
        entry["curvature"] = str(folder / f"kronecker-{name}")
    merge_and_compare(made, folder / "out")


# a killed merge's journal, and a finished folder's record


def _build_finished(folder: Path) -> None:
    write_models(folder, "base", "one", "two")
    epimer.merge(recipe(folder, "ties"), folder / "whole", progress=False, workers=1)


def _build_journal(folder: Path) -> None:
    write_models(folder, "base", "one", "two")


def _killed_draft(folder: Path) -> None:
    """Leave the draft of a merge that was killed before its last tensors."""
    wrote, seen = Draft.wrote, []

    def stop(self: Draft, *args) -> None:
        wrote(self, *args)
        self.flush()
        seen.append(args)
        if len(seen) == 4:
            raise KeyboardInterrupt

    Draft.wrote = stop  # type: ignore[method-assign]
    try:
        epimer.merge(recipe(folder, "ties"), folder / "out", progress=False, workers=1)
    except KeyboardInterrupt:
        return
    finally:
        Draft.wrote = wrote  # type: ignore[method-assign]
    raise RuntimeError("the merge was not stopped")


def _damage_journal(rng: Random, folder: Path) -> None:
    epimer.merge(recipe(folder, "ties"), folder / "whole", progress=False, workers=1)
    _killed_draft(folder)
    path = folder / ".out.epimer" / "journal.jsonl"
    if rng.random() < 0.1:
        damage_files(rng, path)
        return
    forged = rng.random() < 0.4
    path.write_bytes(mutated_journal(rng, path.read_bytes(), forged=forged))
    if forged:  # maybe another merge, but never a traceback
        shutil.rmtree(folder / "whole")


def _read_journal(folder: Path) -> None:
    epimer.merge(recipe(folder, "ties"), folder / "out", progress=False, workers=1)
    if (folder / "whole").exists():
        assert same_files(folder / "whole", folder / "out"), "the resumed merge is another than the uninterrupted one"


def _damage_finished(rng: Random, folder: Path) -> None:
    if damage_record(rng, folder / "whole" / "epimer.json"):
        (folder / "sealed").touch()


def _read_finished(folder: Path) -> None:
    """Merge once more into the folder; what is returned must be the record of such a merge."""
    made = recipe(folder, "ties")
    fresh = epimer.merge(made, folder / "fresh", progress=False, workers=1).lasting()
    for overwrite in (False, True):
        try:
            again = epimer.merge(made, folder / "whole", overwrite=overwrite, progress=False, workers=1)
        except EpimerError:
            if overwrite:
                raise
            continue
        if (folder / "sealed").exists() and not overwrite:  # whoever can write a checksum can write a record
            return
        assert again.lasting() == fresh, "the record that was returned is another"
        assert same_files(folder / "whole", folder / "fresh"), "the folder is another than a new merge's"


# a folder that claims to be a merge


def _build_claimed(folder: Path) -> None:
    _build_finished(folder)
    shutil.copytree(folder / "whole", folder / "original")


def _damage_claimed(rng: Random, folder: Path) -> None:
    path = rng.choice(sorted((folder / "whole").iterdir()))
    (damage_files if rng.random() < 0.1 else damage_content)(rng, path)


def _read_claimed(folder: Path) -> None:
    found = epimer.verify(folder / "whole", recipe=recipe(folder, "ties"), workers=1)
    for check in found.checks:
        assert len(check.text.splitlines()) == 1, f"a check is not one line: {check.text!r}"
    same = same_files(folder / "whole", folder / "original") if found.verified else True
    assert same, "a folder that was changed is verified"


# optimisers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)


def _build_optimizer(folder: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net.two(net.norm(net.one(torch.randn(5, 3)))).square().sum().backward()
        optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(
        {"optimizer": optimizer.state_dict(), "step": 2}, folder / "nested.pt", _use_new_zipfile_serialization=False
    )


def _damage_optimizer(rng: Random, folder: Path) -> None:
    path = folder / rng.choice(("optimizer.pt", "optimizer.pt", "nested.pt"))
    if rng.random() < 0.5:
        path.write_bytes(damaged_torch_file(rng, path.read_bytes()))
        return
    loaded = torch.load(path, weights_only=True)
    changed = as_python(mutated(rng, loaded))
    try:
        torch.save(changed, path, _use_new_zipfile_serialization=path.name == "optimizer.pt")
    except (RecursionError, OverflowError, RuntimeError, ValueError, UnicodeEncodeError):
        path.write_bytes(b"")


def _read_optimizer(folder: Path) -> None:
    for file in ("optimizer.pt", "nested.pt"):
        for moment in ("second", "first"):
            found = moments(folder / file, Net(), moment=moment)
            for name, metric in found.items():
                assert bool(torch.isfinite(metric.F).all()), f"{name!r} is not finite"
                assert bool((metric.F >= 0).all()), f"{name!r} is negative"


READERS = [
    Reader("curvature", _build_curvature, _damage_curvature, _read_curvature, share=6),
    Reader("basis", _build_basis, _damage_basis, _read_basis, share=5),
    Reader("journal", _build_journal, _damage_journal, _read_journal, share=4),
    Reader("finished-output", _build_finished, _damage_finished, _read_finished, share=3),
    Reader("verify", _build_claimed, _damage_claimed, _read_claimed, share=3),
    Reader("optimizer", _build_optimizer, _damage_optimizer, _read_optimizer, share=5),
]
