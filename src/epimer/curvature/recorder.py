"""What one ordinary forward and backward pass does to every layer: module hooks that hand on inputs and gradients.

Nothing of the model is changed for good: parameters are frozen while it runs, so that no weight gradient is formed,
dropout is off, and everything is put back afterwards. A few samples are run first, once, to learn where layers keep
their samples, and to check every parameter's uses against its true gradient.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from epimer.curvature.attention import can_open, open_forward, parts
from epimer.curvature.per_sample_gradients import (
    Layout,
    Reader,
    Use,
    find_layout,
    per_token,
    reader_of,
    total_gradient,
    two_sided,
)
from epimer.errors import CurvatureError

MASKS = {"attention_mask": True, "src_key_padding_mask": False, "key_padding_mask": False}
"""arguments that say which tokens are real, and whether they mark the real ones or the padding"""
ELSEWHERE = "it is also used outside its layer, or its layer does not work as its kind does"
MIXED = "its output does not keep the batch's samples apart"


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
        """which of the batch's tokens are real, N x tokens, as the outermost module was told"""
        self._masks: dict[str, list[Tensor]] = {}
        self._memories: dict[int, Tensor] = {}
        """where an encoder's output lies, that a decoder reads -> which of its tokens are real"""
        self.unread: dict[str, str] = {}
        """parameters that cannot be measured, and why"""
        self.matrices: set[str] = set()
        """parameters that multiply tokens as one matrix"""
        self.wanted = {name: p for name, p in model.named_parameters() if name in names}
        by_id = {id(p): name for name, p in self.wanted.items()}
        self.sources: list[Source] = []
        for label, module in model.named_modules():
            self._find(label, module, by_id)
        known = {name for source in self.sources for name in source.names.values()}
        for name in self.wanted:
            if name not in known:
                self.unread[name] = "its layer is of a kind that is not known"
        self.mode = "off"
        self.layouts: dict[tuple[str, int], Layout | None] = {}
        self.probed: dict[tuple[str, int], Tensor] = {}
        self.probe_size = 0
        self.singles: dict[str, None] = {}
        """sources whose output was one for all samples in the last trial"""
        self.expanding: set[str] = set()
        """sources whose output is one for all samples, and may be repeated for each"""
        self._totals: dict[str, tuple[Any, Any]] = {}
        """name -> the sum of its uses so far, and by how much rounding may have changed it"""
        self._verdicts: list[tuple[str, Tensor]] = []
        self._calls: Counter[str] = Counter()
        self._forward_calls: Counter[str] = Counter()
        self._planned: Counter[str] = Counter()
        self._waiting: defaultdict[str, list[Use]] = defaultdict(list)
        self._gain, self._tried, self._checking = 1.0, "", False
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
        else:
            return
        self.matrices |= {name for attribute, name in wanted.items() if two_sided(module, attribute)}

    @contextmanager
    def watching(self) -> Iterator[Tape]:
        """Attach the hooks, freeze the parameters and switch dropout off, until the end of the block."""
        asked = {p: p.requires_grad for p in self.model.parameters()}
        with still(self.model), ExitStack() as stack:
            try:
                for p in asked:
                    p.requires_grad_(False)
                for source in self.sources:
                    if not isinstance(source.module, nn.MultiheadAttention):
                        handle = source.module.register_forward_hook(self._hook(source), with_kwargs=True)
                        stack.callback(handle.remove)
                for label, module in self.model.named_modules():
                    if isinstance(module, nn.Embedding):  # where gradients end, for checkpointing's sake at least here
                        stack.callback(module.register_forward_hook(self._start).remove)
                    if can_open(module):
                        stack.callback(delattr, module, "forward")
                        module.forward = open_forward(module, self._part_of(label))
                    if MASKS.keys() & _parameters(module) or module is self.model:
                        look = partial(self._look_for_mask, label)
                        stack.callback(module.register_forward_pre_hook(look, with_kwargs=True).remove)
                yield self
            finally:
                self.mode = "off"
                for p, flag in asked.items():
                    p.requires_grad_(flag)

    @contextmanager
    def probing(self, k: int) -> Iterator[None]:
        """Note the outputs on a few samples; `verify` follows within the block."""
        self.probed.clear()
        self._begin("probe", k)
        self.probe_size = k
        held = {name: p.grad for name, p in self.wanted.items()}
        handles = []
        try:
            for name, p in self.wanted.items():
                p.grad = None
                if name not in self.unread:
                    p.requires_grad_()
                    handles.append(p.register_post_accumulate_grad_hook(self._compare(name)))  # type: ignore[no-untyped-call]
            with torch.enable_grad():
                yield
        finally:
            self.mode = "off"
            self._totals.clear()
            for handle in handles:
                handle.remove()
            for name, p in self.wanted.items():
                p.requires_grad_(False)
                p.grad = held[name]

    def verify(self, loss: Tensor) -> None:
        """Leave out every parameter whose uses do not add up to its gradient."""
        if loss.requires_grad:
            torch.autograd.backward(loss)
            self._judge(ELSEWHERE)

    def _judge(self, reason: str) -> None:
        """Leave out the parameters that any verdict was against; all are asked for at once, which a GPU prefers."""
        good = torch.stack([verdict for _, verdict in self._verdicts]).tolist() if self._verdicts else []
        self.unread |= {name: reason for (name, _), fine in zip(self._verdicts, good, strict=True) if not fine}
        self._verdicts.clear()

    def _compare(self, name: str) -> Callable[[Tensor], None]:
        """Return a hook that compares a parameter's gradient with its uses as soon as both are there."""

        def compare(p: Tensor) -> None:
            gradient, p.grad = p.grad, None
            assert gradient is not None
            found, slack = self._totals.pop(name, (torch.zeros_like(p), p.new_zeros(())))
            self._verdicts.append((name, (gradient - found).norm() <= slack))

        return compare

    @contextmanager
    def trying(self, label: str, N: int) -> Iterator[None]:
        """Repeat the output of one layer for every sample, to see whether the model takes it."""
        self._begin("try", N)
        self._tried, self.singles = label, {}
        try:
            with torch.no_grad():
                yield
        finally:
            self.mode = "off"

    @contextmanager
    def recording(self, N: int) -> Iterator[None]:
        """Record the forward pass of a batch of N samples; `backward` follows within the block."""
        self._begin("forward", N)
        self.mask = None
        self._masks.clear()
        self._memories.clear()
        self._planned.clear()
        try:
            yield
        finally:
            self.mode = "off"
            self._waiting.clear()
            self.probed.clear()

    def _begin(self, mode: str, N: int) -> None:
        self.mode, self.N = mode, N
        self._calls.clear()

    def backward(self, loss: Tensor, *, again: bool, gain: float = 1.0) -> None:
        """Send the gradient of `loss` back through the recorded pass.

        `again` keeps the graph for another pass; `gain` magnifies gradients on their way, where they might vanish.
        """
        if not loss.requires_grad:
            raise CurvatureError(
                "the loss does not depend on any layer that is measured; "
                "let loss_fn use the model's output, without torch.no_grad() or detach()."
            )
        if self.mode == "forward":
            self._forward_calls = Counter(self._calls)
        self.mode, self._gain = "backward", gain
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

    def check_layouts(self, loss: Tensor) -> None:
        """Leave out every layer that mixes samples up: the gradients of `loss`, of every second one, must be 0 else."""
        if loss.requires_grad:
            self._forward_calls = Counter(self._calls)
            self.mode, self._checking = "backward", True
            try:
                torch.autograd.backward(loss)
                self._judge(MIXED)
            finally:
                self._checking = False

    def _hook(self, source: Source) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if self.mode == "off" or not isinstance(output, Tensor):
                return None
            return self._seen(source, args[0] if args else next(iter(kwargs.values())), output)

        return hook

    def _start(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.mode in ("forward", "backward") and torch.is_grad_enabled() and not output.requires_grad:
            return output.detach().requires_grad_().clone()
        return output

    def _part_of(self, label: str) -> Callable[[str, Tensor, Tensor], Tensor]:
        own = {source.label: source for source in self.sources}

        def seen(part: str, x: Tensor, y: Tensor) -> Tensor:
            source = own.get(f"{label}.{part}")
            return y if source is None else self._seen(source, x, y)

        return seen

    def _seen(self, source: Source, x: Tensor, y: Tensor) -> Tensor:
        """Take note of one call; the output comes back, as a tensor whose gradient will be seen."""
        ordinal = self._calls[source.label]
        self._calls[source.label] += 1
        match self.mode:
            case "off":
                return y
            case "try":
                if y.dim() > 2 and len(y) == 1:  # positions: one x tokens x width
                    self.singles[source.label] = None
                return y.expand(self.N, *y.shape[1:]) if source.label == self._tried else y
            case "probe":
                self.probed[source.label, ordinal] = y.detach()
                return self._verified(source, x, y)
            case "forward":
                self._planned.update(source.names.values())
            case _ if self._forward_calls[source.label]:
                ordinal %= self._forward_calls[source.label]  # checkpointing runs it once more
        if not torch.is_grad_enabled():
            self._blind.add(source.label)
            return y
        self._live.add(source.label)
        if self.unread.keys() >= set(source.names.values()):
            return y
        if source.label in self.expanding and len(y) == 1 != self.N:
            y, x = y.expand(self.N, *y.shape[1:]), x.expand(self.N, *x.shape[1:])
        layout = self._layout(source, ordinal, y)
        if layout is None:
            for name in source.names.values():
                self.unread[name] = MIXED
            return y
        y = y if y.requires_grad else y.detach().requires_grad_().clone()
        N, version, masks = self.N, x._version, self._masks_of(source, x)

        def fired(g: Tensor) -> None:
            if x._version != version:
                raise CurvatureError(
                    f"the input of layer {source.label!r} was changed in place after its use, so its curvature cannot "
                    "be measured; use an operation that is not in place there."
                )
            if self._checking:
                if not layout.single:
                    clean = ~layout.samples_first(g, N)[1::2].any()
                    self._verdicts += [(name, clean) for name in source.names.values()]
                return
            with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
                g = g if self._gain == 1 else g.float() / self._gain
                uses = source.reader(source.module, x, g, layout, N)
                self._fired(source, {attribute: _masked(use, masks) for attribute, use in uses.items()})

        y.register_hook(fired)  # type: ignore[no-untyped-call]
        return y

    def _verified(self, source: Source, x: Tensor, y: Tensor) -> Tensor:
        """Let the uses of a probed call be added up, all samples together."""
        if not torch.is_grad_enabled() or not y.requires_grad:
            return y

        def fired(g: Tensor) -> None:
            with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
                try:
                    uses = source.reader(source.module, x, g, Layout(single=True), 1)
                    totals = {
                        name: total_gradient(uses[a], self.wanted[name].shape)
                        for a, name in source.names.items()
                        if a in uses
                    }
                except Exception:  # a layer that is not what its class says
                    self.unread |= dict.fromkeys(source.names.values(), ELSEWHERE)
                    return
                rounding = 1e-3 if g.dtype in (torch.float32, torch.float64) else 5e-2
                for name, (total, size) in totals.items():
                    before, slack = self._totals.get(name, (0.0, 0.0))
                    self._totals[name] = total + before, slack + rounding * size

        y.register_hook(fired)  # type: ignore[no-untyped-call]
        return y

    def _fired(self, source: Source, uses: Mapping[str, Use]) -> None:
        for attribute, name in source.names.items():
            if attribute not in uses or name in self.unread:
                continue
            if self._planned[name] <= 1:
                self.emit(name, [uses[attribute]])
            else:  # a sample's gradient is the sum over all uses
                self._waiting[name].append(uses[attribute])

    def _layout(self, source: Source, ordinal: int, y: Tensor) -> Layout | None:
        """Return where a layer keeps its samples: as it was found, or by custom where that is not ambiguous."""
        if self.N == 1:
            return Layout(single=True)
        key = source.label, ordinal
        if source.label in self.expanding:
            return Layout()
        if (probe := self.probed.get(key)) is not None:
            self.layouts[key] = find_layout(y, probe, self.N, self.probe_size)
        elif key not in self.layouts:
            custom = y.dim() > 1 and len(y) == self.N and self.N not in y.shape[1:-1]
            return Layout() if custom else None
        found = self.layouts[key]
        return found if found is not None and found.fits(y, self.N) else None

    def _look_for_mask(self, label: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note which tokens are real within a module, where its arguments say so."""
        if self.mode != "forward":
            return
        try:
            bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            return
        given = {**bound, **bound.get("kwargs", {})}
        masks = [mask for name, real in MASKS.items() if (mask := self._mask(given.get(name), real)) is not None]
        source = self._mask(given.get("encoder_attention_mask"), True)
        if source is not None:  # a decoder: its own tokens are all real unless it says otherwise
            tokens = next((t for t in given.values() if isinstance(t, Tensor) and t.dim() > 1), source)
            masks = masks or [torch.ones_like(source[:, :1]).expand(-1, tokens.shape[1])]
            if isinstance(memory := given.get("encoder_hidden_states"), Tensor):
                self._memories[memory.data_ptr()] = source
        if masks:
            self._masks[label] = masks
            self.mask = masks[0] if self.mask is None else self.mask

    def _mask(self, given: Any, real: bool) -> Tensor | None:
        """Return which tokens are real, N x tokens, if this is such a mask."""
        if not isinstance(given, Tensor) or given.dim() != 2 or len(given) != self.N:
            return None
        if given.is_floating_point() and not real:
            return given == 0
        return given.bool() if real else ~given.bool()

    def _masks_of(self, source: Source, x: Tensor) -> list[Tensor]:
        """Return the masks of a layer's input: an encoder's output, or as the innermost module around was told."""
        if x.data_ptr() in self._memories:
            return [self._memories[x.data_ptr()]]
        label = source.label
        while label not in self._masks and label:
            label = label.rpartition(".")[0]
        return self._masks.get(label, [])


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode, and layer by layer instead of by torch's fused attention; leave it as it was."""
    training = {module: module.training for module in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, flag in training.items():
            module.training = flag


def _masked(use: Use, masks: list[Tensor]) -> Use:
    """Return a use with the mask that fits it."""
    shape = per_token(use).shape[:2]
    return replace(use, mask=next((mask for mask in masks if mask.shape == shape), None))


def _parameters(module: nn.Module) -> set[str]:
    """Return the names of what a module's forward takes; none where that cannot be told, as of traced ones."""
    try:
        return set(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return set()


def quietly(run: Callable[[], Any]) -> Any:
    """Run something that may fail; return what it returned, or the exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run()
        except Exception as error:
            return error
