"""What every device keeps to: memory that is aligned, copies that are done when they return, one thread for the host's side."""

import threading
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.cuda import CudaDevice
from hydra_tune.devices.device import DeviceCopyRoute

BUDGET_BYTES = 64 << 20

DEVICES = {"cpu": lambda: CpuDevice(0, BUDGET_BYTES), "cuda": lambda: CudaDevice(0, BUDGET_BYTES)}
OTHERS = {"cpu": lambda: CpuDevice(1, BUDGET_BYTES), "cuda": lambda: CudaDevice(0, BUDGET_BYTES, part=1)}


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    threads = torch.get_num_threads()
    made = DEVICES[request.param]()
    with made.worker():
        yield made
    made.close()
    torch.set_num_threads(threads)


@pytest.fixture
def other(device):
    """A second device of the same kind."""
    made = OTHERS[device.torch_device.type]()
    yield made
    made.close()


def host(device, values):
    """Host memory with values in it, made where host memory is made."""

    def fill():
        flat = device.host_empty(len(values))
        flat.copy_(torch.tensor(values, dtype=torch.uint8))
        return flat

    return device.on_host(fill)


def test_it_says_what_it_is(device):
    assert device.name == f"{device.torch_device.type}:0"
    assert device.budget_bytes == BUDGET_BYTES
    assert device.alignment >= 64
    assert device.alignment & (device.alignment - 1) == 0
    assert device.shares_generator == (device.torch_device.type == "cpu")


def test_memory_is_flat_aligned_and_where_it_should_be(device):
    for nbytes in (1, 63, 4096):
        data = device.empty(nbytes)
        assert data.shape == (nbytes,)
        assert data.dtype == torch.uint8
        assert data.device.type == device.torch_device.type
        assert data.data_ptr() % device.alignment == 0
        kept = device.on_host(lambda n=nbytes: device.host_empty(n))
        assert kept.shape == (nbytes,)
        assert kept.device.type == "cpu"
    assert device.empty(0).numel() == 0


def test_a_stopwatch_adds_up_what_it_runs_for(device):
    watch, before_ns = device.stopwatch(), time.perf_counter_ns()
    seen = []
    for _ in range(2):
        with watch.running():
            data = device.empty(1 << 20).fill_(1)
            device.load([(host(device, [1] * 8), data[:8])])
        device.synchronize()
        seen.append(watch.seconds)
    assert 0 < seen[0] < seen[1]
    assert watch.seconds == seen[1]
    assert before_ns + seen[1] * 1e9 <= watch.ended_ns <= time.perf_counter_ns()


