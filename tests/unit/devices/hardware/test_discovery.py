"""Texts that name devices, and what is refused of them."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from hydra_tune.devices.cuda import cuda_name
from hydra_tune.devices.hardware import discovery, nvml
from hydra_tune.devices.hardware.discovery import (
    gpu_memory,
    gpu_parts,
    gpu_share,
    let_segments_grow,
    open_device,
    open_devices,
    open_planned_devices,
)
from hydra_tune.errors import ConfigError


@pytest.fixture
def opened():
    made = []

    def open_and_keep(*arguments):
        made.extend(open_devices(*arguments))
        return made

    yield open_and_keep
    for device in made:
        device.close()


@pytest.mark.parametrize(
    ("text", "names"), [("cpu", ["cpu:0"]), ("cpu:1", ["cpu:0"]), ("cpu:3", ["cpu:0", "cpu:1", "cpu:2"])]
)
def test_cpu_devices_are_numbered_and_get_the_budget_asked_for(opened, text, names):
    devices = opened(text, "1MiB")
    assert [device.name for device in devices] == names
    assert {device.budget_bytes for device in devices} == {1 << 20}


def test_without_a_budget_cpu_devices_share_half_of_what_is_free(opened, monkeypatch):
    free = 6 << 30
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free, total=2 * free))
    assert [device.budget_bytes for device in opened("cpu:2")] == [free // 4] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_auto_is_one_cpu_device_a_core_where_there_is_no_gpu(opened):
    assert len(opened("auto", 1 << 20)) == len(psutil.Process().cpu_affinity())
    with pytest.raises(ConfigError, match="no GPU is visible to torch; use devices='cpu:N'"):
        open_devices("cuda")


@pytest.mark.parametrize("text", ["gpu", "cpu:", "cpu:-1", "cuda:", "cuda:a", "cuda:0,", "cpu:2,3", "", "CPU:2"])
def test_other_texts_are_refused(text):
    with pytest.raises(ConfigError, match="devices must be 'auto', 'cuda', 'cuda:0,1' or 'cpu:2', not"):
        open_devices(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cpu:0",), "for one give cpu:1"),
        (("cpu:99999",), r"devices='cpu:99999' asks for more than \d+ CPU devices, on \d+ cores?; use cpu:\d+"),
        (("cpu:2", "900TiB"), "2 CPU devices of 900.0 TiB need more memory than is free"),
        (("cpu:1", "a lot"), "device_memory must be a size such as '11GiB'"),
        (("cpu:1", 0), "device_memory must be more than 0 bytes"),
        (("cpu:1", None, "slow"), "link_bandwidth must be a size such as '11GiB'"),
        (("cpu:1", None, "0MB/s"), "link_bandwidth must be more than 0 bytes"),
        (("cuda", None, "1GB/s"), "link_bandwidth='1GB/s' is for CPU devices only, and 'cuda' names GPUs"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        open_devices(*arguments)


def test_a_gpu_that_is_added_takes_no_simulated_bandwidth_either():
    with pytest.raises(ConfigError, match="link_bandwidth='1GB/s' is for CPU devices only, and 'cuda:1' names GPUs"):
        open_device("cuda:1", None, "1GB/s", cpu_budget=1 << 20)


@pytest.mark.parametrize(
    ("indices", "names"),
    [
        ([0], ["cuda:0"]),
        ([0, 2], ["cuda:0", "cuda:2"]),
        ([0, 0], ["cuda:0/0", "cuda:0/1"]),
        ([1, 0, 1, 2, 1], ["cuda:1/0", "cuda:0", "cuda:1/1", "cuda:2", "cuda:1/2"]),
    ],
)
def test_a_gpu_that_is_named_several_times_is_several_devices(indices, names):
    found = gpu_parts(indices)
    assert [index for index, _ in found] == indices
    assert [cuda_name(*one) for one in found] == names


def test_devices_on_one_gpu_share_it_and_the_allocator_is_held_to_what_they_have_together():
    gib, libraries = 1 << 30, 1 / 64  # of 16 GiB, 256 MiB for each device
    alone, both = (gpu_share(0, count, 4 * gib, free=8 * gib, total=16 * gib) for count in (1, 2))
    assert alone == (4 * gib, pytest.approx(0.25 * 1.08 + libraries))
    assert both == (4 * gib, pytest.approx(0.5 * 1.08 + 2 * libraries))
    alone, half = (gpu_share(0, count, None, free=8 * gib, total=16 * gib) for count in (1, 2))
    assert alone[0] == pytest.approx(8 * gib * 0.92, abs=1)
    assert half[0] == alone[0] // 2
    assert half[1] == pytest.approx(alone[1] + libraries)
    assert gpu_share(0, 2, 8 * gib, free=8 * gib, total=16 * gib)[1] == 1.0


def test_a_small_budget_leaves_room_for_libraries_and_for_what_the_process_has_there():
    """On a GPU of 80 GiB a budget of 48 MiB, of whose 8% cuBLAS could not even begin."""
    mib = 1 << 20
    _, fraction = gpu_share(0, 1, 48 * mib, free=80_000 * mib, total=81_920 * mib, own=500 * mib)
    assert fraction * 81_920 >= 48 + 256 + 500
    budget, fraction = gpu_share(0, 1, None, free=2048 * mib, total=4096 * mib)
    assert budget + 256 * mib <= 2048 * mib
    assert 1.0 > fraction > budget / (4096 * mib)


def one_gpu(monkeypatch, context):
    """Have torch see a single GPU, of which `context` is called with the index to make the CUDA context."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", context)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _index: 0)
    monkeypatch.setattr(discovery, "let_segments_grow", lambda: True)


