"""What one ordinary forward and backward pass does to every layer: module hooks that hand on inputs and gradients.

Nothing of the model is changed for good: parameters are frozen while it runs, so that no weight gradient is formed,
dropout is off, and everything is put back afterwards.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from epimer.curvature.attention import can_open, open_forward, parts
from epimer.curvature.uses import Layout, Reader, Use, find_layout, reader_of
from epimer.errors import CurvatureError

MASKS = {"attention_mask": True, "src_key_padding_mask": False, "key_padding_mask": False}
"""arguments that say which tokens are real, and whether they mark the real ones or the padding"""


@dataclass(frozen=True)
class Source:
    """A place in the model where parameters are used."""

    label: str
    module: nn.Module
    reader: Reader
    names: Mapping[str, str]
    """attribute -> name of the parameter, for those that are wanted"""


class Tape:
    """Records one batch at a time; every parameter's uses are handed on as soon as they are complete."""

    def __init__(self, model: nn.Module, names: Container[str], emit: Callable[[str, list[Use]], None]) -> None:
        """Prepare to watch `model`.

        Args:
            model: what will be called.
            names: the parameters that are wanted.
            emit: called with a name and all its uses in the batch.
        """
        self.model, self.emit = model, emit
        self.N = 0
        self.mask: Tensor | None = None
        self.unread: dict[str, str] = {}
        """parameters that cannot be measured, and why"""
        by_id = {id(p): name for name, p in model.named_parameters() if name in names}
        self.sources: list[Source] = []
        for label, module in model.named_modules():
            self._find(label, module, by_id)
        known = {name for source in self.sources for name in source.names.values()}
        for name in by_id.values():
            if name not in known:
                self.unread[name] = "its layer is of a kind that is not known"
        self.mode = "off"
        self.layouts: dict[tuple[str, int], Layout | None] = {}
        self._probed: dict[tuple[str, int], Tensor] = {}
        self._probe_size = 0
        self._calls: Counter[str] = Counter()
        self._forward_calls: Counter[str] = Counter()
        self._planned: Counter[str] = Counter()
        self._waiting: defaultdict[str, list[Use]] = defaultdict(list)
        self._gain = 1.0
        self._blind: set[str] = set()
        self._live: set[str] = set()

    def _find(self, label: str, module: nn.Module, by_id: Mapping[int, str]) -> None:
        wanted = {
            attribute: by_id[id(p)]
            for attribute, p in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in by_id
        }
        if not wanted:
            return
        reader = reader_of(module)
        if reader is not None:
            self.sources.append(Source(label, module, reader, wanted))
        elif can_open(module):
            for part, reader in parts(module).items():
                self.sources.append(Source(f"{label}.{part}", module, reader, wanted))

    @contextmanager
    def watching(self) -> Iterator[Tape]:
        """Attach the hooks, freeze the parameters and switch dropout off, until the end of the block."""
        training = {module: module.training for module in self.model.modules()}
        asked = {p: p.requires_grad for p in self.model.parameters()}
        fast = torch.backends.mha.get_fastpath_enabled()
        with ExitStack() as stack:
            try:
                self.model.eval()
                for p in asked:
                    p.requires_grad_(False)
                torch.backends.mha.set_fastpath_enabled(False)  # it would run past the hooks
                for source in self.sources:
                    if not can_open(source.module):
                        handle = source.module.register_forward_hook(self._hook(source), with_kwargs=True)
                        stack.callback(handle.remove)
                for label, module in self.model.named_modules():
                    if can_open(module):
                        module.forward = open_forward(module, self._part_of(label))
                        stack.callback(delattr, module, "forward")
                for module in self.model.modules():
                    if module is self.model or "Transformer" in type(module).__name__ or can_open(module):
                        handle = module.register_forward_pre_hook(self._look_for_mask, with_kwargs=True)
                        stack.callback(handle.remove)
                yield self
            finally:
                self.mode = "off"
                torch.backends.mha.set_fastpath_enabled(fast)
                for p, flag in asked.items():
                    p.requires_grad_(flag)
                for module, flag in training.items():
                    module.training = flag

    @contextmanager
    def probing(self, k: int) -> Iterator[None]:
        """Note the outputs on a few samples, to learn from the next batch where layers keep their samples."""
        self._probed.clear()
        self.mode, self._probe_size = "probe", k
        self._calls.clear()
        try:
            with torch.no_grad():
                yield
        finally:
            self.mode = "off"

    @contextmanager
    def recording(self, N: int) -> Iterator[None]:
        """Record the forward pass of a batch of N samples; `backward` follows within the block."""
        self.N, self.mask, self.mode = N, None, "forward"
        self._calls.clear()
        self._planned.clear()
        try:
            yield
        finally:
            self.mode = "off"
            self._waiting.clear()
            self._probed.clear()

    def backward(self, loss: Tensor, *, again: bool, gain: float = 1.0) -> None:
        """Send the gradient of `loss` back through the recorded pass.

        `again` keeps the graph for another pass; `gain` magnifies gradients on their way, where they might vanish.
        """
        if not loss.requires_grad:
            raise CurvatureError(
                "the loss does not depend on any layer that is measured; "
                "let loss_fn use the model's output, without torch.no_grad() or detach()."
            )
        self.mode = "backward"
        self._forward_calls = Counter(self._calls)
        self._gain = gain
        torch.autograd.backward(loss * gain, retain_graph=again)
        with torch.no_grad(), torch.autocast(loss.device.type, enabled=False):
            for name, uses in self._waiting.items():
                self.emit(name, uses)
        self._waiting.clear()
        blind = self._blind - self._live
        if blind:
            raise CurvatureError(
                f"layer {min(blind)!r} ran without gradients (torch.no_grad, or reentrant checkpointing of frozen "
                "inputs); run it with gradients, or leave it out with layers=."
            )

    def _hook(self, source: Source) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if self.mode == "off" or not isinstance(output, Tensor):
                return None
            return self._seen(source, args[0] if args else next(iter(kwargs.values())), output)

        return hook

    def _part_of(self, label: str) -> Callable[[str, Tensor, Tensor], Tensor]:
        own = {source.label: source for source in self.sources}

        def seen(part: str, x: Tensor, y: Tensor) -> Tensor:
            source = own.get(f"{label}.{part}")
            return y if source is None else self._seen(source, x, y)

        return seen

    def _seen(self, source: Source, x: Tensor, y: Tensor) -> Tensor:
        """Take note of one call; the output comes back, as a tensor whose gradient will be seen."""
        if self.mode == "off":
            return y
        ordinal = self._calls[source.label]
        self._calls[source.label] += 1
        if self.mode == "probe":
            self._probed[source.label, ordinal] = y.detach()
            return y
        if self.mode == "forward":
            self._planned.update(source.names.values())
        elif self._forward_calls[source.label]:
            ordinal %= self._forward_calls[source.label]  # checkpointing runs it once more
        if not torch.is_grad_enabled():
            self._blind.add(source.label)
            return y
        self._live.add(source.label)
        layout = self._layout(source, ordinal, y)
        if layout is None:
            for name in source.names.values():
                self.unread[name] = "its output does not keep the batch's samples apart"
            return y
        if not layout.single and y.shape[layout.dim] == 1 != self.N:  # the same for every sample, as positions are
            y, x = y.expand(self.N, *y.shape[1:]), x.expand(self.N, *x.shape[1:])
        if not y.requires_grad:
            y = y.detach().requires_grad_().clone()
        N, version = self.N, x._version

        def fired(g: Tensor) -> None:
            if x._version != version:
                raise CurvatureError(
                    f"the input of layer {source.label!r} was changed in place after its use, so its curvature cannot "
                    "be measured; use an operation that is not in place there."
                )
            with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
                g = g if self._gain == 1 else g.float() / self._gain
                self._fired(source, source.reader(source.module, x, g, layout, N))

        y.register_hook(fired)  # type: ignore[no-untyped-call]
        return y

    def _fired(self, source: Source, uses: Mapping[str, Use]) -> None:
        for attribute, name in source.names.items():
            if attribute not in uses:
                continue
            if self._planned[name] <= 1:
                self.emit(name, [uses[attribute]])
            else:  # a sample's gradient is the sum over all uses
                self._waiting[name].append(uses[attribute])

    def _layout(self, source: Source, ordinal: int, y: Tensor) -> Layout | None:
        if self.N == 1:
            return Layout(single=True)
        key = source.label, ordinal
        probe = self._probed.get(key)
        if key not in self.layouts or probe is not None:
            if probe is None:
                fits = y.dim() and len(y) in (1, self.N)
                return Layout() if fits else None
            same = probe.shape == y.shape
            self.layouts[key] = (
                (Layout() if len(y) == 1 else None) if same else find_layout(y, probe, self.N, self._probe_size)
            )
        return self.layouts[key]

    def _look_for_mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.mode != "forward" or self.mask is not None:
            return
        try:
            bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        except TypeError:
            return
        given = {**bound, **bound.get("kwargs", {})}
        for name, real in MASKS.items():
            mask = given.get(name)
            if isinstance(mask, Tensor) and mask.dim() == 2 and len(mask) == self.N:
                if mask.is_floating_point() and not real:
                    self.mask = mask == 0
                else:
                    self.mask = mask.bool() if real else ~mask.bool()
                return