def test_no_mode_sees_a_copy_that_is_waited_for(device, other):
    """Or whatever follows a unit's operators would take the host's memory for the device's."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    source, data, across = host(device, [7, 8]), device.empty(2), other.empty(2)
    with Mode():
        device.load([(source, data)])
        device.spill([(data, source)])
        other.take_over(device, [(data, across)])
        assert not seen
        data + 1
        assert seen, "it does see operators"
    assert across.tolist() == [7, 8]


def test_what_is_loaded_and_spilled_comes_back(device):
    sources = [host(device, [1, 2, 3]), host(device, [4, 5])]
    targets = [device.empty(3), device.empty(2)]
    device.load(list(zip(sources, targets, strict=True)))
    for target in targets:
        target.add_(10)
    back = [host(device, [0, 0, 0]), host(device, [0, 0])]
    device.spill(list(zip(targets, back, strict=True)))
    assert [tensor.tolist() for tensor in back] == [[11, 12, 13], [14, 15]]
    assert [tensor.tolist() for tensor in sources] == [[1, 2, 3], [4, 5]], "a copy, and not the same memory"
    device.load([])


def test_what_is_taken_over_is_copied_as_the_other_devices_work_leaves_it(device, other):
    size = 1 << 16
    taken, back = device.empty(size), host(device, [0] * size)
    assert device.reach(other) is not DeviceCopyRoute.NONE
    for turn in range(1, 4):
        with other.worker():
            data = other.empty(size)
            data.zero_()
            for _ in range(20 * turn):
                data.add_(1)
        taken.zero_()
        device.take_over(other, [(data, taken)])
        taken.add_(1)
        ahead = device.empty(size)
        device.start_take_over(other, [(data, ahead)]).wait()
        assert ahead.unique().tolist() == [20 * turn]
        device.spill([(taken, back)])
        assert back.unique().tolist() == [1 + 20 * turn]
        assert data.unique().tolist() == [20 * turn], "a copy, and not the same memory"
    device.take_over(other, [])


def test_what_cannot_be_taken_over_comes_to_the_caller(device, other):
    with pytest.raises(RuntimeError):
        device.take_over(other, [(other.empty(2), device.empty(3))])


def test_what_is_of_another_kind_is_out_of_reach(device):
    class Alien:
        torch_device = torch.device("meta")

    assert device.reach(Alien()) is DeviceCopyRoute.NONE


def test_copies_are_ordered_with_the_work_of_the_worker(device):
    """A spill sees all work started before it; work started after a load sees all it brought."""
    size = 1 << 16
    ones = host(device, [1] * size)
    data, back = device.empty(size), host(device, [0] * size)
    for turn in range(1, 4):
        device.load([(ones, data)])
        for _ in range(20 * turn):
            data.add_(1)
        device.spill([(data, back)])
        assert back.unique().tolist() == [1 + 20 * turn]


def test_copies_in_the_background_bring_the_bytes_of_the_moment_they_were_asked_for(device):
    size = 1 << 16
    ones = host(device, [1] * size)
    data, other, back = device.empty(size), device.empty(size), host(device, [0] * size)
    loaded = device.start_load([(ones, data)])
    other.fill_(3)
    for _ in range(20):
        other.add_(1)
    spilled = device.start_spill([(other, back)])
    loaded.wait()
    spilled.wait()
    assert back.unique().tolist() == [23]
    data.add_(1)
    device.synchronize()
    device.spill([(data, back)])
    assert back.unique().tolist() == [2]
    for copy in (loaded, spilled):
        assert copy.is_over
        assert 0 < copy.began_ns <= copy.ended_ns


def test_what_is_waited_for_does_not_stand_in_line_behind_the_background(device):
    """On a real device copies are quick: many are asked for, and the last ones can be called off while others are made."""
    size = 1 << 20
    source, data = host(device, [1]).expand(size), device.empty(size)
    copies = [device.start_load([(source, data)]) for _ in range(200)]
    assert device.on_host(lambda: 5) == 5
    called_off = [copy.cancel() for copy in reversed(copies)]
    for copy, off in zip(reversed(copies), called_off, strict=True):
        assert off or copy.wait_quietly()
        assert copy.is_over
        assert (copy.ended_ns == 0) == off


def test_an_error_in_the_background_comes_to_whoever_waits_and_leaves_it_working(device):
    broken = device.start_load([(host(device, [1, 2]), device.empty(3))])
    fine = device.start_load([(host(device, [1, 2]), data := device.empty(2))])
    with pytest.raises(RuntimeError):
        broken.wait()
    assert not broken.wait_quietly()
    fine.wait()
    assert data.tolist() == [1, 2]


def test_a_closed_device_has_no_copy_under_way(device):
    copies = [device.start_load([(host(device, [1]), device.empty(1))]) for _ in range(50)]
    device.close()
    assert all(copy.is_over for copy in copies)


def test_the_hosts_side_has_one_thread_of_its_own(device):
    names = {device.on_host(threading.current_thread).name for _ in range(3)}
    assert len(names) == 1
    assert names.pop().startswith(f"hydra-copy-{device.name}")
    assert device.on_host(threading.get_ident) != threading.get_ident()
    assert device.on_host(torch.get_num_threads) == 1


def test_an_error_on_the_copy_thread_comes_to_the_caller_and_leaves_it_working(device):
    with pytest.raises(RuntimeError):
        device.load([(host(device, [1, 2]), device.empty(3))])
    with pytest.raises(ZeroDivisionError):
        device.on_host(lambda: 1 // 0)
    assert device.on_host(lambda: 5) == 5


def test_the_generator_goes_back_to_a_saved_state(device):
    before = device.generator.get_state()
    try:
        assert before.device.type == "cpu"
        first = torch.rand(4, device=device.torch_device)
        second = torch.rand(4, device=device.torch_device)
        device.generator.set_state(before)
        assert torch.rand(4, device=device.torch_device).equal(first)
        assert not second.equal(first)
    finally:
        device.generator.set_state(before)


def test_a_worker_uses_one_intra_op_thread(device):
    assert torch.get_num_threads() == 1
    device.synchronize()


def test_closing_twice_is_closing_once(device):
    device.close()
    device.close()
    with pytest.raises(RuntimeError):
        device.on_host(lambda: 1)


def test_a_slow_link_takes_its_time_both_ways_and_copies_the_same():
    size, bandwidth = 4000, 100_000
    slow = CpuDevice(0, BUDGET_BYTES, bandwidth)
    source, back, data = host(slow, [7] * size), host(slow, [0] * size), slow.empty(size)
    start = time.perf_counter()
    slow.load([(source, data)])
    slow.spill([(data, back)])
    assert time.perf_counter() - start >= 2 * size / bandwidth
    assert back.tolist() == [7] * size
    slow.close()


def test_a_slow_link_lets_copies_that_are_waited_for_go_first():
    size, bandwidth = 2000, 100_000
    slow = CpuDevice(0, BUDGET_BYTES, bandwidth)
    source, data = host(slow, [7] * size), slow.empty(size)
    ahead = [slow.start_load([(source, slow.empty(size))]) for _ in range(2000)]  # 40 seconds of them
    slow.load([(source, data)])
    assert not ahead[-1].is_over
    assert data.tolist() == [7] * size
    for copy in reversed(ahead):
        copy.cancel()
    slow.close()


def test_a_copy_across_has_both_links_at_the_same_time():
    size, bandwidth = 4000, 100_000
    slow, slower = CpuDevice(0, BUDGET_BYTES, bandwidth), CpuDevice(1, BUDGET_BYTES, bandwidth / 2)
    source, data = slower.empty(size).fill_(7), slow.empty(size)
    start = time.perf_counter()
    slow.take_over(slower, [(source, data)])
    taken = time.perf_counter() - start
    assert data.tolist() == [7] * size
    assert taken >= 2 * size / bandwidth, "as long as the slower of the two needs"
    begun = [device.start_load([(host(device, [1] * size), device.empty(size))]) for device in (slow, slower)]
    slow.take_over(slower, [(source, data)])
    for copy in begun:
        assert copy.wait_quietly()
    for device in (slow, slower):
        device.close()


def test_devices_that_take_over_from_each_other_do_not_wait_for_each_other():
    devices = [CpuDevice(index, BUDGET_BYTES, 1_000_000) for index in range(3)]
    data = [device.empty(100) for device in devices]

    def work(number):
        for turn in range(50):
            source = (number + 1 + turn % 2) % 3
            devices[number].take_over(devices[source], [(data[source], torch.empty(100, dtype=torch.uint8))])

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    for device in devices:
        device.close()


def test_memory_that_nobody_uses_goes_back_to_the_system(device):
    data = device.empty(BUDGET_BYTES // 2)
    del data
    assert device.reclaim() > 0
    if device.torch_device.type == "cuda":
        assert torch.cuda.memory_reserved(device.torch_device) < BUDGET_BYTES // 2


def test_a_copy_that_closing_calls_off_is_waited_for_without_an_error():
    device = CpuDevice(0, BUDGET_BYTES, link_bandwidth=1 << 20)
    source, data = host(device, [1]).expand(1 << 17), device.empty(1 << 17)
    copies = [device.start_load([(source, data)]) for _ in range(3)]
    device.close()
    assert not copies[-1].wait_quietly()
