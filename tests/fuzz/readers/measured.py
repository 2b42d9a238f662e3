"""What epimer itself wrote: curvature and basis folders, journals, finished outputs; and optimisers' states."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import epimer
from epimer.checkpoints.writer import Draft
from epimer.checksums import HASH, sealed
from epimer.curvature.format import Provenance, model_fingerprint
from epimer.curvature.kept_inputs import KeptInputs
from epimer.curvature.optimizer_state import moments
from epimer.errors import EpimerError
from epimer.json_values import json_value
from fuzz.harness import Reader
from fuzz.mutations import as_python, as_text, mutated, mutated_bytes
from fuzz.readers.checkpoints import damaged_torch_file
from fuzz.readers.models import (
    SHAPES,
    damage_files,
    damage_header,
    damage_json,
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
    place = folder / f"{kind}-{rng.choice(('one', 'two'))}"
    if rng.random() < 0.5:
        _without_checksums(place / "curvature.json")
    dice = rng.random()
    if dice < 0.4:
        damage_json(rng, place / "curvature.json")
    elif dice < 0.7:
        damage_header(rng, place / "curvature.safetensors")
    elif dice < 0.85:
        damage_numbers(rng, place / "curvature.safetensors")
    elif dice < 0.95:
        damage_header(rng, place / "inputs.safetensors")
    else:
        damage_files(rng, rng.choice(sorted(place.iterdir())))


def _without_checksums(path: Path) -> None:
    """Make a header as earlier versions wrote it, which is why damage to it reaches further."""
    header = json.loads(path.read_text())
    for part in (header, header.get("inputs") or {}):
        part.pop(HASH, None)
        part.pop("checksums", None)
    path.write_text(json.dumps(header))


def damage_numbers(rng: Random, path: Path) -> None:
    """Give tensors of a valid file other values, shapes or dtypes."""
    state = load_file(path)
    for name in rng.sample(sorted(state), min(len(state), rng.choice((1, 1, 2)))):
        W, kind = state[name], rng.randrange(9)
        if kind == 0:
            state[name] = torch.full_like(W, rng.choice((0, -1, 1, 2, 100)))
        elif kind == 1 and W.is_floating_point():
            state[name] = torch.full_like(W, rng.choice((float("nan"), float("inf"), 1e38, -1e38, 1e-40)))
        elif kind == 2 and W.numel():
            W = W.clone()
            W.view(-1)[rng.randrange(W.numel())] = rng.choice((-1, 100, 3, 0))
            state[name] = W
        elif kind == 3:
            state[name] = (
                rng.choice(
                    (W.flatten(), W.reshape(1, *W.shape), W[..., :0], torch.zeros(()), W.mT if W.dim() > 1 else W)
                )
                .contiguous()
                .clone()
            )
        elif kind == 4:
            state[name] = torch.cat([W, W]) if W.dim() else W
        elif kind == 5:
            state[name] = W.to(
                rng.choice((torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.bfloat16))
            )
        elif kind == 6:
            del state[name]
        elif kind == 7:
            other = rng.choice(sorted(state))
            state[name] = state[other].clone()
        elif W.is_floating_point():
            state[name] = W * rng.choice((1e30, 1e-30, -1.0))
    if state:
        save_file(state, path)


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
    place = folder / f"basis-{kind}"
    if rng.random() < 0.5:
        _without_checksums(place / "basis.json")
    dice = rng.random()
    if dice < 0.35:
        damage_json(rng, place / "basis.json")
    elif dice < 0.6:
        damage_header(rng, place / "basis.safetensors")
    elif dice < 0.95:
        damage_numbers(rng, place / "basis.safetensors")
    else:
        damage_files(rng, rng.choice(sorted(place.iterdir())))


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
    if rng.random() < 0.3:
        path.write_bytes(mutated_bytes(rng, path.read_bytes()))
        return
    if rng.random() < 0.1:
        damage_files(rng, path)
        return
    lines = path.read_bytes().splitlines()
    i = rng.randrange(len(lines))
    noted = b'"note"' in lines[i]  # what a method's pre-pass found is the method's own, of any type
    if rng.random() < 0.15:
        lines[i : i + 1] = rng.choice(([], [lines[i]] * 2, [rng.choice(lines), lines[i]]))
    else:
        checksum, _, text = lines[i].partition(b" ")
        lines[i] = checksum + b" " + as_text(mutated(rng, json.loads(text))).encode()
    if rng.random() < 0.5 and not noted:  # with checksums that fit: maybe another merge, but never a traceback
        lines = _chained([line.partition(b" ")[2] for line in lines])
        shutil.rmtree(folder / "whole")
    path.write_bytes(b"\n".join(lines) + b"\n")


def _chained(entries: list[bytes]) -> list[bytes]:
    """Return the lines of a journal with these entries."""
    lines, before = [], b""
    for entry in entries:
        before = hashlib.blake2b(before + entry, digest_size=8).hexdigest().encode()
        lines.append(before + b" " + entry)
    return lines


def _read_journal(folder: Path) -> None:
    epimer.merge(recipe(folder, "ties"), folder / "out", progress=False, workers=1)
    if (folder / "whole").exists():
        assert same_files(folder / "whole", folder / "out"), "the resumed merge is another than the uninterrupted one"


def _damage_finished(rng: Random, folder: Path) -> None:
    path = folder / "whole" / "epimer.json"
    (damage_files if rng.random() < 0.1 else damage_json)(rng, path)
    if rng.random() < 0.3 and path.is_file():  # with a checksum that fits, where it is still a record
        try:
            record = json_value(path.read_bytes())
        except ValueError:
            return
        if isinstance(record, dict):
            path.write_text(json.dumps(sealed(record)))
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
    if rng.random() < 0.1:
        damage_files(rng, path)
    elif path.suffix == ".json":
        damage_json(rng, path)
    elif path.suffix == ".safetensors":
        damage_header(rng, path)
    else:
        path.write_bytes(mutated_bytes(rng, path.read_bytes()))


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
