"""What the tests of whole commands share."""

from pathlib import Path

import pytest

from chromium import browser  # noqa: F401


@pytest.fixture
def here(made, tmp_path, monkeypatch) -> Path:
    """An empty folder where commands run, with links to all that the module's fixture `made` holds."""
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
