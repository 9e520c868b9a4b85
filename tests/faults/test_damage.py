"""Checkpoint files damaged at random places, or something else: noticed, said, and the generation before is used."""

import io
import logging
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch

from hydra_tune.checkpoint.folder import generations, load_checkpoint
from hydra_tune.errors import CheckpointError
from tests.parity.exact import differences
from tests.unit.pool.tasks import PATIENCE_SECONDS, against_plain, running, task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KINDS = ("manifest", "json", "safetensors")
DESCRIBED = {"epochs": 3, "report_every": 1}
TIMES = 150  # for each kind of damage and each of three files


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder of two generations, of a trial that a pool has saved at its fourth and fifth reports of nine."""
    root = tmp_path_factory.mktemp("saved")
    with running(checkpoint_dir=root) as pool:
        events = pool.events()
        job = pool.submit(task(**DESCRIBED), "trial", events)
        for number in range(5):
            assert events.get(PATIENCE_SECONDS) is not None
            assert pool.find_checkpoint("trial").steps == number + 1
            if number < 4:
                job.proceed()
        job.cancel()
    assert len(generations(root / "trial")) == 2
    return root / "trial"


def cut_off(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 16))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def zeros(content: bytes, chance: random.Random) -> bytes:
    """As a disk leaves blocks that it had no time to write."""
    start = chance.randrange(len(content))
    end = min(len(content), start + chance.choice((1, 64, 4096)))
    return content[:start] + bytes(end - start) + content[end:]


def noise(content: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(chance.choice((0, 1, len(content))))


def longer(content: bytes, chance: random.Random) -> bytes:
    return content + chance.randbytes(chance.randint(1, 5000))


DAMAGES = (cut_off, flip, zeros, noise, longer)


def state_of(path: Path) -> tuple:
    found = load_checkpoint(path)
    return found.facts, found.tensors


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_at_random_places(saved, tmp_path, kind, damage, caplog):
    folder = tmp_path / "trial"
    shutil.copytree(saved, folder)
    last, before = generations(folder)
    whole, older = state_of(folder / f"{last:08d}.manifest"), state_of(folder / f"{before:08d}.manifest")
    assert whole[0] != older[0]
    path = folder / f"{last:08d}.{kind}"
    content, chance, noticed = path.read_bytes(), random.Random(f"{kind} {damage.__name__}"), 0
    for _ in range(TIMES):
        damaged = damage(content, chance)
        path.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            facts, tensors = state_of(folder)
        if facts == whole[0]:
            # Bytes that say nothing, as blanks beside the header, or zeros that were zeros; or the very same bytes.
            assert list(differences(whole[1], tensors)) == [], damaged
            assert caplog.text == ""
        else:
            noticed += 1
            assert (facts, list(differences(older[1], tensors))) == (older[0], [])
            assert "damaged" in caplog.text
            assert f"{before:08d}" in caplog.text
    assert noticed > TIMES // 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_ends_the_same_from_the_generation_before(saved, tmp_path, kind, caplog):
    shutil.copytree(saved, tmp_path / "saved" / "trial")
    (tmp_path / "saved").chmod(0o700)
    path = tmp_path / "saved" / "trial" / f"{generations(saved)[0]:08d}.{kind}"
    path.write_bytes(flip(path.read_bytes(), random.Random(kind)))
    with running(checkpoint_dir=tmp_path / "saved") as pool:
        found = pool.find_checkpoint("trial")
        assert (found.steps, "damaged" in caplog.text) == (4, True)
        result = pool.submit(task(**DESCRIBED), "trial", resume_from=found.path).result(PATIENCE_SECONDS)
        assert against_plain(task(**DESCRIBED), result) == []


class Evil:
    """Runs when it is unpickled."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self):
        return os.mkdir, (str(self.ran),)


def pickled(ran: Path) -> bytes:
    return pickle.dumps(Evil(ran))


def saved_by_torch(ran: Path) -> bytes:
    file = io.BytesIO()
    torch.save({"state": torch.ones(3), "evil": Evil(ran)}, file)
    return file.getvalue()


@pytest.mark.parametrize("kinds", [(kind,) for kind in KINDS] + [KINDS])
@pytest.mark.parametrize("make", [pickled, saved_by_torch])
def test_a_pickle_in_the_place_of_a_file_does_not_run(saved, tmp_path, make, kinds):
    ran = tmp_path / "ran"
    shutil.copytree(saved, tmp_path / "saved" / "trial")
    (tmp_path / "saved").chmod(0o700)
    folder = tmp_path / "saved" / "trial"
    for number in generations(folder):
        for kind in kinds:
            (folder / f"{number:08d}.{kind}").write_bytes(make(ran))
    with running(checkpoint_dir=tmp_path / "saved") as pool:
        for options in ({"resume_from": folder}, {"warm_start": folder}):
            result = pool.submit(task(**DESCRIBED), **options).result(PATIENCE_SECONDS)
            assert isinstance(result.error, CheckpointError)
        with pytest.raises(CheckpointError):
            pool.find_checkpoint("trial")
    assert not ran.exists()
    pickle.loads(pickled(ran))
    assert ran.exists(), "this test could not fail"
