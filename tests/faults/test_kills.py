"""Processes are killed fifty times, at random and in the worst moments, and gone on with: the bits of one that never was.

Each of ten sequences kills five times and then lets a process end. Three of the five are moments when something is half done.
"""

import random
import time
from itertools import cycle, islice

import pytest

from hydra_tune import HydraExecutor
from hydra_tune.checkpoint.tensors import load_tensors
from tests.parity.exact import differences
from tests.support.faults import ended, start
from tests.support.killed import main_short_of_memory, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EPOCHS = 20
LATEST_SECONDS = 3.0

# Where, when, and at which of so many calls at most.
MOMENTS = (
    ("hydra_tune.train.state.model_state:ModelState._step", "before", 40),  # in an update unit
    ("hydra_tune.train.state.model_state:ModelState._step", "after", 40),
    ("hydra_tune.shard.execute.compute:_run_backward", "before", 40),  # in a backward unit
    ("hydra_tune.pool.runtime.worker:run_unit", "before", 90),
    ("hydra_tune.memory.host.disk:SpillDisk._write_piece", "within", 6),  # in a spill
    ("hydra_tune.memory.host.disk:SpillDisk._write_piece", "after", 6),
    ("hydra_tune.checkpoint.direct:DirectWriter._put", "within", 6),  # in a checkpoint's write
    ("hydra_tune.checkpoint.direct:DirectWriter.finish", "before", 6),
    ("hydra_tune.checkpoint.folder:write_file", "before", 9),
    ("os:fsync", "before", 18),  # written, and not flushed
    ("pathlib:Path.replace", "before", 9),  # flushed, and not renamed
    ("hydra_tune.checkpoint.files:_flush_folder", "before", 9),  # renamed, and the folder is not flushed
    ("hydra_tune.checkpoint.files:_flush_folder", "before", 18),
    ("hydra_tune.checkpoint.folder:remove_file", "before", 9),  # the new generation is whole, an old one half removed
    ("hydra_tune.checkpoint.folder:remove_file", "after", 9),
    ("hydra_tune.train.checkpoint.snapshot:TrialStateSnapshot.copied", "after", 6),  # copied, and not written
)
SEQUENCES = 10


def moments_of(sequence: int, chance: random.Random) -> list[str | None]:
    """Five; None is a random time."""
    chosen = islice(cycle(MOMENTS), 3 * sequence, 3 * sequence + 3)
    found: list[str | None] = [f"{where}/{when}/{chance.randint(1, calls)}" for where, when, calls in chosen]
    found += [None, None]
    chance.shuffle(found)
    return found


@pytest.fixture(scope="module")
def expected():
    with HydraExecutor(devices="cpu:1", num_shards=1) as pool:
        return train(pool, EPOCHS)


@pytest.mark.parametrize("sequence", range(SEQUENCES))
def test_killed_and_gone_on_with(tmp_path, sequence, expected):
    chance = random.Random(sequence)
    errors, result = tmp_path / "errors", tmp_path / "result"

    def begin(devices: str, moment: str | None = None):
        return start(main_short_of_memory, tmp_path, result, EPOCHS, devices, errors=errors, moment=moment)

    for moment in moments_of(sequence, chance):
        process = begin("cpu:1" if moment is not None or chance.random() < 0.5 else "cpu:2", moment)
        if moment is None:
            time.sleep(chance.uniform(0.0, LATEST_SECONDS))
            process.kill()
        assert ended(process, errors) == -9, moment
    assert not result.exists()
    assert ended(begin("cpu:2"), errors) == 0
    assert list(differences(expected, load_tensors(result)[0])) == []
    assert not [path.name for path in (tmp_path / "saved").rglob("*.tmp")]
    assert not list((tmp_path / "spill").iterdir())
