"""Plan a merge into a LoRA adapter: which tensors become factors of which rank, and which are written as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from epimer.checkpoints.adapter_files import LoraModule, adapters_of
from epimer.checkpoints.checkpoint import is_embedding
from epimer.checkpoints.lora import PREFIX, Update, head_is_table, model_config
from epimer.checkpoints.vocabulary import Aligned
from epimer.errors import EpimerError, RecipeError, TensorError, listed
from epimer.methods.frechet import FrechetOptions
from epimer.methods.rules import is_matrix
from epimer.plan.jobs import Job, Plan
from epimer.tasks.module_names import find_network

INNER = (".modules_to_save.default.", ".modules_to_save.", ".base_layer.", ".original_module.")
OTHER_TOKENS = (
    "output: lora: an adapter has the base's tokens, and the merge has others; write tokenizer_source: base, or remove "
    "'output'."
)
FACTORS = 8  # float64 copies of all factors that a merge of them holds at once
CORES = 24  # the same of a core


@dataclass(frozen=True)
class WholeTensors:
    """The tensors of an adapter that are not factors."""

    keys: dict[str, str]
    """name -> its name in the adapter's file"""
    modules: list[str]
    """modules that are written whole, PEFT's modules_to_save"""
    biases: list[str]
    """modules of which only the bias is written"""


def plan_adapter(plan: Plan) -> Plan:
    """Return the plan of the adapter of a merge, jobs for what it holds alone; of another recipe the plan as it is.

    A tensor that adapters change by factors becomes factors; so does, at a given rank, a linear layer that whole models
    change. What is brought or changed as a whole (a norm, a head, a bias) is written as it is. Tensors that no model
    changes are left to the base.
    """
    if plan.problems or plan.recipe is None or plan.recipe.output != "lora":
        return plan
    base = plan.participants.base
    if base is None:
        problem = (
            f"output: lora: {plan.method.name} does not start from the base here, so its merge is no adapter of it"
        )
        return replace(plan, jobs=[], problems=[RecipeError(f"{problem}; remove 'output', or take another method.")])
    if isinstance(base.checkpoint, Aligned):
        return replace(plan, jobs=[], problems=[RecipeError(OTHER_TOKENS)])
    rank = plan.recipe.lora_rank
    changed = [job for job in plan.jobs if job.method is not None and job.name not in plan.ties and _changed(plan, job)]
    if stacked := [job.name for job in changed if (update := _update(plan, job)[0]) is not None and update.expert]:
        problem = f"output: lora: adapters change stacked experts ({listed(stacked)}), which are not written as factors"
        return replace(plan, jobs=[], problems=[RecipeError(f"{problem}; remove 'output', for a whole model.")])
    plan, absent, other = _with_network_names(plan, changed)
    present = [job for job in changed if job.name not in absent]
    layers = [job for job in present if job.name not in other]
    factors = {job.name: module for job in layers if (module := _module(plan, job, rank)) is not None}
    unbounded = [job for job in changed if job.name in factors and rank is None and not _bounded(plan, job)]
    if unbounded:
        return replace(plan, jobs=[], problems=[_unbounded(plan, unbounded)])
    whole = {job.name for job in present if job.name not in factors and _is_parameter(job)}
    tied = _tied(plan)
    lost = [job.name for job in changed if job.name not in factors and (job.name not in whole or job.name in tied)]
    whole |= {name for name in _siblings(plan, whole - {*lost}) if name not in factors}
    jobs = []
    for job in plan.jobs:
        if job.name in factors:
            jobs.append(_factor_job(plan, job, factors[job.name]))
        elif job.name in whole and job.name not in lost:
            jobs.append(job)
    notes = [*plan.notes]
    own = [job for job in jobs if job.lora is None and not _brought(plan, job)]
    if own:
        size = sum(job.writes for job in own) / 1e6
        notes.append(f"written whole, not as factors: {listed(job.name for job in own)} ({size:.1f} MB).")
    if lost:
        why = "only modules are written, without stacked experts and tied tables"
        notes.append(f"not in the adapter: {listed(lost)}, which models changed; {why}.")
    empty: list[EpimerError] = [TensorError("the adapter would be empty: no model changes a layer of the base.")]
    return replace(plan, jobs=jobs, notes=notes, problems=[] if jobs else empty, whole_model=plan.jobs)


