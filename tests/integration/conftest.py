"""What the tests of whole commands share."""

import shutil
from pathlib import Path

import pytest

from chromium import browser  # noqa: F401


@pytest.fixture
def here(made, tmp_path, monkeypatch) -> Path:
    """A folder where commands run: links to all that `made` holds, and copies of the media, which may be no links."""
    for path in made.iterdir():
        if path.suffix in (".png", ".wav"):
            shutil.copy(path, tmp_path)
        else:
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
