"""Curvature and bases of a merge, from folders or from Python: opened, and checked against models and method."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from epimer.checkpoints.vocabulary import Aligned
from epimer.curvature.aligned_rows import follow_rows
from epimer.curvature.basis import HEADER, StoredBasis
from epimer.curvature.curvature import Curvature
from epimer.curvature.format import stored_fingerprint
from epimer.curvature.kinds import tensors_of
from epimer.errors import CurvatureError, EpimerError, short
from epimer.geometry.metric import Metric
from epimer.geometry.subspace import clamp_rank
from epimer.methods.registry import Method
from epimer.methods.rules import AVERAGED, matrix_shape, stored_name
from epimer.plan.layer_curvature import CLASSES, Curvatures, accepted_kinds, missing_metric, needs_metric
from epimer.plan.participants import Participant, Participants, collect_errors, locate
from epimer.recipe.model import Recipe


def python_curvatures(curvature: Any, models: Sequence[Participant], method: Method | None = None) -> Curvatures | None:
    """Refuse curvature from Python that is not one mapping per model, in their order, or missing where it is needed."""
    tasks = len(models)
    if curvature is None:
        if method is not None and method.needs_curvature:
            raise CurvatureError(
                f"{method.name} needs {method.curvature} curvature: pass curvature=, one mapping per model from "
                f"tensor name to {CLASSES[method.curvature or '']}."
            )
        return None
    if isinstance(curvature, Mapping) or not isinstance(curvature, Sequence):
        raise CurvatureError("curvature must be a list with one mapping from tensor names to curvature per model.")
    if len(curvature) != tasks:
        raise CurvatureError(f"curvature has {len(curvature)} entries for {tasks} models; give one mapping per model.")
    for t, metrics in enumerate(curvature):
        if not isinstance(metrics, Mapping):
            raise CurvatureError(f"curvature[{t}] must be a mapping from tensor names, got {type(metrics).__name__}.")
    for t, metrics in enumerate(curvature):
        if isinstance(metrics, Curvature) and not _measured_on(metrics, models[t]):
            owner = next((model.label for model in models if _measured_on(metrics, model)), None)
            if owner is not None:
                raise CurvatureError(
                    f"curvature[{t}] was measured on {owner}, not on {models[t].label}; give them in the models' order."
                )
    return curvature


def kind_of(curvature: Any) -> str | None:
    """Return the kind of curvature from Python: that of matrices, where vectors have a diagonal; None without any."""
    kinds: list[str] = []
    listed = isinstance(curvature, Sequence) and not isinstance(curvature, Mapping)  # others are refused later
    for t, metrics in enumerate(curvature if listed else ()):
        if isinstance(metrics, Curvature):
            return metrics.kind
        for name, metric in metrics.items() if isinstance(metrics, Mapping) else ():
            if not isinstance(metric, Metric):
                wanted = ", ".join(CLASSES.values())
                raise CurvatureError(f"curvature[{t}][{name!r}] is {type(metric).__name__}; give one of {wanted}.")
            kinds.append(metric.kind)
    return next((kind for kind in kinds if kind != "diagonal"), kinds[0] if kinds else None)


def _measured_on(curvature: Curvature, model: Participant) -> bool:
    """Whether the tensors that curvature was measured on are this model's; True where it does not say."""
    names = {name: _stored_name(name, model, curvature) for name in map(stored_name, curvature)}
    checkpoint = model.checkpoint.source if isinstance(model.checkpoint, Aligned) else model.checkpoint
    return curvature.provenance.model in (None, stored_fingerprint(checkpoint, names))


def follow_tokens(models: Sequence[Participant], curvatures: list[Curvature] | None) -> list[Curvature] | None:
    """Return curvature with the rows of tables aligned by token as the models' are."""
    return curvatures and [
        follow_rows(curvature, model.checkpoint) if isinstance(model.checkpoint, Aligned) else curvature
        for model, curvature in zip(models, curvatures, strict=True)
    ]


