"""Names of models on the hub: a revision names no folder outside of the hub's cache."""

import pytest
from huggingface_hub import constants

from epimer.checkpoints import open_checkpoint
from epimer.errors import CheckpointError, DataError
from epimer.tasks.data import open_data


@pytest.mark.parametrize("revision", ["../../../outside", "/outside", "a/../../../../outside", "..", "a//b", "main/"])
def test_a_revision_that_leads_out_of_the_cache_is_refused(tmp_path, monkeypatch, revision):
    """The cache keeps a file `refs/REVISION` that holds a commit, and a folder `snapshots/COMMIT`."""
    (tmp_path / "outside").write_text("a" * 40)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for opened, failure in ((open_checkpoint, CheckpointError), (open_data, DataError)):
        with pytest.raises(failure, match="is no revision; give a branch, a tag or a commit"):
            opened(f"org/model@{revision}")
    assert sorted(tmp_path.rglob("*")) == before
