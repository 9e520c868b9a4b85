"""Checkpoints by name, on a file system that refuses."""

import pytest

from hydra_tune.errors import FileError
from hydra_tune.pool.checkpointing.lookup import remove_checkpoint, remove_or_log


def test_a_folder_that_cannot_be_looked_at_is_named(tmp_path, caplog):
    folder = tmp_path / ("x" * 300)  # longer than a file system allows
    with pytest.raises(FileError, match=r"cannot remove .*x{300}"):
        remove_checkpoint(folder)
    remove_or_log(folder)  # on the writer's thread, which has to go on
    assert "could not be removed" in caplog.text
