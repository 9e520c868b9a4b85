"""A trial's folder: two generations, whole or not there; damage is noticed, and the one before is used and said so."""

import logging
import os
import pickle
import stat
from types import SimpleNamespace

import pytest
import torch

from hydra_tune.checkpoint import files, folder
from hydra_tune.checkpoint.folder import CheckpointFolder, generations, load_checkpoint
from hydra_tune.checkpoint.saved import CheckpointContent
from hydra_tune.errors import CheckpointError, FileError


def saved(number: int) -> CheckpointContent:
    return CheckpointContent(
        facts={"number": number}, tensors={"a": torch.full((1000,), float(number))}, labels={"trial": "1"}
    )


@pytest.fixture
def written(tmp_path):
    """A folder with two generations."""
    made = CheckpointFolder(tmp_path / "trial")
    for number in (1, 2, 3):
        made.write(saved(number))
    made.close()
    return made.path


def number_of(found: CheckpointContent) -> int:
    assert found.tensors["a"].unique().tolist() == [found.facts["number"]]
    return found.facts["number"]


def test_the_last_of_two_generations_is_read(written):
    assert generations(written) == [3, 2]
    assert len(list(written.iterdir())) == 7
    found = load_checkpoint(written)
    assert (number_of(found), found.labels) == (3, {"trial": "1"})
    assert number_of(load_checkpoint(written / "00000002.manifest")) == 2


def test_it_is_private_to_the_user(written):
    modes = {stat.S_IMODE(path.stat().st_mode) for path in written.iterdir()}
    assert (stat.S_IMODE(written.stat().st_mode), modes) == (0o700, {0o600})


@pytest.mark.parametrize("kind", ["manifest", "json", "safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "gone", "foreign", "pickle"])
def test_damage_is_noticed_and_the_one_before_is_used(written, kind, damage, caplog):
    path = written / f"00000003.{kind}"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    ran = written.parent / "ran"

    class Evil:
        def __reduce__(self):
            return ran.write_text, ("it has run",)

    damaged = {
        "truncated": path.read_bytes()[:-7],
        "flipped": bytes(content),
        "empty": b"",
        "gone": None,
        "foreign": b'{"format": "something else"}',
        "pickle": pickle.dumps(Evil()),
    }[damage]
    path.unlink() if damaged is None else path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        assert number_of(load_checkpoint(written)) == 2
    assert not ran.exists()
    without_manifest = damage == "gone" and kind == "manifest"  # as if it had never been whole
    assert ["damaged" in record.message and "00000002" in record.message for record in caplog.records] == (
        [] if without_manifest else [True]
    )


def test_every_flipped_bit_is_noticed(tmp_path):
    made = CheckpointFolder(tmp_path / "trial")
    small = CheckpointContent(facts={"a": 1}, tensors={"t": torch.arange(3.0)}, labels={})
    made.write(small)
    made.close()
    for path in sorted(made.path.glob("0*")):
        whole = path.read_bytes()
        for bit in range(0, len(whole) * 8, 5):
            content = bytearray(whole)
            content[bit // 8] ^= 1 << bit % 8
            path.write_bytes(bytes(content))
            try:
                found = load_checkpoint(made.path)
            except CheckpointError:
                continue
            assert (found.facts, found.tensors["t"].tolist()) == ({"a": 1}, [0.0, 1.0, 2.0]), (path, bit)
        path.write_bytes(whole)


def test_nothing_whole_is_an_error_that_says_all(written):
    for path in written.glob("*.json"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*00000003.*00000002"):
        load_checkpoint(written)


def test_no_checkpoint_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "none")


def test_one_at_a_time(tmp_path):
    made = CheckpointFolder(tmp_path / "trial")
    with pytest.raises(CheckpointError, match="in use"):
        CheckpointFolder(tmp_path / "trial")
    made.close()
    CheckpointFolder(tmp_path / "trial").close()


def test_what_a_killed_process_left_is_removed(written):
    for name in (
        "00000009.safetensors",
        "00000009.json",
        f".00000009.manifest.{files._MACHINE}-999999999-" + "0" * 32 + ".tmp",
    ):
        (written / name).write_bytes(b"half")
    (written / "notes.txt").write_text("the user's")
    CheckpointFolder(written).close()
    assert sorted(path.name for path in written.iterdir() if "9" in path.name) == []
    assert (written / "notes.txt").exists()
    assert number_of(load_checkpoint(written)) == 3


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    (tmp_path / "trial").mkdir()
    (tmp_path / "trial").chmod(0o777)
    with pytest.raises(CheckpointError, match="chmod 700"):
        CheckpointFolder(tmp_path / "trial")


def test_a_link_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "trial").symlink_to(tmp_path / "real")
    with pytest.raises(CheckpointError, match="is a link"):
        CheckpointFolder(tmp_path / "trial")


@pytest.mark.parametrize("call", range(6))
def test_a_full_disk_leaves_what_was_there(written, monkeypatch, call, caplog):
    """Refused at each rename and flush of a folder in turn."""
    made = CheckpointFolder(written)
    real, count = files._flush_folder, iter(range(100))

    def full(path):
        if next(count) == call:
            raise OSError(28, "No space left on device")
        real(path)

    monkeypatch.setattr(files, "_flush_folder", full)
    if call < 3:  # after the third, the manifest's, the generation is whole
        with pytest.raises(FileError, match="No space left"):
            made.write(saved(4))
        assert number_of(load_checkpoint(written)) == 3
        assert generations(written) == [3, 2]
        monkeypatch.undo()
        made.write(saved(5))
        assert number_of(load_checkpoint(written)) == 5
    else:  # only the older generation cannot be removed
        assert made.write(saved(4)) == written / "00000004.manifest"
        assert number_of(load_checkpoint(written)) == 4
        kind = ("manifest", "safetensors", "json")[call - 3]
        (message,) = caplog.messages
        assert f"could not be removed: cannot remove '{written / f'00000002.{kind}'}'" in message
    made.close()


def test_removed_for_good(written):
    CheckpointFolder(written).remove()
    assert not written.exists()
    assert folder.generations(written) == []
    assert os.path.lexists(written.parent)


def test_the_checksum_of_a_conjugate_is_that_of_its_values():
    value = torch.tensor([1 + 2j, 3 - 1j])
    for view in (torch.conj(value), torch.conj(value).imag):
        assert folder.checksum({"a": view}) == folder.checksum({"a": view.clone().resolve_conj().resolve_neg()})
    assert folder.checksum({"a": torch.conj(value)}) != folder.checksum({"a": value})


@pytest.mark.parametrize("others", [True, False], ids=["a file of others stays", "the folder goes"])
def test_a_folder_that_is_removed_while_somebody_waits_for_it_has_one_holder(tmp_path, monkeypatch, others):
    path = tmp_path / "trial"
    first = CheckpointFolder(path)
    if others:
        (path / "notes.txt").write_text("")
    # Between two attempts of the second opener to take the lock.
    monkeypatch.setattr("hydra_tune.checkpoint.lock.time", SimpleNamespace(sleep=lambda _: first.remove()))
    second = CheckpointFolder(path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="in use by a trial that is running"):
        CheckpointFolder(path)
    second.close()
    CheckpointFolder(path).close()
