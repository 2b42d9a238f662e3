"""LoRA factors of stacked experts, as PEFT stores them for `target_parameters`.

A network holds E experts as one parameter, (E, out, in) or (E, in, out), whose factors PEFT joins: A is (E·r, in), one
expert after the other, and B is (out, r·E), the experts innermost. The file of a checkpoint may hold that parameter, or
every expert apart, with the gate's and the other half of what the network joins as tensors of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from epimer.geometry.linalg import LowRank

APART = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
"""parameter of a network -> the tensors that one of its experts may be stored as, one below the other"""
EXPERT = re.compile(r"(?:(.*)\.)?([^.]+)\.experts\.([0-9]{1,6})\.(\w+)\.weight")


class ExpertPart(NamedTuple):
    """Which part of joined factors one stored tensor is changed by."""

    experts: int
    """how many there are, E"""
    number: int | None = None
    """the expert that the tensor holds; None for the stack of all"""
    outputs: tuple[int, int] = (0, 0)
    """where its rows lie among the expert's outputs"""
    inputs_first: bool = False
    """whether the stack is (E, in, out)"""

    def factors(self, A: Tensor, B: Tensor) -> LowRank:
        """Return the factors of one expert's tensor."""
        assert self.number is not None
        start, stop = self.outputs
        return LowRank(
            self._by_expert(B)[start:stop, :, self.number], A.view(self.experts, -1, A.shape[1])[self.number]
        )

    def member(self, number: int, A: Tensor, B: Tensor) -> LowRank:
        """Return the factors of one expert of a stack."""
        factors = self._replace(number=number, outputs=(0, len(B))).factors(A, B)
        return factors.T if self.inputs_first else factors

    def stack(self, A: Tensor, B: Tensor, rows: tuple[int, int] | None) -> Tensor:
        """Return what factors add to a stack, or to the experts `rows` of it."""
        chosen = slice(None) if rows is None else slice(*rows)
        A_eri = A.view(self.experts, -1, A.shape[1])[chosen]
        B_eor = self._by_expert(B).movedim(2, 0)[chosen]
        product = B_eor @ A_eri
        return product.mT if self.inputs_first else product

    def _by_expert(self, B: Tensor) -> Tensor:
        return B.reshape(len(B), -1, self.experts)


def stored_parts(
    module: str,
    parameter: str,
    inputs: int,
    outputs: int,
    headers: Mapping[str, Tensor],
    inputs_first: bool | None = None,
) -> dict[str, ExpertPart]:
    """Return tensor -> its part of the factors of a parameter, whose A has `inputs` columns and B `outputs` rows.

    Empty where no tensors of these names and shapes are there, or where their shape leaves open which side is which and
    `inputs_first` does not tell it.
    """
    if (stack := _only(name for name in headers if _same(name, f"{module}.{parameter}"))) is not None:
        shape = tuple(headers[stack].shape)
        if len(shape) != 3 or shape[0] < 2 or {*shape[1:]} != {inputs, outputs}:
            return {}
        if inputs != outputs:
            inputs_first = shape[1] == inputs
        return {} if inputs_first is None else {stack: ExpertPart(shape[0], inputs_first=inputs_first)}
    apart = _apart(module, headers)
    for names in APART.get(parameter, ()):
        experts = [{word: apart.get((e, word)) for word in names} for e in range(len({e for e, _ in apart}))]
        if len(experts) > 1 and all(None not in expert.values() for expert in experts):
            return _joined(experts, inputs, outputs, headers)
    return {}


def _joined(
    experts: list[dict[str, str | None]], inputs: int, outputs: int, headers: Mapping[str, Tensor]
) -> dict[str, ExpertPart]:
    """Return the parts of experts that are stored apart, halves one below the other; empty where shapes differ."""
    parts = dict[str, ExpertPart]()
    for e, expert in enumerate(experts):
        start = 0
        for name in expert.values():
            W = headers[str(name)]
            if W.dim() != 2 or W.shape[1] != inputs:
                return {}
            parts[str(name)] = ExpertPart(len(experts), e, (start, start + len(W)))
            start += len(W)
        if start != outputs:
            return {}
    return parts


def _apart(module: str, headers: Mapping[str, Tensor]) -> dict[tuple[int, str], str]:
    """Return (expert, word) -> tensor of the experts of a block that are stored apart, by whatever word for its layer.

    Mixtral's network has `layers.0.mlp.experts`, its file `layers.0.block_sparse_moe.experts.0.w1.weight`.
    """
    block = module.removesuffix(".experts").rpartition(".")[0]
    found: dict[str, dict[tuple[int, str], str]] = {}
    for name in headers:
        if (match := EXPERT.fullmatch(name)) is not None and _same(match[1] or "", block):
            found.setdefault(match[2], {})[int(match[3]), match[4]] = name
    return next(iter(found.values())) if len(found) == 1 else {}


def _same(one: str, other: str) -> bool:
    """Whether one of two dotted names ends with the other."""
    return f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")


def _only(names: Iterator[str] | Iterable[str]) -> str | None:
    found = list(names)
    return found[0] if len(found) == 1 else None
