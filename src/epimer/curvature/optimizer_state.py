"""Diagonal curvature without data: Adam's moments, read from the optimiser state that is saved with a checkpoint.

    second:  F = v / (1 - β₂ᵗ)       v: running mean of squared gradients
    first:   F = (m / (1 - β₁ᵗ))²    m: running mean of gradients

The state numbers its parameters in the order of the optimiser's groups. Where it has no names, the usual orders are
tried; one is accepted only if all shapes fit and no other fitting order assigns a state to another parameter.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epimer.checkpoints.folder import inside
from epimer.checkpoints.safe_unpickle import is_zip
from epimer.checkpoints.torchfile import load, mapped_regions, not_dense, read_mapped
from epimer.errors import CheckpointError, CurvatureError, ParameterError, listed, nearest, short
from epimer.geometry.metric import Diagonal
from epimer.opened_files import OpenedFile

MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}
FILES = ("optimizer.pt", "optimizer.bin")  # of transformers, of accelerate
NESTED = ("optimizer", "optimizer_state_dict", "optimizer_states")  # the last is Lightning's: a list
SHARDS = re.compile(
    r"^global_step\d+$|zero_pp_rank_\d+|mp_rank_\d+_|^rank\d+-of-\d+-|^optimizer_\d+$|^optimizer_\d+_rank\d+|\.distcp$"
)
SHARD_KEYS = ("zero_stage", "ds_version", "single_partition_of_fp32_groups", "shard_metadata")
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")  # transformers' Trainer
GIVE_NAMES = "give names=, one name per parameter in the optimiser's order"
GATHER = "gather it where it was trained (FSDP: state dict type FULL_STATE_DICT), or measure curvature on data"


@dataclass(frozen=True)
class Slot:
    """One parameter in the optimiser's state; `state` is empty if it was never stepped."""

    key: int | str
    state: Mapping[str, Any]
    group: Mapping[str, Any]
    read: Callable[[Tensor], Tensor]
    """copies a tensor of the state from its file"""

    @property
    def shape(self) -> tuple[int, ...] | None:
        return tuple(self.state["exp_avg_sq"].shape) if self.state else None


def moments(
    path: Path | str, model: nn.Module, *, moment: str = "second", names: Sequence[str] | None = None
) -> dict[str, Diagonal]:
    """Return the diagonal curvature in the state of Adam or AdamW, for every parameter that was stepped.

    The arguments are those of `Curvature.from_optimizer`. The model may be on the meta device: only its parameters'
    names and shapes are read.
    """
    if moment not in MOMENTS:
        raise ParameterError(f"The 'moment' parameter must be {' or '.join(MOMENTS)}. Got {short(moment)} instead.")
    where = str(path)
    groups = _read_groups(Path(path), where)
    slots = dict(zip(_assign(groups, model, names, where), (slot for group in groups for slot in group), strict=True))
    curvature = {
        name: _diagonal(slots[name], parameter.shape, moment, f"{where}: {name!r}")
        for name, parameter in model.named_parameters()
        if name in slots and slots[name].state and _steps(slots[name], f"{where}: {name!r}")
    }
    if not curvature:
        raise CurvatureError(f"{where} has taken no step yet: every 'step' is 0; use a later checkpoint.")
    return curvature


def _diagonal(slot: Slot, shape: torch.Size, moment: str, where: str) -> Diagonal:
    """Return the bias-corrected Adam moment of one parameter, the first one squared."""
    x = slot.read(_tensor(slot.state, MOMENTS[moment], where))
    x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    beta = _betas(slot, where)[list(MOMENTS).index(moment)]
    x = x / (1 - beta ** _steps(slot, where))
    metric = Diagonal(x.square() if moment == "first" else x)
    if problem := metric.problem(shape):
        raise CurvatureError(f"{where} has a {moment} moment that is no curvature: {problem}; use another checkpoint.")
    return metric


