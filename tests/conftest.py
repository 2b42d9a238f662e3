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


@pytest.fixture(scope="module")
def no_progress_bars():
    """No progress bars of transformers while a module's tests run."""
    import transformers

    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def quiet_transformers(no_progress_bars):
    """No progress bars and no warnings of transformers while a module's tests run."""
    import transformers

    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity_warning()
