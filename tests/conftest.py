"""One thread per test process: small matrices, and threads that wait for each other on a busy machine are slow."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

WHOLE = Path(__file__).parent / "integration"  # whole commands, real processes, browsers


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(WHOLE):
            item.add_marker(pytest.mark.slow)
