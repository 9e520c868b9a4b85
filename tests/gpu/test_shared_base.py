"""Trials on one frozen base, on a GPU: each trains as it would alone, and the base lies there once."""

from functools import partial
from typing import Any

import pytest
import torch

from hydra_tune import HydraExecutor, SharedModule, train_plain
from hydra_tune.errors import TaskError
from hydra_tune.memory.shared import shared_block
from tests.gpu.bits import assert_same_bits, bits
from tests.integration.test_shared_module import RANKS, Trunk, adapted, at_first_report, lora_tasks, merge_counted, task

DEVICE = DEVICES = "cuda:0"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("deterministic"),
]
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "cut": {"num_shards": 3},
    "cut by turns": {"num_shards": 3, "policy": "round_robin"},
    "cut, updated on the host": {"num_shards": 3, "optimizer_placement": "host"},
    "cut, spilled to disk": {"num_shards": 3, "host_memory": "700KiB", "device_memory": "600KiB"},
}


@pytest.fixture(scope="module")
def base():
    return SharedModule(Trunk, seed=1)


@pytest.fixture
def plain(base):
    return [bits(train_plain(described, device=DEVICE)) for described in lora_tasks(base)]


@pytest.mark.parametrize("way", WAYS)
def test_trials_on_one_base_train_as_each_alone(base, plain, way, tmp_path):
    if way == "cut, updated on the host":
        plain = None  # the host rounds otherwise
    options = WAYS[way] | ({"spill_dir": tmp_path} if "host_memory" in WAYS[way] else {})
    with HydraExecutor(DEVICES, **options) as pool:
        results = pool.run(lora_tasks(base))
    assert all((result.num_shards > 1) == way.startswith("cut") for result in results)
    found = [bits(result) for result in results]
    assert_same_bits(found, plain or found)
    assert not shared_block._COPIES, "the last trial takes the copies on devices with it"


def test_the_base_lies_on_the_gpu_once(base):
    nbytes = sum(parameter.nbytes for parameter in base.module().parameters())
    resident = {}
    for owns in (False, True):
        with HydraExecutor(DEVICES) as pool:
            at_first_report(pool, lora_tasks(base, owns=owns))
            resident[owns] = pool.stats().devices["cuda:0"].resident_bytes
    assert resident[True] - resident[False] == pytest.approx(3 * nbytes, rel=0.02)


@pytest.mark.parametrize("shards", [None, 3])
def test_a_write_to_the_base_fails_its_trial_alone(base, plain, shards):
    writer = task(partial(adapted, base, 4), after_step=merge_counted)
    with HydraExecutor(DEVICES, num_shards=shards) as pool:
        jobs = [pool.submit(each) for each in (writer, *lora_tasks(base))]
        result, *others = [job.result(120) for job in jobs]
    if shards is None:
        assert isinstance(result.error, TaskError)
        assert "'layers.1.inner.weight' of a shared base" in str(result.error)
    else:
        assert_same_bits([bits(result)], [bits(train_plain(writer, device=DEVICE))])
    assert len(others) == len(RANKS)
    assert_same_bits([bits(other) for other in others], plain)
