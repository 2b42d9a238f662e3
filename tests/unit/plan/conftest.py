"""A base, two models of it, and their curvature."""

import pytest

from models import make_base, make_curvature, make_models


@pytest.fixture
def base():
    return make_base()


@pytest.fixture
def models(base):
    return make_models(base, 2)


@pytest.fixture
def diagonals(base):
    return make_curvature(base, "diagonal", 2)


@pytest.fixture
def factors(base):
    return make_curvature(base, "kronecker", 2)


@pytest.fixture
def samples(base):
    return make_curvature(base, "samples", 2)
