"""Small models of one ancestor, with every kind of tensor a checkpoint may hold, and curvature for them."""

from epimer.testing import MATRICES, OTHERS, make_base, make_curvature, make_models
from epimer.testing import required_arguments as needs

__all__ = ["MATRICES", "OTHERS", "make_base", "make_curvature", "make_models", "needs"]