def whole_tensors(plan: Plan) -> WholeTensors:
    """Return under which names the tensors of a planned adapter are written that are not factors."""
    spelled = plan.network_names
    targets = {job.lora.module for job in plan.jobs if job.lora is not None}
    names = [job.name for job in plan.jobs if job.lora is None]
    modules, biases, keys = list[str](), list[str](), dict[str, str]()
    for name in names:
        module, _, parameter = spelled.get(name, name).rpartition(".")
        alone = parameter == "bias" and f"{name.rpartition('.')[0]}.weight" not in names
        (biases if alone else modules).append(module)
        inner = ".base_layer" if module in targets else ""
        keys[name] = f"{PREFIX}{module}{inner}.{parameter}"
    return WholeTensors(keys, list(dict.fromkeys(modules)), biases)


def _with_network_names(plan: Plan, changed: list[Job]) -> tuple[Plan, set[str], set[str]]:
    """Return the plan with the network's names of tensors, the changed ones that it lacks, those of no linear layer.

    Adapters tell the names of what they change or bring. Where whole models change more, transformers tells all.
    """
    brought, donor = _brought_names(plan), plan.participants.donor
    others = [job.name for job in changed if _update(plan, job)[0] is None and job.name not in brought]
    network = find_network(donor) if others else None
    if network is not None:
        absent = {name for name in others if name not in network.names}
        return replace(plan, network_names=network.names | brought), absent, {*others} - network.linear - absent
    plan = replace(plan, network_names=brought)
    if others and model_config(donor):
        note = "modules have the file's names, which the network's may differ from: transformers could not tell those."
        plan = replace(plan, notes=[*plan.notes, note])
    return plan, set(), set()


def _brought_names(plan: Plan) -> dict[str, str]:
    """Return the network's names of tensors that adapters bring, where the base's differ."""
    names: dict[str, str] = {}
    for model in plan.participants.models:
        for adapter in adapters_of(model.checkpoint):
            for name, key in adapter.brought.items():
                for inner in INNER:
                    key = key.replace(inner, ".")
                names.setdefault(name, key.removeprefix(PREFIX))
    return names


def _ranks(plan: Plan, job: Job) -> list[int | None]:
    """Return the rank of every participating model's change of a tensor; None for a model that stores it whole."""
    base = plan.participants.base
    assert base is not None
    return [plan.participants.models[t].delta_rank(job.name, base) for t in job.models]


def _changed(plan: Plan, job: Job) -> bool:
    """Whether an adapter changes or brings a tensor, or a whole model has another one than the base."""
    base = plan.participants.base
    assert base is not None
    for t, rank in zip(job.models, _ranks(plan, job), strict=True):
        model = plan.participants.models[t]
        stored = model.stored.get(job.name, job.name)
        if rank or (rank is None and not model.checkpoint.equal(stored, base.checkpoint, job.name)):
            return True
    return _brought(plan, job)


def _brought(plan: Plan, job: Job) -> bool:
    """Whether an adapter brings a tensor of its own, as modules_to_save and biases are."""
    for t in job.models:
        model = plan.participants.models[t]
        stored = model.stored.get(job.name, job.name)
        if any(stored in adapter.brought for adapter in adapters_of(model.checkpoint)):
            return True
    return False


def _module(plan: Plan, job: Job, rank: int | None) -> LoraModule | None:
    """Return the layer of the adapter that a tensor becomes; None where it is no layer with factors."""
    ranks, W = _ranks(plan, job), job.template
    update, dtypes = _update(plan, job)
    dense = None in ranks
    linear = update is not None or (is_matrix(job.name, W.shape) and job.name.endswith(".weight"))
    if dense and (_brought(plan, job) or not linear):
        return None
    m, n = len(W), W.numel() // len(W)
    most = sum(one or 0 for one in ranks) if _bounded(plan, job) else min(m, n)
    transposed = update.transposed if update is not None else job.inputs == 0
    return LoraModule(
        module=plan.network_names.get(job.name, job.name).removesuffix(".weight") if update is None else update.module,
        shape=tuple(W.shape),
        rank=min(most if rank is None else rank, most, min(m, n)),
        dtype=_dtype(plan) or (_widest(dtypes) if dtypes and not dense else job.precision),
        transposed=transposed,
        table=update is not None and update.A.endswith(".lora_embedding_A"),
        thin=not dense and _thin(job),
    )