def _tensor(state: Mapping[str, Any], key: str, where: str) -> Tensor:
    """Return a dense floating-point tensor of a parameter's state."""
    x = state.get(key)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        actual = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise CurvatureError(f"{where} has {key} of type {actual}, expected a floating-point tensor: Adam or AdamW.")
    if type(x) not in (Tensor, nn.Parameter):
        raise CheckpointError(f"{where} has {key} as a {type(x).__name__}, expected a plain tensor; {GATHER}.")
    if problem := not_dense(x):
        raise CheckpointError(f"{where} has {key} that {problem}.")
    return x.detach()


def _steps(slot: Slot, where: str) -> float:
    steps = _number(slot.state.get("step", slot.group.get("step")))  # apex keeps it with the group
    if steps is None or not 0 <= steps < float("inf"):
        raise CurvatureError(f"{where} has no count of steps that can be used; expected 'step', a number from 0 on.")
    return steps


def _betas(slot: Slot, where: str) -> tuple[float, float]:
    betas = slot.group.get("betas")
    values = [_number(beta) for beta in betas] if isinstance(betas, list | tuple) else []
    match values:
        case [float(first), float(second)] if 0 <= first < 1 and 0 <= second < 1:
            return first, second
    raise CurvatureError(f"{where} has betas {short(betas)}, expected two numbers in [0, 1): Adam or AdamW.")


def _number(value: object) -> float | None:
    """Return a number that may be stored as a tensor, or None."""
    if isinstance(value, Tensor):
        value = None if value.numel() != 1 or not_dense(value) else value.item()
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def _read_groups(path: Path, where: str) -> list[list[Slot]]:
    """Return the parameters of each of the optimiser's groups, in order."""
    file = _find(path, where)
    opened, mapped = OpenedFile(file, where), is_zip(file)
    with opened.open():
        saved = _unnest(load(file, where, mapped=mapped, save="optimizer.state_dict()"), where)
    read = partial(read_mapped, file=opened, regions=mapped_regions(file) if mapped else [])
    state, groups = saved.get("state"), saved["param_groups"]
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        raise CheckpointError(f"{where} is not a whole optimizer.state_dict(): expected 'state' and 'param_groups'.")
    keys: list[int | str] = []
    for group in groups:
        numbers = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(numbers, list) or not all(isinstance(number, int | str) for number in numbers):
            raise CheckpointError(f"{where} has a group without numbered 'params'; save optimizer.state_dict().")
        keys += numbers
    if len(set(keys)) != len(keys):
        raise CheckpointError(f"{where} has a parameter in two places; save optimizer.state_dict() as it is.")
    if stray := state.keys() - set(keys):
        raise CheckpointError(f"{where} has state that is no parameter's: {listed(sorted(map(str, stray)))}.")
    _check_adam(state, groups, where)
    return [[Slot(key, state.get(key, {}), group, read) for key in group["params"]] for group in groups]


def _find(path: Path, where: str) -> Path:
    """Return the file with the optimiser's state: the path itself, or the file in that folder."""
    if SHARDS.search(path.name):
        raise CheckpointError(f"{where} is part of a sharded optimiser's state; {GATHER}.")
    if not os.path.isdir(path):
        if os.path.exists(path) and not path.is_file():
            raise CheckpointError(f"{where} is not a regular file; copy the optimiser's state to one.")
        return path
    entries = sorted(entry.name for entry in path.iterdir())
    if files := [name for name in FILES if name in entries]:
        return inside(path, files[0])
    if shards := [name for name in entries if SHARDS.search(name)]:
        raise CheckpointError(f"{where} holds a sharded optimiser's state ({listed(shards)}); {GATHER}.")
    if runs := [name for name in entries if re.fullmatch(r"checkpoint-\d+", name)]:
        raise CheckpointError(f"{where} is a whole run, expected one checkpoint of it; give one of {listed(runs)}.")
    expected = "expected a Trainer's checkpoint folder, saved without save_only_model"
    raise CheckpointError(f"{where} holds no {FILES[0]}; {expected}.")


