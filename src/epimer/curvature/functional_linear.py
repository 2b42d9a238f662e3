"""Weights that a module multiplies with by `functional.linear` itself, as routers of experts do: no hook sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Record = Callable[[str, Tensor, Tensor], Tensor]
"""(name of the weight, the input, the output) -> the output to continue with"""


def candidates(module: nn.Module, names: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return weight -> role in a linear layer -> parameter, for each matrix among a module's own parameters.

    `names` are those of its parameters that are measured, by attribute; the bias of `weight` is `bias`.
    """
    sides = {attribute: getattr(module, attribute).dim() for attribute in names}
    matrices = {attribute: name for attribute, name in names.items() if sides[attribute] == 2}
    bias = {"bias": names["bias"]} if sides.get("bias") == 1 else {}
    return {name: {"weight": name, **(bias if attribute == "weight" else {})} for attribute, name in matrices.items()}


CASTS = (Tensor.to, Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16)


class LinearCalls(TorchFunctionMode):
    """Passes what `functional.linear` returns for some weights, or casts of them, through `record`, within a block."""

    def __init__(self, weights: Mapping[str, Tensor], record: Record) -> None:
        super().__init__()
        self._names, self._record = {id(W): name for name, W in weights.items()}, record
        self._casts: dict[str, Tensor] = {}  # name -> its weight's last cast, held so that its id stays its own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and record it where it is a product with one of the weights."""
        y = func(*args, **(kwargs or {}))
        if func is functional.linear:
            named = {**dict(zip(("input", "weight"), args, strict=False)), **(kwargs or {})}
            if (name := self._name(named["weight"])) is not None:
                self._casts.pop(name, None)
                return self._record(name, named["input"], y)
        elif func in CASTS and (name := self._names.get(id(args[0]))) is not None:
            self._casts[name] = y
        return y

    def _name(self, W: Tensor) -> str | None:
        """Return the name of the weight that a tensor is, or is a cast of."""
        casts = (name for name, cast in self._casts.items() if cast is W)
        return self._names.get(id(W)) or next(casts, None)