def _update(plan: Plan, job: Job) -> tuple[Update | None, list[torch.dtype]]:
    """Return what the first adapter that changes a tensor adds to it, and the dtypes of all adapters' factors."""
    first: Update | None = None
    dtypes = []
    for model in plan.participants.models:
        stored = model.stored.get(job.name, job.name)
        for adapter in adapters_of(model.checkpoint):
            if (update := adapter.updates.get(adapter.ties.get(stored, stored))) is not None:
                first = first or update
                dtypes += [adapter.adapter.headers[key].dtype for key in (update.A, update.B)]
    return first, dtypes


def _widest(dtypes: list[torch.dtype]) -> torch.dtype:
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest


def _dtype(plan: Plan) -> torch.dtype | None:
    assert plan.recipe is not None
    name = plan.recipe.out_dtype or plan.recipe.dtype
    return None if name is None else getattr(torch, name)


def _thin(job: Job) -> bool:
    """Whether factors are merged in the space that they span, without a dense matrix."""
    assert job.method is not None
    if job.is_weighted_sum:
        return True
    basis = getattr(job.options, "basis", "tensor")
    known = not isinstance(basis, Mapping) and basis != "full"
    return job.rule in ("matrix", "elementwise") and job.method.equivariant and known


def _bounded(plan: Plan, job: Job) -> bool:
    """Whether the merge of a tensor has no more rank than the adapters' changes of it together."""
    assert job.method is not None
    if None in _ranks(plan, job):
        return False
    return _thin(job) or (job.rule == "matrix" and job.method.bounded_rank(job.options))


def _unbounded(plan: Plan, jobs: list[Job]) -> RecipeError:
    job, ranks = jobs[0], _ranks(plan, jobs[0])
    dense = [t for t, rank in zip(job.models, ranks, strict=True) if rank is None]
    if dense:
        model = plan.participants.models[dense[0]]
        stored = model.stored.get(job.name, job.name)
        dora = any(adapter.has_magnitude(stored) for adapter in adapters_of(model.checkpoint))
        why = f"{model.label} is {'DoRA, which no LoRA equals' if dora else 'not an adapter of this base'}"
    elif isinstance(job.options, FrechetOptions) and plan.method.bounded_rank(replace(job.options, basis="tensor")):
        why = f"{plan.method.name} in the full space does not keep the rank of adapters"
    else:
        why = f"{plan.method.name} does not keep the rank of adapters"
    remedy = "give lora_rank, which keeps so many leading directions and tells the error, or take task_arithmetic, tsv "
    return RecipeError(f"output: lora: {why}, so {job.name!r} has no exact one; {remedy}or epimer_free.")


def _tied(plan: Plan) -> set[str]:
    """Return the tensors that stand for two in the network, which PEFT would take apart: tables that are the head."""
    tied, headers = {*plan.ties, *plan.ties.values()}, plan.participants.template.headers
    if head_is_table(plan.participants.donor):
        size = model_config(plan.participants.donor).get("vocab_size")
        tied |= {name for name, W in headers.items() if is_embedding(name) and W.dim() == 2 and size in (None, len(W))}
    return tied


def _is_parameter(job: Job) -> bool:
    return job.name.endswith((".weight", ".bias"))


def _siblings(plan: Plan, whole: set[str]) -> Iterator[str]:
    """Yield tensors that must come along: PEFT saves modules, so a weight comes with its bias."""
    modules = {name.removesuffix(".weight") for name in whole if name.endswith(".weight")}
    yield from whole
    for job in plan.jobs:
        if job.method is not None and job.name.rpartition(".")[0] in modules:
            yield job.name


def _factor_job(plan: Plan, job: Job, module: LoraModule) -> Job:
    """Return a tensor's job with what it reads and holds as factors, where no dense matrix is formed."""
    job = replace(job, lora=module)
    if not module.thin:
        return job
    total = sum(one or 0 for one in _ranks(plan, job))
    entries = total * (len(job.template) + job.template.numel() // len(job.template))
    reads = entries * module.dtype.itemsize
    memory = 2 * reads if job.is_weighted_sum and module.rank == total else 8 * (FACTORS * entries + CORES * total**2)
    return replace(job, reads=reads, memory=memory)
