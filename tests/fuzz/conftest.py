import os

import pytest
from huggingface_hub import constants

CHANGED = ("ENDPOINT", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HUGGINGFACE_CO_URL_TEMPLATE")


@pytest.fixture(autouse=True)
def same_hub_afterwards():
    """Undo what a stand-in for the hub changes in this process, so that later tests do not ask it."""
    environment, known = dict(os.environ), {name: getattr(constants, name) for name in CHANGED}
    yield
    os.environ.clear()
    os.environ.update(environment)
    for name, value in known.items():
        setattr(constants, name, value)
