"""What is written past the page cache is what was given, of any length, and where the system will not have it so, too."""

import errno
import os

import pytest

from hydra_tune.checkpoint import direct
from hydra_tune.checkpoint.direct import written_directly

SIZES = (0, 1, 4095, 4096, 4097, direct._BUFFER_BYTES - 1, direct._BUFFER_BYTES, 2 * direct._BUFFER_BYTES + 5)


def write(path, pieces) -> None:
    with path.open("wb") as file, written_directly(file) as writer:
        for piece in pieces:
            writer.write(piece)


@pytest.mark.parametrize("size", SIZES)
def test_any_length(tmp_path, size):
    content = os.urandom(997) * (size // 997 + 1)
    pieces = [memoryview(content)[:size][start : start + 1_000_003] for start in range(0, size, 1_000_003)]
    write(tmp_path / "file", pieces)
    assert (tmp_path / "file").read_bytes() == content[:size]


@pytest.mark.parametrize("refused", ["the flag", "the write"])
def test_a_file_system_without_it(tmp_path, monkeypatch, refused):
    real, refusals = os.pwrite, []

    def pwrite(descriptor, data, offset):
        if not refusals:
            refusals.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data, offset)

    if refused == "the flag":
        monkeypatch.setattr(direct, "_DIRECT", 0)
    else:
        monkeypatch.setattr(os, "pwrite", pwrite)
    write(tmp_path / "file", [b"abc", b"def"])
    assert (tmp_path / "file").read_bytes() == b"abcdef"


def test_a_full_disk_is_raised(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", [b"abc"])