def open_measured(
    recipe: Recipe, folder: Path | None, problems: list[EpimerError]
) -> tuple[list[Curvature] | None, StoredBasis | None]:
    """Open the curvature of the models, where the recipe names it, and the basis that it or the curvature names."""
    curvatures: list[Curvature] = []
    measured = any(entry.curvature is not None for entry in recipe.models)
    for t, path in enumerate(entry.curvature for entry in recipe.models if measured):
        if path is None:
            problems.append(CurvatureError(f"models[{t}] has no curvature, while others have; measure it for all."))
            continue
        with collect_errors(problems, f"curvature of models[{t}]"):
            curvatures.append(Curvature.load(locate(path, folder), path))
    basis = None
    if recipe.basis is not None:
        with collect_errors(problems, "basis"):
            basis = StoredBasis(Path(os.path.expanduser(locate(recipe.basis, folder))), recipe.basis)
    else:
        with collect_errors(problems, "basis"):
            basis = _common_basis(curvatures, folder)
    return curvatures if measured else None, basis


def _common_basis(curvatures: Sequence[Curvature], folder: Path | None) -> StoredBasis | None:
    """Open the basis that all curvature is projected on, beside the curvature or the recipe; None where it is not."""
    if len({curvature.provenance.basis for curvature in curvatures}) != 1:
        return None
    for curvature in curvatures:
        if (name := curvature.provenance.basis_folder) is None or curvature.file is None:
            continue
        for place in (curvature.file.path.parent.parent / name, Path(locate(name, folder))):
            if (place / HEADER).is_file():
                basis = StoredBasis(place)
                if basis.fingerprint == curvature.provenance.basis:
                    return basis
    return None


def check_measured_models(
    models: Sequence[Participant],
    curvatures: Sequence[Curvature],
    problems: list[EpimerError],
    notes: list[str],
    *,
    any_curvature: bool,
) -> None:
    """Refuse curvature that was measured on another model; with `any_curvature` it is only noted."""
    for model, curvature in zip(models, curvatures, strict=False):
        if _measured_on(curvature, model):
            continue
        names = {name: _stored_name(name, model, curvature) for name in map(stored_name, curvature)}
        foreign = [name for name, stored in names.items() if stored not in model.checkpoint.headers]
        problem = f"{curvature.where} was measured on another model than {model.label}"
        if foreign:
            problem = f"{curvature.where} is of {foreign[0]!r}, which {model.label} does not hold: names in memory may "
            problems.append(CurvatureError(f"{problem}differ from those on disk; measure it with `epimer curvature`."))
        elif any_curvature:
            notes.append(f"{problem}; it is used as you asked.")
        else:
            problems.append(CurvatureError(f"{problem}; measure it on this one, or pass --any-curvature."))


def _stored_name(name: str, model: Participant, curvature: Curvature) -> str:
    """Return the name under which a checkpoint holds a tensor that may have several."""
    aliases = [alias for alias, twin in curvature.provenance.ties.items() if twin == name]
    candidates = (model.stored.get(name, name), *aliases)
    return next((stored for stored in candidates if stored in model.checkpoint.headers), name)


def kind_problems(curvatures: Sequence[Curvature], basis: StoredBasis | None) -> Iterator[CurvatureError]:
    """Refuse curvature of several kinds, and projected curvature whose basis is not the merge's."""
    alike = len({(curvature.kind, curvature.provenance.basis) for curvature in curvatures}) < 2
    for curvature in curvatures:
        first, provenance = curvatures[0], curvature.provenance
        if (provenance.kind, provenance.basis) != (first.kind, first.provenance.basis):
            other = "projected on a basis" if first.provenance.basis is None else "not on the same basis"
            other = curvature.kind if provenance.kind != first.kind else other
            yield CurvatureError(
                f"{first.where} is {first.kind} curvature, {curvature.where} is {other}; measure all models alike."
            )
        elif alike and provenance.basis is not None and (basis is None or basis.fingerprint != provenance.basis):
            remedy, name = "name its folder under 'basis'", provenance.basis_folder
            if basis is not None:
                remedy = "measure it on this one"
            elif name is not None:
                remedy = f"it was {short(name)}, looked for beside the curvature and the recipe: {remedy}"
            yield CurvatureError(f"{curvature.where} is projected on a basis that is not here; {remedy}.")


