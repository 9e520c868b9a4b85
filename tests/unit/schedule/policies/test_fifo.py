from hydra_tune.schedule import Fifo, Unit
from tests.unit.schedule.driver import drive


def test_the_earliest_submitted_runs_first_however_short():
    units = [Unit(kind="forward", shard=0, seconds=1.0)]
    pool = drive({"short": units, "long": units * 9, "middle": units * 3}, policy=Fifo(), num_devices=1)
    assert pool.released == ["short", "long", "middle"]
