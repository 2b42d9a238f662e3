"""Which tensors a matrix method treats as matrices, and what happens to the rest."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

RULES = ("matrix", "average", "fisher", "copy", "skip")

# Tables of tokens, positions and classes are two-dimensional but not linear maps of one feature space into
# another: their rows belong to single tokens or classes. By default they are averaged.
NOT_MATRICES = (
    "*embed_tokens*",
    "*embeddings.*",
    "*embedding.weight",
    "*embedding",
    "*embed.weight",
    "*pos_embed*",
    "*cls_token*",
    "wte.*",
    "*.wte.*",
    "wpe.*",
    "*.wpe.*",
    "shared.weight",
    "*.shared.weight",
    "*relative_attention_bias*",
    "lm_head.*",
    "*.lm_head.*",
    "head.*",
    "*.head.*",
    "heads.*",
    "*.heads.*",
    "classifier.*",
    "*.classifier.*",
    "score.*",
    "*.score.*",
    "qa_outputs.*",
    "*.qa_outputs.*",
    "cls.predictions.*",
    "*text_projection*",
)


def matching(name: str, rules: Sequence[tuple[str, str]]) -> str | None:
    """Return the rule of the first pattern that matches `name` (a glob over the whole name)."""
    return next((rule for pattern, rule in rules if fnmatchcase(name, pattern)), None)


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is a matrix to a matrix method unless a rule says otherwise."""
    return len(shape) == 2 and not any(fnmatchcase(name, pattern) for pattern in NOT_MATRICES)


def matrix_shape(W: Tensor) -> tuple[int, int]:
    """Return the shape of a tensor's matrix view; a convolution is (out, in·kh·kw)."""
    return len(W), W.numel() // len(W)
