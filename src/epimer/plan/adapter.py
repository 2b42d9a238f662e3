"""Plan a merge into a LoRA adapter: which tensors become factors of which rank, and which are written as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce

import torch

from epimer.checkpoints.adapter_files import LoraModule, adapters_of
from epimer.checkpoints.checkpoint import header, is_embedding, nbytes
from epimer.checkpoints.expert_factors import ExpertPart
from epimer.checkpoints.lora import PREFIX, Update, head_is_table, model_config, network_name
from epimer.checkpoints.quantized import FLOAT8
from epimer.checkpoints.token_rows import STORED
from epimer.checkpoints.vocabulary import Aligned
from epimer.errors import EpimerError, RecipeError, TensorError, listed
from epimer.methods.frechet import FrechetOptions
from epimer.methods.rules import is_matrix, matrix_shape
from epimer.plan.adapter_experts import ExpertStack, expert_stacks
from epimer.plan.jobs import Job, Plan
from epimer.plan.time import Work, times
from epimer.tasks.module_names import Network, find_network

OTHER_TOKENS = (
    "output: lora: an adapter has the base's tokens, and the merge has others; write tokenizer_source: base, or remove "
    "'output'."
)
OTHER_STACKS = (
    "output: lora: adapters change different stacks of one layer's experts, and transformers could not tell in which "
    "order PEFT has them; install it, or remove 'output'."
)
OTHER_ROWS = (
    "output: lora: rows of {!r} (trainable_token_indices) are written only where it is averaged or summed and no model "
    "changes other rows; remove 'output', for a whole model."
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
    tokens: dict[str, tuple[int, ...]]
    """modules of which only some rows are written -> which, PEFT's trainable_token_indices"""


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
    tokens = {job.name: rows for job in changed if (rows := _token_rows(plan, job)) != []}
    if more := [name for name, rows in tokens.items() if rows is None]:
        return replace(plan, jobs=[], problems=[RecipeError(OTHER_ROWS.format(more[0]))])
    plan, absent, other, network = _with_network_names(plan, changed)
    tables = {plan.network_names.get(name, name): name for name in tokens}  # one of a table and a copy of it
    stacks = expert_stacks(plan, [job.name for job in changed], network)
    if stacks is None:
        return replace(plan, jobs=[], problems=[RecipeError(OTHER_STACKS)])
    experts = {(job := _expert_job(plan, stack, rank)).name: job for stack in stacks}
    held = {name for job in experts.values() for name in job.names}
    present = [job for job in changed if job.name not in {*absent, *held, *tokens}]
    layers = [job for job in present if job.name not in other]
    factors = {job.name: module for job in layers if (module := _module(plan, job, rank)) is not None}
    layers = [job for job in changed if job.name in factors or job.name in held]
    unbounded = [job for job in layers if rank is None and not _bounded(plan, job)]
    if unbounded:
        return replace(plan, jobs=[], problems=[_unbounded(plan, unbounded)])
    whole = {job.name for job in present if job.name not in factors and _is_parameter(job)}
    tied = _tied(plan)
    unheld = [job.name for job in changed if job.name not in {*factors, *held, *tokens}]
    lost = [name for name in unheld if name not in whole or name in tied]
    whole |= {name for name in _siblings(plan, whole - {*lost}) if name not in factors}
    jobs = []
    for job in plan.jobs:
        if job.name in factors:
            jobs.append(_factor_job(plan, job, factors[job.name]))
        elif job.name in experts:
            jobs.append(experts[job.name])
        elif job.name in tables.values() and (rows := tokens[job.name]):
            jobs.append(_token_job(job, rows))
        elif job.name in whole and job.name not in lost:
            jobs.append(job)
    notes = [*plan.notes]
    own = [job for job in jobs if job.lora is None and not job.tokens and not _brought(plan, job)]
    if own:
        size = sum(job.writes for job in own) / 1e6
        notes.append(f"written whole, not as factors: {listed(job.name for job in own)} ({size:.1f} MB).")
    if lost:
        why = "only modules and the matrices of experts are written, without tied tables"
        notes.append(f"not in the adapter: {listed(lost)}, which models changed; {why}.")
    empty: list[EpimerError] = [TensorError("the adapter would be empty: no model changes a layer of the base.")]
    return replace(plan, jobs=jobs, notes=notes, problems=[] if jobs else empty, whole_model=plan.jobs)


