"""Names of tensors in the network that transformers builds, where a checkpoint's file has others."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.expert_factors import ExpertPart, stored_parts
from epimer.checkpoints.lora import model_config
from epimer.errors import CheckpointError
from epimer.methods.rules import is_stack
from epimer.tasks.loading import check_folder, ends_with, quiet_transformers, renamed_by_transformers

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Network:
    """What transformers calls a checkpoint's tensors."""

    names: dict[str, str]
    """tensor on disk -> its name in the network"""
    linear: frozenset[str]
    """tensors on disk that are weights of linear layers or convolutions"""
    experts: dict[str, tuple[str, ExpertPart]]
    """tensors on disk -> the network's parameter that holds all experts of a layer, in its order, and its part of it"""


def find_network(checkpoint: Checkpoint) -> Network | None:
    """Return the names of tensors in a checkpoint's network; None where transformers knows none.

    The network is that of the config's `architectures`, built without weights; no code but transformers' own is run. A
    tensor that the network has in another form (experts that are stacked, parts that are joined) has no name.
    """
    architectures = model_config(checkpoint).get("architectures")
    if not isinstance(architectures, list) or not architectures or find_spec("transformers") is None:
        return None
    with quiet_transformers(shown=False):
        network = _without_weights(checkpoint, str(architectures[0]))
        if network is None:
            return None
        renamed, _ = renamed_by_transformers(network, checkpoint)
    parameters = dict(network.named_parameters(remove_duplicate=False))
    found = {disk: name for name, disk in renamed.items() if _fits(parameters.get(name), checkpoint.headers[disk])}
    for disk, W in checkpoint.headers.items():
        if disk in found:
            continue
        ends = [name for name in parameters if ends_with(name, disk) and _fits(parameters[name], W)]
        if disk in ends or len(ends) == 1:
            found[disk] = disk if disk in ends else ends[0]
    kinds = (*LINEAR, import_module("transformers.pytorch_utils").Conv1D)
    modules = {f"{name}.weight" for name, module in network.named_modules() if isinstance(module, kinds)}
    linear = frozenset(disk for disk, name in found.items() if name in modules)
    return Network(found, linear, _experts(network, checkpoint))


def _experts(network: nn.Module, checkpoint: Checkpoint) -> dict[str, tuple[str, ExpertPart]]:
    """Return tensor on disk -> the stack of experts that it is, or is part of, in a network."""
    found: dict[str, tuple[str, ExpertPart]] = {}
    for name, W in network.named_parameters():
        if is_stack(name, W.shape):
            module, _, parameter = name.rpartition(".")
            inputs_first = bool(getattr(network.get_submodule(module), "is_transposed", False))  # as PEFT asks it
            inputs, outputs = W.shape[1:] if inputs_first else reversed(W.shape[1:])
            parts = stored_parts(module, parameter, inputs, outputs, checkpoint.headers, inputs_first)
            found |= {disk: (name, part) for disk, part in parts.items()}
    return found


def _fits(parameter: Tensor | None, W: Tensor) -> bool:
    return parameter is not None and parameter.shape == W.shape


def _without_weights(checkpoint: Checkpoint, architecture: str) -> Any:
    """Return the network of a checkpoint's config on the meta device; None where transformers cannot build it."""
    library = import_module("transformers")
    kind = getattr(library, architecture, None)
    try:
        folder = check_folder(checkpoint)
    except CheckpointError:  # it asks for code of its own
        return None
    if kind is None:
        return None
    try:
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            return kind(config)
    except Exception:  # transformers raises errors of many types for configs that it does not know
        return None