def _unnest(loaded: Any, where: str) -> Mapping[str, Any]:
    """Return the optimiser's state dict: the content of a file, or one of its entries."""
    outer = loaded if isinstance(loaded, Mapping) else {}
    for entry in (outer, *(outer[key] for key in NESTED if key in outer)):
        if isinstance(entry, list):
            if len(entry) != 1:
                raise CheckpointError(f"{where} holds the state of {len(entry)} optimisers; save one on its own.")
            entry = entry[0]
        if isinstance(entry, Mapping) and any(key in entry for key in SHARD_KEYS):
            raise CheckpointError(f"{where} is part of a sharded optimiser's state; {GATHER}.")
        if isinstance(entry, Mapping) and "param_groups" in entry:
            return entry
    holds = listed(map(str, outer)) if outer else f"a {type(loaded).__name__}"
    expected = f"expected optimizer.state_dict(), alone or under {', '.join(NESTED)}"
    raise CheckpointError(f"{where} holds no optimiser's state but {holds}; {expected}.")


def _check_adam(state: Mapping[Any, Any], groups: list[Mapping[str, Any]], where: str) -> None:
    """Refuse the state of an optimiser that does not keep Adam's moments for every parameter it stepped."""
    for key, entry in state.items():
        if not isinstance(entry, Mapping):
            raise CheckpointError(f"{where}: parameter {key!r} has a {type(entry).__name__} as state, expected a dict.")
    stepped = {key: entry for key, entry in state.items() if entry}
    if not stepped:
        settings = [str(key) for group in groups[:1] for key in group if key != "params"]
        why = "it never stepped" if "betas" in settings else f"its settings are {listed(settings)}"
        raise CurvatureError(f"{where} has no state ({why}); expected Adam or AdamW after its first step.")
    for key, entry in stepped.items():  # all of them first: other optimisers keep Adam's moments for small parameters
        if kind := _not_adam([str(part) for part in entry]):
            raise CurvatureError(
                f"{where} is the state of {kind}: parameter {key!r} has {listed(map(str, entry))}, expected exp_avg "
                "and exp_avg_sq (Adam or AdamW); measure curvature on data."
            )
    for key, entry in stepped.items():
        _tensor(entry, "exp_avg_sq", f"{where}: parameter {key!r}")


def _not_adam(entries: list[str]) -> str | None:
    """Return the name of the optimiser whose state has these entries, or None where it may be Adam."""
    if any("absmax" in entry or entry in ("state2", "__bnb_optimizer_quant_state__") for entry in entries):
        return "an 8-bit optimiser (bitsandbytes)"
    if "exp_avg_sq_row" in entries or "row_var" in entries:
        return "Adafactor"
    if "exp_avg_sq" not in entries:
        return "SGD or Muon" if "momentum_buffer" in entries else "another optimiser"
    return None


def _assign(groups: list[list[Slot]], model: nn.Module, names: Sequence[str] | None, where: str) -> list[str]:
    """Return the name of each parameter in the optimiser's order."""
    slots = [slot for group in groups for slot in group]
    if names is not None:
        if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(n, str) for n in names):
            raise ParameterError(f"The 'names' parameter must be a list of names. Got {short(names)} instead.")
        if len(names) != len(slots):
            count = f"{len(names)} entries for the {len(slots)} parameters in {where}"
            raise ParameterError(f"names has {count}; {GIVE_NAMES}.")
        return _checked(list(names), slots, model, "names", where)
    if stored := _stored_names(groups, where):
        return _checked(stored, slots, model, where, where)
    shapes = _shapes(model)
    fitting = [(label, order) for label, order in _orders(groups, model) if not _mismatch(order, slots, shapes)]
    if not fitting:
        remedy = f"give the model that was trained, or {GIVE_NAMES}"
        raise CurvatureError(f"{where} does not fit the model: {_why_none_fits(slots, model)}; {remedy}.")
    label, first = fitting[0]
    for other, order in fitting[1:]:
        for slot, name, other_name in zip(slots, first, order, strict=True):
            if name != other_name and slot.state:
                ways = f"parameter {slot.key!r} is {name!r} with {label} and {other_name!r} with {other}"
                raise CurvatureError(f"{where} fits the model in two ways: {ways}; {GIVE_NAMES}.")
    return first


