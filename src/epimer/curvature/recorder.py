"""Record the input and output gradient of every layer during an ordinary forward and backward pass, by module hooks.

The model is not changed for good: its parameters are frozen while it runs, so that no weight gradient is formed,
dropout is off, and everything is restored afterwards. A few samples are run first, once, to learn where layers keep
their samples, and to check that every parameter's per-sample gradients add up to its gradient from autograd.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from epimer.curvature import experts, recurrent
from epimer.curvature.attention import is_supported, projection_rules, visible_forward
from epimer.curvature.functional_linear import LinearCalls, candidates
from epimer.curvature.model_calls import eval_mode
from epimer.curvature.padding_masks import PaddingMasks, takes_mask
from epimer.curvature.per_sample_gradients import (
    GradientRule,
    Layout,
    RecordedLayer,
    SampleGradients,
    find_layout,
    gradient_rule,
    is_weight_matrix,
    linear_rule,
)
from epimer.errors import CurvatureError
from epimer.methods.rules import is_stack, member_name, stored_name

PARAMETRISED = "it is parametrised; make it plain first (torch.nn.utils.parametrize.remove_parametrizations)"
UNKNOWN = "its layer is of a kind that is not known"
ELSEWHERE = "it is also used outside its layer, or its layer does not work as its kind does"
MIXED = "its output does not keep the batch's samples apart"


class Recorder:
    """Computes per-sample gradients of a model's parameters, one batch at a time."""

    def __init__(
        self, model: nn.Module, names: Container[str], emit: Callable[[str, list[SampleGradients]], None]
    ) -> None:
        """Find the layers of the parameters in `names`.

        `emit` takes a parameter's name and its per-sample gradients in the batch, one entry for each time it is used.
        """
        self.model, self.emit, self.N, self.masks = model, emit, 0, PaddingMasks()
        self.unsupported: dict[str, str] = {}  # parameters that cannot be measured, and why
        self.matrices: set[str] = set()  # parameters that multiply tokens as one matrix
        every = dict(model.named_parameters())
        self.stacks = {  # parameter that holds all experts of a layer -> expert -> name of its matrix, if measured
            n: {e: one for e in range(len(p)) if (one := member_name(n, e)) in names}
            for n, p in every.items()
            if is_stack(n, p.shape)
        }
        self.parameters = {name: p for name, p in every.items() if name in names or self.stacks.get(name)}
        by_id = {id(p): name for name, p in self.parameters.items()}
        self.layers: dict[str, RecordedLayer] = {}  # by label
        self.recurrent: set[str] = set()  # parameters whose gradient may be there before that of their layer's output
        self.functional: dict[str, Tensor] = {}  # weights whose layer may be a call of functional.linear
        for label, module in model.named_modules():
            self._add_layers(label, module, by_id)
        supported = {name for layer in self.layers.values() for name in layer.names.values()}
        wanted = (one for name in self.parameters for one in self.members(name))
        self.unsupported = {name: UNKNOWN for name in wanted if name not in supported} | self.unsupported
        self.mode = "off"  # off, probe, double, expand (a trial, see `expanding_output`), forward or backward
        # (layer, how many times it was called before) -> where its output keeps its samples
        self.layouts: dict[tuple[str, int], Layout | None] = {}
        self.probed: dict[tuple[str, int], Tensor] = {}  # the same -> its output on the samples that are probed
        self.shared_outputs: list[str] = []  # layers whose output was one for all probed samples
        self.expanded: set[str] = set()  # those whose output is expanded to N copies (position embeddings)
        self._trial = ""
        self._totals: dict[str, tuple[Any, Any]] = {}  # parameter -> its gradient so far, and the rounding in it
        self._early: list[tuple[str, Tensor]] = []  # (parameter of `recurrent`, its gradient)
        self._checks: list[tuple[str, Tensor]] = []  # (parameter, a boolean tensor that must be True)
        self._calls: Counter[str] = Counter()
        self._forward_calls: Counter[str] = Counter()
        self._expected: Counter[str] = Counter()  # parameter -> how many times the forward pass used it
        self._incomplete: defaultdict[str, list[SampleGradients]] = defaultdict(list)
        self._loss_scale = 1.0
        self._half: int | None = None  # the half of the samples whose loss `check_layouts` takes gradients of
        self._without_grad: set[str] = set()
        self._with_grad: set[str] = set()

    def members(self, name: str) -> list[str]:
        """Return what is measured of a parameter: itself, or each expert's matrix of one that holds several."""
        return list(self.stacks[name].values()) if name in self.stacks else [name]

    @property
    def mixed(self) -> list[str]:
        """The parameters whose layer's output does not keep the batch's samples apart."""
        return [name for name, why in self.unsupported.items() if why == MIXED]

    def _add_layers(self, label: str, module: nn.Module, by_id: Mapping[int, str]) -> None:
        """Add the layers that a module's own parameters make up."""
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        names = {attribute: by_id[id(p)] for attribute, p in own if id(p) in by_id}
        if not names:
            return
        if isinstance(module, ParametrizationList):
            self.unsupported |= dict.fromkeys(names.values(), PARAMETRISED)
        elif experts.is_supported(module):
            for product in experts.products(module):
                own_names = experts.expert_names(names, product, self.stacks.get(names.get(product, ""), {}))
                unrouted = partial(experts.made_per_call, product)
                self.layers[f"{label}.{product}"] = RecordedLayer(f"{label}.{product}", module, unrouted, own_names)
                self.matrices |= {name for name in own_names.values() if name not in self.parameters}
        elif recurrent.is_supported(module):
            for part in recurrent.parts(module):
                own_names = {name: names[name] for kind in recurrent.PARAMETERS if (name := f"{kind}_{part}") in names}
                unrolled = partial(experts.made_per_call, part)
                self.layers[f"{label}.{part}"] = RecordedLayer(f"{label}.{part}", module, unrolled, own_names)
            self.matrices |= {name for attribute, name in names.items() if attribute.startswith("weight")}
            self.recurrent |= set(names.values())
        elif rules := _gradient_rules(label, module):
            self.layers |= {layer: RecordedLayer(layer, module, rule, names) for layer, rule in rules.items()}
            self.matrices |= {name for attribute, name in names.items() if is_weight_matrix(module, attribute)}
        else:
            for weight, roles in candidates(module, names).items():
                self.layers[weight] = RecordedLayer(weight, module, linear_rule(), roles)
                self.functional[weight] = self.parameters[weight]
                self.matrices.add(weight)

    @contextmanager
    def attached(self) -> Iterator[Recorder]:
        """Attach the hooks, freeze the parameters and switch dropout off, until the end of the block."""
        flags = {p: p.requires_grad for p in self.model.parameters()}
        with eval_mode(self.model), ExitStack() as stack:
            try:
                for p in flags:
                    p.requires_grad_(False)
                if self.functional:
                    stack.enter_context(
                        LinearCalls(self.functional, lambda name, x, y: self._record(self.layers[name], x, y))
                    )
                for layer in self.layers.values():
                    if gradient_rule(layer.module) is not None:
                        handle = layer.module.register_forward_hook(partial(self._hook, layer), with_kwargs=True)
                        stack.callback(handle.remove)
                for label, module in self.model.named_modules():
                    self._attach(label, module, stack)
                yield self
            finally:
                self.mode = "off"
                for p, flag in flags.items():
                    p.requires_grad_(flag)

    def _attach(self, label: str, module: nn.Module, stack: ExitStack) -> None:
        """Let a module tell of its masks and of the calls that no hook sees, until the stack is unwound."""
        if isinstance(module, nn.Embedding):
            stack.callback(module.register_forward_hook(lambda _, args, output: self._require_grad(output)).remove)
        if module is self.model:
            stack.callback(module.register_forward_pre_hook(self._watch_features, with_kwargs=True).remove)
        if is_supported(module):
            stack.callback(delattr, module, "forward")
            module.forward = visible_forward(module, partial(self._record_projection, label))
        if experts.is_supported(module):
            stack.callback(experts.restore_forward, module, module.__dict__.get("forward"))
            module.forward = experts.visible_forward(module, partial(self._record_product, label))
        if recurrent.is_supported(module):
            stack.callback(delattr, module, "forward")
            module.forward = recurrent.visible_forward(module, partial(self._record_steps, label))
        if takes_mask(module) or module is self.model:
            note = partial(self._note_masks, label)
            stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)

    # --- what is learned about the model, once ---

    @contextmanager
    def probing(self, k: int) -> Iterator[None]:
        """Keep the outputs on k samples; `check_gradients` follows within the block."""
        self.probed.clear()
        self.shared_outputs.clear()
        grads = {name: p.grad for name, p in self.parameters.items()}
        with self._running("probe", k), torch.enable_grad(), ExitStack() as hooks:
            try:
                for name, p in self.parameters.items():
                    p.grad = None
                    if any(part not in self.unsupported for part in self.members(name)):
                        p.requires_grad_()
                        compare = partial(self._compare, name)
                        hooks.callback(p.register_post_accumulate_grad_hook(compare).remove)  # type: ignore[no-untyped-call]
                yield
            finally:
                self._totals.clear()
                self._early.clear()
                for name, p in self.parameters.items():
                    p.requires_grad_(False)
                    p.grad = grads[name]

    @contextmanager
    def doubling(self, k: int) -> Iterator[None]:
        """Learn where layers keep their samples, from their outputs on the k probed samples twice."""
        try:
            with self._running("double", k), torch.no_grad():
                yield
        except Exception:
            self.layouts.clear()
            raise

    def check_gradients(self, loss: Tensor) -> None:
        """Leave out every parameter whose per-sample gradients do not add up to its gradient from autograd."""
        if loss.requires_grad:
            torch.autograd.backward(loss)
            while self._early:
                self._compare_with_total(*self._early.pop())
            self._leave_out_failed(ELSEWHERE)
        for weight in self.functional:
            if (weight, 0) not in self.probed:
                self.unsupported |= dict.fromkeys(self.layers[weight].names.values(), UNKNOWN)

    def check_layouts(self, halves: Sequence[Tensor]) -> None:
        """Leave out every layer that mixes samples.

        `halves` are the losses of the samples 0, 2, 4 … and 1, 3, 5 …: the other samples must have no gradient.
        """
        self._forward_calls = Counter(self._calls)
        self.mode = "backward"
        try:
            for self._half, loss in enumerate(halves):
                if loss.requires_grad:
                    torch.autograd.backward(loss, retain_graph=loss is not halves[-1])
        finally:
            self._half = None
        self._leave_out_failed(MIXED)

    def _leave_out_failed(self, reason: str) -> None:
        """Leave out the parameters that failed a check; all results are read at once, to synchronise a GPU once."""
        passed = torch.stack([check for _, check in self._checks]).tolist() if self._checks else []
        self.unsupported |= {name: reason for (name, _), ok in zip(self._checks, passed, strict=True) if not ok}
        self._checks.clear()

    def _compare(self, name: str, p: Tensor) -> None:
        """Compare a parameter's gradient with the sum of its per-sample gradients."""
        gradient, p.grad = p.grad, None
        assert gradient is not None
        parts = [(one, gradient[e]) for e, one in self.stacks.get(name, {}).items()] or [(name, gradient)]
        for part, g in parts:
            if part in self.recurrent and part not in self._totals:
                self._early.append((part, g))
            else:
                self._compare_with_total(part, g)

    def _compare_with_total(self, name: str, g: Tensor) -> None:
        total, slack = self._totals.pop(name, (torch.zeros_like(g), g.new_zeros(())))
        self._checks.append((name, (g - total).norm() <= slack))

    @contextmanager
    def expanding_output(self, label: str, N: int) -> Iterator[None]:
        """Expand the output of one layer to N copies, to see whether the model's result stays the same."""
        self._trial = label
        with self._running("expand", N), torch.no_grad():
            yield

    # --- measuring ---

    @contextmanager
    def recording(self, N: int) -> Iterator[None]:
        """Record the forward pass of a batch of N samples; `backward` follows within the block."""
        self.masks = PaddingMasks()
        self._expected.clear()
        try:
            with self._running("forward", N):
                yield
        finally:
            self._incomplete.clear()
            self.probed.clear()

    @contextmanager
    def _running(self, mode: str, N: int) -> Iterator[None]:
        self.mode, self.N = mode, N
        self._calls.clear()
        try:
            yield
        finally:
            self.mode = "off"

    def backward(self, loss: Tensor, *, again: bool, loss_scale: float = 1.0) -> None:
        """Emit the per-sample gradients of `loss` in the recorded pass; `again` keeps the graph for another one.

        `loss_scale` magnifies gradients that would underflow in float16; what is emitted is divided by it.
        """
        if not loss.requires_grad:
            problem = "the loss does not depend on any layer that is measured"
            raise CurvatureError(f"{problem}; let loss_fn use the model's output, without torch.no_grad() or detach().")
        if self.mode == "forward":
            self._forward_calls = Counter(self._calls)
        self.mode, self._loss_scale = "backward", loss_scale
        torch.autograd.backward(loss * loss_scale, retain_graph=again)
        with torch.no_grad(), torch.autocast(loss.device.type, enabled=False):
            for name, gradients in self._incomplete.items():
                self.emit(name, gradients)
        self._incomplete.clear()
        if without := self._without_grad - self._with_grad:
            cause = "(torch.no_grad, or reentrant checkpointing of frozen inputs)"
            remedy = "run it with gradients, or leave it out with layers="
            raise CurvatureError(f"layer {min(without)!r} ran without gradients {cause}; {remedy}.")

    # --- hooks ---

    def _hook(
        self, layer: RecordedLayer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if self.mode != "off" and isinstance(output, Tensor):
            return self._record(layer, args[0] if args else next(iter(kwargs.values())), output)
        return None

    def _require_grad(self, x: Tensor) -> Tensor:
        """Return a tensor of the model's inputs as one that requires gradients, and watch at which tokens it has any.

        Reentrant checkpointing needs inputs that require gradients.
        """
        if self.mode in ("forward", "backward") and torch.is_grad_enabled():
            x = x if x.requires_grad else x.detach().requires_grad_().clone()
            self.masks.watch(x, self.N)
        return x

    def _watch_features(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the model's first input require gradients if it holds a vector for each token."""
        inputs: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        first = next((key for key, x in inputs.items() if isinstance(x, Tensor)), None)
        if first is not None and inputs[first].dim() == 3 and inputs[first].is_floating_point():
            inputs[first] = self._require_grad(inputs[first])
        return tuple(inputs.pop(i) for i in range(len(args))), inputs

    def _record_projection(self, attention: str, part: str, x: Tensor, y: Tensor) -> Tensor:
        layer = self.layers.get(f"{attention}.{part}")
        return y if layer is None else self._record(layer, x, y)

    def _record_product(self, label: str, product: str, x: Tensor, y: Tensor, ids: Tensor, per_token: int) -> Tensor:
        layer = self.layers.get(f"{label}.{product}")
        if layer is None:
            return y
        return self._record(replace(layer, rule=experts.expert_rule(layer.module, product, ids, per_token)), x, y)

    def _record_steps(self, label: str, part: str, x: Tensor, y: Tensor, rule: GradientRule) -> Tensor:
        return self._record(replace(self.layers[f"{label}.{part}"], rule=rule), x, y)

    def _note_masks(self, label: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.mode == "forward":
            self.masks.note(label, module, args, kwargs, self.N)

    def _record(self, layer: RecordedLayer, x: Tensor, y: Tensor) -> Tensor:
        """Record one call y = layer(x); return y, as a tensor whose gradient will be seen."""
        ordinal = self._calls[layer.label]
        self._calls[layer.label] += 1
        match self.mode:
            case "off":
                return y
            case "expand":
                return y.expand(self.N, *y.shape[1:]) if layer.label == self._trial else y
            case "probe":
                self.probed[layer.label, ordinal] = y.detach()
                if y.dim() > 2 and len(y) == 1:  # position embeddings: [1, tokens, width]
                    self.shared_outputs.append(layer.label)
                return self._add_up(layer, x, y)
            case "double":
                if (once := self.probed.get((layer.label, ordinal))) is not None:
                    self.layouts[layer.label, ordinal] = find_layout(once, y, self.N)
                return y
            case "forward":
                self._expected.update(layer.names.values())
            case _ if self._forward_calls[layer.label]:
                ordinal %= self._forward_calls[layer.label]  # checkpointing calls it once more
        if not torch.is_grad_enabled():
            self._without_grad.add(layer.label)
            return y
        self._with_grad.add(layer.label)
        return y if self.unsupported.keys() >= set(layer.names.values()) else self._watch(layer, ordinal, x, y)

    def _watch(self, layer: RecordedLayer, ordinal: int, x: Tensor, y: Tensor) -> Tensor:
        """Return y as a tensor whose gradient is turned into per-sample gradients, or checked, when it is there."""
        if layer.label in self.expanded and len(y) == 1 != self.N:
            y, x = y.expand(self.N, *y.shape[1:]), x.expand(self.N, *x.shape[1:])
        layout = self._layout(layer, ordinal, y)
        if layout is None:
            self.unsupported |= dict.fromkeys(layer.names.values(), MIXED)
            return y
        y = y if y.requires_grad else y.detach().requires_grad_().clone()
        N, version, padding = self.N, x._version, self.masks
        masks, measured = padding.of_input(layer.label, x), layer.names.keys()

        def on_gradient(g: Tensor) -> None:
            if x._version != version:
                problem = f"the input of layer {layer.label!r} was changed in place after its use"
                remedy = "use an operation that is not in place there"
                raise CurvatureError(f"{problem}, so its curvature cannot be measured; {remedy}.")
            if self._half is not None:
                if not layout.single:
                    zero = ~layout.samples_first(g, N)[1 - self._half :: 2].any()
                    self._checks += [(name, zero) for name in layer.names.values()]
                return
            with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
                g = g if self._loss_scale == 1 else g.float() / self._loss_scale
                gradients = layer.rule(layer.module, x, g, layout, N)
                used = {attribute: use for attribute, use in gradients.items() if attribute in measured}
                self._emit(layer, {attribute: padding.apply(use, masks) for attribute, use in used.items()})

        y.register_hook(on_gradient)  # type: ignore[no-untyped-call]
        return y

    def _add_up(self, layer: RecordedLayer, x: Tensor, y: Tensor) -> Tensor:
        """Add the gradients through one probed call to the totals that `check_gradients` compares."""
        if not torch.is_grad_enabled() or not y.requires_grad:
            return y

        def on_gradient(g: Tensor) -> None:
            with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
                try:
                    gradients = layer.rule(layer.module, x, g, Layout(single=True), 1)
                    used = {name: gradients[part] for part, name in layer.names.items() if part in gradients}
                    totals = {name: use.total(self._shape(name)) for name, use in used.items()}
                except Exception:  # a layer that does not work as its class says
                    self.unsupported |= dict.fromkeys(layer.names.values(), ELSEWHERE)
                    return
                dtypes = {g.dtype, *(p.dtype for p in layer.module.parameters())}  # a router may cast its weight
                rounding = 1e-3 if dtypes <= {torch.float32, torch.float64} else 5e-2
                for name, (total, size) in totals.items():
                    before, slack = self._totals.get(name, (0.0, 0.0))
                    self._totals[name] = total + before, slack + rounding * size

        y.register_hook(on_gradient)  # type: ignore[no-untyped-call]
        return y

    def _shape(self, name: str) -> torch.Size:
        """Return the shape of what is measured under a name."""
        return self.parameters[name].shape if name in self.parameters else self.parameters[stored_name(name)].shape[1:]

    def _emit(self, layer: RecordedLayer, gradients: Mapping[str, SampleGradients]) -> None:
        """Emit gradients of parameters that are used once; keep others until the backward pass is over."""
        for attribute, name in layer.names.items():
            if attribute not in gradients or name in self.unsupported:
                continue
            if self._expected[name] <= 1:
                self.emit(name, [gradients[attribute]])
            else:
                self._incomplete[name].append(gradients[attribute])

    def _layout(self, layer: RecordedLayer, ordinal: int, y: Tensor) -> Layout | None:
        """Return where a layer's output keeps its samples: as probed, or first where that is not ambiguous."""
        if self.N == 1:
            return Layout(single=True)
        key = layer.label, ordinal
        if layer.label in self.expanded:
            return Layout()
        if key not in self.layouts:
            unambiguous = y.dim() > 1 and len(y) == self.N and self.N not in y.shape[1:-1]
            return Layout() if unambiguous else None
        layout = self.layouts[key]
        if layout is None or not layout.fits(y, self.N):
            return None
        return None if layout.flat and self.masks.may_be_packed(y.shape[layout.dim]) else layout


def _gradient_rules(label: str, module: nn.Module) -> dict[str, GradientRule]:
    """Return the rule of a module that is one layer, or those of an attention's projections, by label."""
    if (rule := gradient_rule(module)) is not None:
        return {label: rule}
    return {f"{label}.{part}": rule for part, rule in projection_rules(module).items()} if is_supported(module) else {}
