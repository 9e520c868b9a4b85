"""The examples of the repository, as modules and as files."""

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path

import yaml

from hydra_tune import HydraExecutor, train_plain
from tests.parity.exact import differences, without_seconds

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def imported(example, *names):
    """The modules of an example, found as the command line finds them; the first is what the block is given."""
    folder = str(EXAMPLES / example)
    sys.path.insert(0, folder)
    for name in names:
        sys.modules.pop(name, None)
    try:
        yield importlib.import_module(names[0])
    finally:
        sys.path.remove(folder)
        for name in names:
            sys.modules.pop(name, None)


def space(path):
    """A sweep file of an example, as plain data."""
    return yaml.safe_load((EXAMPLES / path).read_text(encoding="utf-8"))


def assert_cut_spilled_and_bitwise(make, device_memory):
    """Train in the pool, with more than one shard and with state that leaves the device, and as a plain loop does."""
    task = make()
    plain = train_plain(task)
    with HydraExecutor(devices="cpu:1", device_memory=device_memory) as pool:
        job = pool.submit(task)
        result = job.result()
        (device,) = pool.stats().devices.values()
    assert result.error is None, result.error
    assert job.progress.num_shards > 1
    assert device.bytes_out_by_kind["optimizer"] > 0
    found = [
        *differences(without_seconds(plain.history), without_seconds(result.history), "history"),
        *differences(plain.state_dict(), result.state_dict(), "weights"),
        *differences(plain.optimizer_state_dict(), result.optimizer_state_dict(), "optimizer"),
    ]
    assert found == [], "\n".join(found)
