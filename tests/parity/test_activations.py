"""Activations kept, spilled or computed again: the same bits as plain PyTorch, within the budget, and not the same work."""

import threading
from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_tune import HydraExecutor, train_plain
from hydra_tune.devices.hardware.link import LinkCostModel
from hydra_tune.pool.runtime import cut_budget
from hydra_tune.shard.cost import activation_policy
from tests.parity.models import NUM_STEPS
from tests.parity.test_parity import assert_same, task_of
from tests.parity.test_splitting import SPLIT
from tests.parity.test_splitting import run as run_split
from tests.unit.pool.tasks import against_plain

pytestmark = pytest.mark.usefixtures("captured_once")

MODES = ("keep", "spill", "recompute", "auto")
TIGHT = {"cnn": "200KiB", "gpt2": "200KiB", "gpt2_bfloat16": "220KiB", "vit": "200KiB"}
FAST = {("mlp", "keep"), ("mlp", "spill")}  # of "gpt2" there are two below


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in FAST else pytest.mark.slow)
        for name in ("mlp", "cnn", "vit", "gpt2", "gpt2_bfloat16", "gpt2_attention", "cnn_dropout", "mlp_native")
        for mode in MODES
    ],
)
def test_two_trials_on_two_devices_are_bitwise(references, name, mode):
    """Under a budget that shards are spilled for, so that what a forward has kept on one device is met on the other."""
    tasks = [task_of(f"{name}:5", activations=mode), task_of("mlp:11", activations=mode)]
    with HydraExecutor(devices="cpu:2", num_shards=6, device_memory=TIGHT.get(name), max_concurrent=2) as pool:
        results = pool.run(tasks)
    assert_same(results[0], references[f"{name}:5"])
    assert_same(results[1], references["mlp:11"])


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param("dropout", "keep", marks=pytest.mark.slow),
        ("bfloat16 clipped", "spill"),
        ("tied", "keep"),
        pytest.param("gpt2", "keep", marks=pytest.mark.slow),
    ],
)
def test_batches_side_by_side_keep_activations_of_their_own(name, mode):
    described = SPLIT[name](activations=mode)
    result, count = run_split(described, devices="cpu:2", num_shards=3)
    assert against_plain(described, result) == []
    assert count > 1


class Work:
    """Counts operators of units, on all workers."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self) -> TorchDispatchMode:
        outer = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                with outer._lock:
                    outer.calls[func._schema.name] += 1
                return func(*args, **(kwargs or {}))

        return Mode()


@pytest.fixture(scope="module")
def work() -> dict[str, tuple[int, int, int]]:
    """By mode: how often a layer was computed, and bytes of activations that left the device and came back."""
    plain = Work()
    with plain():
        train_plain(task_of("mlp:5"))
    found = {"plain": (plain.calls["aten::addmm"], 0, 0)}
    for mode in ("keep", "spill", "recompute"):
        counter = Work()
        with HydraExecutor(devices="cpu:1", num_shards=3, instrument=counter) as pool:
            (result,) = pool.run([task_of("mlp:5", activations=mode)])
            (device,) = pool.stats().devices.values()
        assert result.num_shards == 3
        assert result.activations == (mode, mode)
        out, back = device.bytes_out_by_kind.get("activations", 0), device.bytes_in_by_kind.get("activations", 0)
        found[mode] = counter.calls["aten::addmm"], out, back
    return found


@pytest.mark.slow
def test_what_is_kept_is_not_computed_again(work):
    assert work["keep"][0] == work["spill"][0] == work["plain"][0] > 0
    assert work["recompute"][0] >= work["plain"][0] + 4 * NUM_STEPS, "the layers of two shards of three, in each step"


@pytest.mark.cases(1 / 3)
def test_what_is_spilled_goes_to_the_host_and_comes_back_and_what_fits_stays(work):
    assert work["keep"][1:] == work["recompute"][1:] == (0, 0), "everything fits the device"
    assert work["spill"][1] == work["spill"][2] > 0


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "link", "expected"),
    [
        ("mlp", LinkCostModel(bytes_per_second=1e15), "keep"),
        ("mlp", LinkCostModel(bytes_per_second=1.0), "recompute"),
        pytest.param("gpt2", LinkCostModel(bytes_per_second=1e15), "keep", marks=pytest.mark.slow),
        pytest.param("cnn_dropout", LinkCostModel(bytes_per_second=1e15), "keep", marks=pytest.mark.slow),
    ],
)
def test_where_copies_cannot_be_foreseen_measured_times_decide(references, monkeypatch, name, link, expected):
    """As on GPUs. A second trial of the kind begins with the plan that the first trial has gone over to."""
    monkeypatch.setattr(cut_budget, "link_of", lambda device: None)
    monkeypatch.setattr(cut_budget, "measured_link", lambda device: link)
    monkeypatch.setattr(activation_policy, "_never_moves", lambda shards, room: False)
    work, computed = Work(), [0]
    with HydraExecutor(devices="cpu:1", num_shards=3, instrument=work) as pool:
        for _ in range(2):
            (result,) = pool.run([task_of(f"{name}:5")])
            assert_same(result, references[f"{name}:5"])
            assert set(result.activations) == {expected}
            computed.append(work.calls["aten::addmm"])
    _, first, both = computed
    if name == "mlp":
        assert (both - first < first) == (expected == "keep"), "the second trial has no step that computes again"


@pytest.mark.slow  # in every run the bytes of kept activations that are spilled are counted by test_forecast.py
def test_what_is_kept_is_spilled_when_there_is_no_room(references):
    with HydraExecutor(devices="cpu:1", device_memory="150KiB") as pool:
        (result,) = pool.run([task_of("gpt2:5", activations="keep")])
        (device,) = pool.stats().devices.values()
    assert_same(result, references["gpt2:5"])
    assert device.bytes_out_by_kind["activations"] > 0
    assert device.peak_bytes <= device.budget_bytes
