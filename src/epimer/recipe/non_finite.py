"""What is done about NaN and Inf in a model: the words for it, in recipes, on the command line and in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epimer.errors import ParameterError

if TYPE_CHECKING:
    from epimer.recipe.model import Recipe

ERROR, SKIP_TENSOR = NON_FINITE = ("error", "skip-tensor")


def skips_tensors(choice: str) -> bool:
    """Whether a tensor with NaN or Inf in a model is left as the base has it, instead of refused."""
    if choice not in NON_FINITE:
        expected = " or ".join(map(repr, NON_FINITE))
        raise ParameterError(f"The 'non_finite' parameter must be {expected}. Got {choice!r} instead.")
    return choice == SKIP_TENSOR


def with_non_finite(recipe: Recipe, choice: str | None) -> Recipe:
    """Return a recipe with another choice; None leaves it its own."""
    if choice is None:
        return recipe
    skips_tensors(choice)
    return recipe.model_copy(update={"non_finite": choice})
