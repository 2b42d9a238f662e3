"""Which tensors a matrix method treats as matrices, and what happens to the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

RULES = ("matrix", "average", "fisher", "copy", "skip")

# Tables of tokens, positions and classes are two-dimensional but not linear maps of one feature space into
# another: their rows belong to single tokens or classes. By default they are averaged.
TABLES = (
    "*embed_tokens*", "*embed_positions*", "*embeddings.*", "*embedding.weight", "*embedding", "*embed.weight",
    "*pos_embed*",
)  # fmt: skip
OTHERS = ("*cls_token*", "*relative_attention_bias*", "cls.predictions.*", "*text_projection*", "*final_logits_bias")
STACKED_VECTORS = ("*.experts.*bias", "experts.*bias")  # one bias per expert
MODULES = ("wte", "wpe", "lm_head", "head", "heads", "classifier", "score", "qa_outputs")
ANYWHERE = ("shared.weight", *(f"{module}.*" for module in MODULES))
"""patterns of a name, or of what follows a dot in it"""
NOT_MATRICES = (*TABLES, *OTHERS, *STACKED_VECTORS, *ANYWHERE, *(f"*.{pattern}" for pattern in ANYWHERE))

STATISTICS = ("running_mean", "running_var")
"""what BatchNorm has measured of its inputs; beyond its models a merge would have variances below 0"""
COUNTERS = ("num_batches_tracked",)
AVERAGED = ("average", "statistic")
"""rules under which tensors are averaged whatever the method is"""

CONV1D = tuple(f"{layer}.weight" for layer in ("c_attn", "q_attn", "c_proj", "c_fc"))
"""how the names of GPT-2's Conv1D layers end"""


def matching(name: str, rules: Sequence[tuple[str, str]]) -> str | None:
    """Return the rule of the first pattern that matches `name` (a glob over the whole name)."""
    return next((rule for pattern, rule in rules if fnmatchcase(name, pattern)), None)


def is_statistic(name: str) -> bool:
    """Whether a tensor is a running mean or variance of a normalisation layer."""
    return name.rpartition(".")[2] in STATISTICS


def is_counter(name: str) -> bool:
    """Whether a tensor counts the batches that a normalisation layer has seen."""
    return name.rpartition(".")[2] in COUNTERS


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is a matrix to a matrix method unless a rule says otherwise."""
    if len(shape) != 2 and not is_stack(name, shape):
        return False
    return not any(fnmatchcase(name, pattern) for pattern in NOT_MATRICES)


def is_stack(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor holds the matrices of all experts of a layer, E x m x n; other 3-D tensors are convolutions."""
    return len(shape) == 3 and min(shape) > 0 and min(shape[1:]) > 1 and "experts" in name.split(".")[:-1]


def member_name(name: str, e: int) -> str:
    """Return what the matrix of expert `e` in a stack is called, by curvature and bases too."""
    return f"{name}[{e}]"


def stored_name(name: str) -> str:
    """Return the name of the tensor that holds a matrix: of the stack, for one of its members."""
    return name[: name.rindex("[")] if name.endswith("]") and "[" in name else name


def with_members(names: Mapping[str, str], matrices: Iterable[str]) -> dict[str, str]:
    """Return other names of tensors, and of those `matrices` that are members of one of them."""
    tensors = {name: stored_name(name) for name in matrices}
    return {**names, **{name: names[one] + name[len(one) :] for name, one in tensors.items() if one in names}}


def stored_inputs_first(headers: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of weights stored inputs x outputs, as GPT-2's Conv1D has them; nn.Linear has outputs x inputs.

    Many models give an nn.Linear the same names, so the shapes of a block decide: c_attn and c_fc have more outputs
    than inputs, and all of a block's layers are stored alike.
    """
    named = [(name.split("."), W) for name, W in headers.items() if name.endswith(CONV1D) and W.dim() == 2]
    first: dict[tuple[str, ...], bool] = {}
    for widening in ("c_fc", "c_attn"):  # c_attn has the last word: a narrow c_fc is possible
        for parts, W in named:
            if parts[-2] == widening and W.shape[0] != W.shape[1]:
                first[tuple(parts[:-3])] = W.shape[0] < W.shape[1]
    conv1d = {".".join(parts) for parts, _ in named if first.get(tuple(parts[:-3]))}
    return frozenset(conv1d | _stacks_with_inputs_first(headers))


def _stacks_with_inputs_first(headers: Mapping[str, Tensor]) -> set[str]:
    """Return the stacks of experts' matrices that are inputs x outputs: the first one is twice as wide as the second.

    An expert maps h features to gate and up, 2f, and f to h; gpt-oss stores h x 2f and f x h, others 2f x h and h x f.
    """
    first = set[str]()
    for name, W in headers.items():
        layer, _, own = name.rpartition(".")
        down = headers.get(f"{layer}.down_proj")
        if own != "gate_up_proj" or not is_stack(name, W.shape) or down is None or down.dim() != 3:
            continue
        if tuple(W.shape[1:]) == (down.shape[2], 2 * down.shape[1]):
            first |= {name, f"{layer}.down_proj"}
    return first


def matrix_shape(W: Tensor) -> tuple[int, int]:
    """Return the shape of a tensor's matrix view; a convolution is (out, in·kh·kw)."""
    return len(W), W.numel() // len(W)