def test_a_budget_is_of_what_a_context_leaves_free(monkeypatch):
    """Of a GPU of 16 GiB; also, each of two devices takes its part of what the allocator may have."""
    gib = 1 << 30
    free, opened = [8 * gib], []

    def context(_index):
        free[0] = 7 * gib

    def opening(*given, **options):
        opened.append((*given, options))
        return SimpleNamespace(close=lambda: None)

    one_gpu(monkeypatch, context)
    monkeypatch.setattr(discovery, "gpu_memory", lambda _index: (free[0], 16 * gib))
    monkeypatch.setattr(discovery, "capped", lambda index, fraction: (index, fraction))
    monkeypatch.setattr(discovery, "CudaDevice", opening)
    open_devices("cuda:0,0")
    budget, fraction = gpu_share(0, 2, None, free=7 * gib, total=16 * gib)
    assert opened == [(0, budget, part, (0, fraction / 2), {"gives_back": True}) for part in range(2)]
    open_devices("cuda:0", "1GiB")
    assert opened[-1][-1] == {"gives_back": False}, "the user has chosen it"


def test_a_gpu_that_cannot_be_opened_gives_back_its_share_and_closes_those_opened_before(monkeypatch):
    opened, fractions = [], [0.9]

    def opening(index, _budget, _part, closed, **_):
        if opened:
            raise RuntimeError("CUDA out of memory")
        opened.append(SimpleNamespace(close=closed))
        return opened[0]

    one_gpu(monkeypatch, lambda _index: None)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _index: fractions[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, _index: fractions.append(part))
    monkeypatch.setattr(discovery, "gpu_memory", lambda _index: (8 << 30, 16 << 30))
    monkeypatch.setattr(discovery, "CudaDevice", opening)
    with pytest.raises(RuntimeError, match="out of memory"):
        open_devices("cuda:0,0")
    assert len(opened) == 1
    assert len(fractions) == 5, "raised twice, and lowered twice"
    assert fractions[-1] == 0.9


@pytest.mark.parametrize(("told", "free"), [(40 << 30, 30 << 30), (80 << 30, 5 << 30)])
def test_of_a_part_of_a_gpu_cuda_is_asked(monkeypatch, told, free):
    """Its memory is 40 GiB; by the address of its GPU NVML tells of all 80."""
    properties = type("Of", (), {"pci_domain_id": 0, "pci_bus_id": 7, "pci_device_id": 0, "total_memory": 39 << 30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _index: (5 << 30, 39 << 30))
    monkeypatch.setattr(nvml, "memory", lambda address: (30 << 30, told))
    assert gpu_memory(0)[0] == free


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (1, "device_memory is 17.0 GiB, but cuda:3 has 16.0 GiB"),
        (2, "device_memory is 17.0 GiB for each of 2 devices, but cuda:3 has 16.0 GiB"),
    ],
)
def test_more_memory_than_a_gpu_has_is_refused(count, message):
    with pytest.raises(ConfigError, match=message):
        gpu_share(3, count, 17 << 30, free=8 << 30, total=16 << 30)


def test_the_allocator_is_asked_for_segments_that_grow_unless_the_user_has_set_it_up(monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", asked.append)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert let_segments_grow()
    assert asked == ["expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert not let_segments_grow()
    assert len(asked) == 1


def test_a_torch_that_does_not_know_how_to_is_left_alone(monkeypatch):
    monkeypatch.delattr(torch.cuda.memory, "_set_allocator_settings")
    assert not let_segments_grow()


def test_planning_for_no_device_is_refused_as_opening_none_is():
    with pytest.raises(ConfigError, match="for one give cpu:1") as refused:
        open_planned_devices("cpu:0", "1GiB", None)
    assert "GPU" not in str(refused.value)