def whole_tensors(plan: Plan) -> WholeTensors:
    """Return under which names the tensors of a planned adapter are written that are not factors."""
    spelled = plan.network_names
    tokens = dict[str, tuple[int, ...]]()
    targets = {job.lora.module for job in plan.jobs if job.lora is not None}
    names = [job.name for job in plan.jobs if job.lora is None and not job.tokens]
    modules, biases, keys = list[str](), list[str](), dict[str, str]()
    for job in plan.jobs:
        if job.tokens:
            module = spelled.get(job.name, job.name).removesuffix(".weight")
            tokens[module], keys[job.name] = job.tokens, f"{PREFIX}{module}{STORED}"
    for name in names:
        module, _, parameter = spelled.get(name, name).rpartition(".")
        alone = parameter == "bias" and f"{name.rpartition('.')[0]}.weight" not in names
        (biases if alone else modules).append(module)
        inner = ".base_layer" if module in targets else ""
        keys[name] = f"{PREFIX}{module}{inner}.{parameter}"
    return WholeTensors(keys, list(dict.fromkeys(modules)), biases, tokens)


def _with_network_names(plan: Plan, changed: list[Job]) -> tuple[Plan, set[str], set[str], Network | None]:
    """Return the plan with the network's names of tensors, the changed ones that it lacks, those of no linear layer.

    Also the network. Adapters tell the names of what they change or bring. Where whole models change more, transformers
    tells all; else no network is built.
    """
    brought, donor = _brought_names(plan), plan.participants.donor
    others = [job.name for job in changed if _update(plan, job)[0] is None and job.name not in brought]
    network = find_network(donor) if others else None
    if network is not None:
        absent = {name for name in others if name not in network.names and name not in network.experts}
        unlike = {*others} - network.linear - absent
        return replace(plan, network_names=network.names | brought), absent, unlike, network
    plan = replace(plan, network_names=brought)
    if others and model_config(donor):
        note = "modules have the file's names, which the network's may differ from: transformers could not tell those."
        plan = replace(plan, notes=[*plan.notes, note])
    return plan, set(), set(), None


def _brought_names(plan: Plan) -> dict[str, str]:
    """Return the network's names of tensors that adapters bring, where the base's differ."""
    names: dict[str, str] = {}
    for model in plan.participants.models:
        for adapter in adapters_of(model.checkpoint):
            for name, key in adapter.brought.items():
                names.setdefault(name, network_name(key))
            for name, rows in adapter.tokens.items():
                names.setdefault(name, network_name(rows.key.replace(STORED, ".weight")))
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


def _token_rows(plan: Plan, job: Job) -> list[int] | None:
    """Return the rows of a table that adapters have rows of; None where the merge may change others as well."""
    base = plan.participants.base
    assert base is not None
    rows, alone = set[int](), job.is_weighted_sum
    for t in job.models:
        model = plan.participants.models[t]
        stored, adapters = model.stored.get(job.name, job.name), adapters_of(model.checkpoint)
        below = adapters[-1].base if adapters else model.checkpoint
        alone = alone and below.fingerprint == base.checkpoint.fingerprint
        for adapter in adapters:
            name = adapter.ties.get(stored, stored)
            rows |= {*adapter.tokens[name].indices} if name in adapter.tokens else set()
            alone = alone and stored not in adapter.replaced and name not in adapter.updates
    return sorted(rows) if alone or not rows else None


def _token_job(job: Job, rows: list[int]) -> Job:
    """Return the job of some rows of a table."""
    share = len(rows) / len(job.template)
    return replace(
        job,
        tokens=tuple(rows),
        template=header((len(rows), *job.template.shape[1:]), job.template.dtype),
        reads=int(share * job.reads),
        memory=int(share * job.memory) + 1,
        work=times(share, job.work),
    )