def basis_problems(basis: StoredBasis, recipe: Recipe, participants: Participants) -> Iterator[CurvatureError]:
    """Refuse a basis that was built from other models, or otherwise than the recipe says."""
    for misfit in basis_misfits(basis, recipe, participants):
        yield CurvatureError(f"{misfit}; build it again with `epimer basis`.")


def basis_misfits(basis: StoredBasis, recipe: Recipe, participants: Participants) -> Iterator[str]:
    """Tell what a basis was built from, or with, that is not as the recipe says."""
    models = [participant.checkpoint.fingerprint for participant in participants.all]
    if basis.models is not None and basis.models != models:  # in their order: atoms are owned by number
        yield f"{basis.where} was built from other models, or in another order"
    for key, built in (("rank", basis.rank), ("basis", basis.kind)):
        wanted = recipe.parameters.get(key, built)
        if built is not None and wanted != built:
            yield f"{basis.where} was built with {key} {built}, the recipe says {wanted}"


def curvature_bytes(name: str, rule: str, W: Tensor, method: Method, curvatures: Curvatures | None) -> int:
    """Return the bytes of a tensor's curvature; refuse a method that needs what is not there, without reading it."""
    if rule != "fisher" and (not method.needs_curvature or rule in AVERAGED):
        return 0
    kinds = accepted_kinds(method, rule)
    if curvatures is None and rule == "fisher":
        raise missing_metric(name, method.name)
    if curvatures is None:
        raise CurvatureError(
            f"{method.name} needs {kinds[0]} curvature; give every model of the recipe a "
            "curvature: folder, or take a method that needs no data (epimer_free, tsv)."
        )
    stored = {t: one for t, one in enumerate(curvatures) if isinstance(one, Curvature) and one.file is not None}
    for one in stored.values():  # metrics in memory are checked when their tensor is read
        kind = "projected" if one.provenance.basis is not None and rule == "matrix" else one.kind
        if kind not in kinds:
            raise CurvatureError(
                f"{one.where} is {one.kind} curvature, but {method.name} needs {kinds[0]} "
                f"for {name!r}; measure that kind, or take a method that uses this one."
            )
    missing = [t for t, one in enumerate(curvatures) if name not in one]
    if len(missing) == len(curvatures):
        if needs_metric(name, rule, W):
            raise missing_metric(name, method.name, curvatures)
        return 0
    if missing:
        where = stored[missing[0]].where if missing[0] in stored else f"curvature[{missing[0]}]"
        raise CurvatureError(f"{where} has nothing for {name!r}, which the others have; measure it again.")
    return sum(metric_bytes(one, name) for one in curvatures)


def metric_bytes(curvature: Mapping[str, Metric], name: str) -> int:
    """Return the bytes of one tensor's curvature; nothing is read from disk."""
    if isinstance(curvature, Curvature):
        return curvature.size(name)
    metric = curvature[name]
    return sum(value.nbytes for value in tensors_of(metric).values()) if isinstance(metric, Metric) else 0


def basis_bytes(name: str, rule: str, W: Tensor, tasks: int, basis: Any) -> int:
    """Return the bytes of a tensor's basis in a folder; refuse a folder that does not have it."""
    if rule != "matrix" or not isinstance(basis, StoredBasis):
        return 0
    if name in basis:
        return basis.size(name)
    if clamp_rank(matrix_shape(W), tasks, None):
        raise CurvatureError(f"{basis.where} has no basis for {name!r}; build it from these models.")
    return 0
