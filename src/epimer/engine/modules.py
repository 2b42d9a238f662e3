"""The weights of modules beside the model, as sentence-transformers' 2_Dense: averaged where models changed them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from epimer.checkpoints.folder import inside, open_file
from epimer.checkpoints.sentence_modules import weights_that_differ
from epimer.checkpoints.writer import encode_tensors
from epimer.engine.in_memory import merge_in_memory
from epimer.engine.options import in_memory
from epimer.methods.registry import describe_method
from epimer.plan.jobs import Plan, plan_jobs
from epimer.plan.participants import align


def merged_modules(plan: Plan) -> dict[str, bytes]:
    """Return file -> bytes of every module's weights that models do not share: W₀ + scale · Σ λ_t (W_t − W₀).

    Scale and weights are those of the model's last tensor that is merged; a model without the module has the base's.
    """
    jobs = [job for job in plan.jobs if job.method is not None and job.rule != "statistic"]
    if plan.modules is None or not jobs:
        return {}
    ancestor_model = plan.participants.base
    base = None if ancestor_model is None else ancestor_model.checkpoint.folder
    folders = [one.checkpoint.folder for one in plan.participants.models]
    row, last, files = describe_method("average"), jobs[-1], dict[str, bytes]()
    for name in weights_that_differ(plan.modules, [base, *folders]):
        ancestor = _file(base, name)
        paths = [_file(folder, name) or ancestor or plan.modules / name for folder in folders]
        models = [open_file(path, str(path)) for path in paths]
        participants = align(
            None if ancestor is None else open_file(ancestor, str(ancestor)), models, [str(path) for path in paths]
        )
        options = replace(row.resolve({}), scale=1.0 if ancestor is None else last.options.scale)
        settings = (options, last.weights)
        apart = plan_jobs(participants, row, lambda *_, same=settings: same, [("*", "average")], None)
        apart.check()
        tensors = merge_in_memory(apart, in_memory(last.device, len(apart.jobs)).start(apart.parts))[0]
        files[str(Path(name).with_name("model.safetensors"))] = encode_tensors(tensors)
        plan.notes.append(f"{name} differs between models and is averaged.")
    return files


def _file(folder: Path | None, name: str) -> Path | None:
    return inside(folder, name) if folder is not None and (folder / name).is_file() else None
