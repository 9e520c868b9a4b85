"""Files of blocks: what is written is what is read, in pieces of any size, past the page cache or through it."""

import stat

import pytest
import torch

from hydra_tune.errors import SpillError
from hydra_tune.memory.host import disk as disk_module
from hydra_tune.memory.host.disk import SpillDisk
from hydra_tune.memory.host.spill_dir import SpillFolder

PIECE = 16 * 1024


@pytest.fixture(params=["as it comes", "buffered"])
def disk(request, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "PIECE_BYTES", PIECE)
    made = SpillDisk(SpillFolder(tmp_path))
    if request.param == "buffered":
        made.is_direct = False
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def some_bytes(size):
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, PIECE, PIECE + 1, 5 * PIECE - 7])
def test_what_is_written_is_read_again(disk, size):
    data, other = some_bytes(size), some_bytes(size)
    disk.write(1, data)
    disk.write(2, other)
    for number, expected in ((1, data), (2, other)):
        found = torch.zeros(size, dtype=torch.uint8)
        disk.read(number, found)
        assert torch.equal(found, expected)
        assert torch.equal(disk.mapped(number, size), expected)
    assert disk.bytes_written == disk.bytes_read == 2 * size
    assert disk.stored_bytes == 2 * (-(-size // 4096) * 4096)
    paths = list(disk.folder.path.glob("block-*.bin"))
    assert len(paths) == 2
    assert sum(path.stat().st_size for path in paths) == disk.stored_bytes
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    disk.remove(1)
    disk.remove(2)
    disk.remove(3)
    assert list(disk.folder.path.glob("block-*.bin")) == []
    assert disk.stored_bytes == 0


def test_what_is_written_through_a_mapping_is_read(disk):
    disk.write(1, some_bytes(5000))
    disk.mapped(1, 5000).fill_(7)
    found = torch.zeros(5000, dtype=torch.uint8)
    disk.read(1, found)
    assert found.unique().tolist() == [7]


def test_a_file_that_is_gone_or_cut_short_is_an_error_with_path_and_errno(disk):
    disk.write(1, some_bytes(3 * PIECE))
    path = disk.folder.path / "block-1.bin"
    with path.open("r+b") as file:
        file.truncate(PIECE)
    with pytest.raises(SpillError, match=r"block-1\.bin.*shorter than what was written"):
        disk.read(1, torch.zeros(3 * PIECE, dtype=torch.uint8))
    path.unlink()
    with pytest.raises(SpillError, match=r"cannot read 48\.0 KiB from '.*block-1\.bin': \[Errno 2\]") as raised:
        disk.read(1, torch.zeros(3 * PIECE, dtype=torch.uint8))
    assert (raised.value.path, raised.value.errno) == (str(path), 2)