def _stored_names(groups: list[list[Slot]], where: str) -> list[str] | None:
    """Return the names in the file: those of `named_parameters`, or the keys where they are names (FSDP)."""
    names: list[str] = []
    for group in filter(None, groups):
        stored = group[0].group.get("param_names", [slot.key for slot in group])
        if not isinstance(stored, list) or len(stored) != len(group):
            raise CheckpointError(f"{where} has a group whose param_names are not one per parameter; {GIVE_NAMES}.")
        names += [name for name in stored if isinstance(name, str)]
    if any("flat_param" in name for name in names):
        raise CheckpointError(f"{where} has the state of parameters that FSDP has flattened; {GATHER}.")
    return names if len(names) == sum(map(len, groups)) else None


def _checked(names: list[str], slots: list[Slot], model: nn.Module, source: str, where: str) -> list[str]:
    """Return names as `named_parameters` has them (a tied parameter has several); refuse those that do not fit."""
    error, remedy = (ParameterError, "correct it") if source == "names" else (CurvatureError, GIVE_NAMES)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    known = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name in names:
        if name not in known:
            raise error(f"{source} has {name!r}, which is no parameter of the model; {remedy}.{nearest(name, known)}")
    own = [known[name] for name in names]
    if twice := [name for name, times in Counter(own).items() if times > 1]:
        raise error(f"{source} has {twice[0]!r} twice (tied parameters are one); {remedy}.")
    if mismatch := _mismatch(own, slots, _shapes(model)):
        raise error(f"{where} does not fit {'names' if source == 'names' else 'the model'}: {mismatch}; {remedy}.")
    return own


def _orders(groups: list[list[Slot]], model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield the usual orders of a model's parameters in an optimiser with groups of these sizes, and their labels."""
    shapes, modules = _shapes(model), model.named_modules(remove_duplicate=False)
    norms = tuple(f"{name}." for name, module in modules if name and isinstance(module, nn.LayerNorm))
    decays = {name for name in shapes if not name.startswith(norms) and not NO_DECAY.search(name.lower())}
    matrices = {name for name, shape in shapes.items() if len(shape) >= 2}
    for chosen in (_trained(model), list(shapes)):
        yield "the model's order", chosen
        for label, ahead in (("weight decay first", decays), ("matrices first", matrices)):
            split = [[n for n in chosen if n in ahead], [n for n in chosen if n not in ahead]]
            if [len(part) for part in split] == [len(group) for group in groups]:
                yield label, [*split[0], *split[1]]


def _trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _mismatch(names: list[str], slots: list[Slot], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return why the state does not fit parameters in this order, or None where it does."""
    if len(names) != len(slots):
        return f"it has {len(slots)} parameters, expected {len(names)}"
    for name, slot in zip(names, slots, strict=True):
        if slot.shape not in (None, shapes[name]):
            return f"{name!r} has shape {shapes[name]}, but the state of parameter {slot.key!r} has {slot.shape}"
    return None


def _why_none_fits(slots: list[Slot], model: nn.Module) -> str:
    """Return why no order fits: the counts, or the first shape that differs in the model's own order."""
    shapes, trained = _shapes(model), _trained(model)
    for order in (trained, list(shapes)):
        if len(order) == len(slots):
            return f"in the model's order {_mismatch(order, slots, shapes)}, and no usual split into two groups fits"
    return f"it has {len(slots)} parameters, the model {len(shapes)} ({len(trained)} of them require a gradient)"
