"""A long spilled run: nothing that the pool holds grows after its first tenth."""

import pytest

from tests.support.held import Held
from tests.unit.pool.tasks import PATIENCE_SECONDS, X, Y, running, task

pytestmark = pytest.mark.timeout(240)
TIGHT = {"num_shards": 3, "device_memory": "8KiB", "max_concurrent": 1}


def looked_at(num_steps, found):
    """A task of so many steps; at some of them it is noted what the process holds."""

    looks = [num_steps * tenths // 10 for tenths in (1, 4, 7, 10)]

    def draw():
        for step in range(1, num_steps + 1):
            if step in looks:
                found.append(Held.now())
            yield X[step % 3 * 8 :][:8].clone(), Y[step % 3 * 8 :][:8].clone()

    return task(train=draw, epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "num_steps"),
    [
        ("host", 150),
        pytest.param("host", 1_000, marks=pytest.mark.slow),
        pytest.param("disk", 1_000, marks=pytest.mark.slow),
    ],
)
def test_nothing_grows(tier, num_steps, tmp_path):
    found = []
    options = TIGHT if tier == "host" else TIGHT | {"host_memory": "16KiB", "spill_dir": tmp_path}
    with running(**options) as pool:
        result = pool.submit(looked_at(num_steps, found)).result(2 * PATIENCE_SECONDS)
        stats = pool.stats()
    assert result.error is None
    for device in stats.devices.values():
        assert device.bytes_out > 0
        assert device.peak_bytes <= device.budget_bytes
    first, *later = found
    assert len(later) == 3
    for look in later:
        assert look.threads <= first.threads + 1, "one of another pool may begin or end meanwhile"
        assert look.files <= first.files
        assert abs(look.storages - first.storages) <= 4, "a copy in the background may be under way"
        assert look.storage_bytes <= first.storage_bytes + device.budget_bytes
    growth = later[-1].objects - first.objects
    assert growth < num_steps // 4, f"{growth} objects more after {num_steps * 9 // 10} steps"