def _module(plan: Plan, job: Job, rank: int | None) -> LoraModule | None:
    """Return the layer of the adapter that a tensor becomes; None where it is no layer with factors."""
    ranks, W = _ranks(plan, job), job.template
    update, dtypes = _update(plan, job)
    dense = None in ranks
    linear = update is not None or (is_matrix(job.name, W.shape) and job.name.endswith(".weight"))
    if dense and (_brought(plan, job) or not linear):
        return None
    most = _most(plan, job, len(W), W.numel() // len(W))
    if not most:  # an adapter brings it as the base has it
        return None
    transposed = update.transposed if update is not None else job.inputs == 0
    return LoraModule(
        module=plan.network_names.get(job.name, job.name).removesuffix(".weight") if update is None else update.module,
        shape=tuple(W.shape),
        rank=min(most if rank is None else rank, most),
        dtype=_dtype(plan) or (_widest(dtypes) if dtypes and not dense else job.precision),
        transposed=transposed,
        table=update is not None and update.A.endswith(".lora_embedding_A"),
        thin=not dense and _thin(job),
    )


def _expert_job(plan: Plan, stack: ExpertStack, rank: int | None) -> Job:
    """Return the job of a parameter that holds all experts of a layer, with one for the matrix of each.

    PEFT's factors have one rank for all experts. Tensors that are rows of one expert (gate and up) have it together:
    adapters change them by one A, in whose space the merge stays where it is made in the space of the factors.
    """
    merged = [job for job in plan.jobs if job.name in stack.parts and job.method is not None]
    members = [member for job in merged for member in _members(job, stack.parts[job.name])]
    members.sort(key=lambda member: (member[1].number, member[1].outputs))
    first, part = members[0]
    outputs, inputs = max(part.outputs[1] for _, part in members), first.shape[1 - part.inputs_first]
    dense = any(None in _ranks(plan, job) for job in merged)
    thin = not dense and all(map(_thin, merged))
    if thin:
        each = [dict(zip(job.models, _ranks(plan, job), strict=True)) for job in merged]
        most = sum(max(known.get(t) or 0 for known in each) for t in {t for known in each for t in known})
    else:
        apart = len({part.outputs for _, part in members})
        most = apart * max(_most(plan, job, *job.shape[-2:]) for job in merged)
    dtypes = [dtype for job in merged for dtype in _update(plan, job)[1]]
    lora = LoraModule(
        module=stack.module,
        shape=(outputs, inputs),
        rank=min(most if rank is None else rank, most, outputs, inputs),
        dtype=_dtype(plan) or (_widest(dtypes) if dtypes and not dense else first.precision),
        thin=thin,
        parameter=stack.parameter,
        experts=part.experts,
    )
    jobs = [_factor_job(plan, job, replace(lora, rank=_most(plan, job, *job.shape[-2:]))) for job, _ in members]
    whole = 0 if thin else 2 * outputs * inputs * first.precision.itemsize
    return replace(
        merged[0],
        lora=lora,
        experts=tuple((job, part) for job, (_, part) in zip(jobs, members, strict=True)),
        reads=sum(job.reads for job in jobs),
        memory=max(job.memory for job in jobs) + 2 * sum(map(nbytes, lora.headers.values())) + whole,
        work=sum((job.work for job in jobs), Work()),
    )


def _members(job: Job, part: ExpertPart) -> list[tuple[Job, ExpertPart]]:
    """Return the job of one expert's matrix, or those of all matrices of a stack."""
    if part.number is not None:
        return [(job, part)]
    outputs = job.template.shape[2 if part.inputs_first else 1]
    each = replace(job, stacked=True).members()
    return [(one, part._replace(number=e, outputs=(0, outputs))) for e, one in enumerate(each)]


def _most(plan: Plan, job: Job, m: int, n: int) -> int:
    """Return the most rank that the merge of an m x n matrix can have."""
    return min(sum(one or 0 for one in _ranks(plan, job)) if _bounded(plan, job) else m, m, n)


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
    """Return the narrowest dtype that holds what some dtypes hold; FP8 counts as bfloat16, as everywhere."""
    plain = [torch.bfloat16 if dtype in FLOAT8 else dtype for dtype in dtypes]
    return reduce(torch.promote_types, plain)


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
    other = "remove 'output', for a whole model" if dense else "take task_arithmetic, tsv or epimer_free"
    remedy = f"give lora_rank, which keeps so many leading directions and tells the error, or {other}"
    return RecipeError(f"output: lora: {why}, so {job.name!r} has no exact one; {remedy}.")


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
    m, n = matrix_shape(job.template[0] if job.stacked else job.template)
    entries = total * (m + n)
    reads = entries * module.dtype.itemsize
    memory = 2 * reads if job.is_weighted_sum and module.rank == total else 8 * (FACTORS * entries + CORES * total**2)
    return replace(job, reads=reads, memory=memory)
