"""On a real GPU: the budget is a ceiling, and the numbers are those of a plain loop there. Needs torch and pytest only."""

import gc
import time
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.devices import cuda
from hydra_tune.devices.cuda import CudaDevice
from hydra_tune.devices.device import DeviceCopyRoute
from hydra_tune.devices.hardware import discovery
from hydra_tune.devices.hardware.libraries import LIBRARY_BYTES
from hydra_tune.memory.block import Block, BlockKind
from hydra_tune.memory.block_release import bring_home
from hydra_tune.memory.pager import Pager
from hydra_tune.shard.cost import activation_policy
from hydra_tune.train.loop.batch_units import PendingUnit, run_unit
from hydra_tune.train.parallel.cost_model import DATA_PARALLEL, GROUPED, PIPELINED
from hydra_tune.train.timing.unit_times import UnitTimes
from tests.support.parallel import PARALLEL

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

MIB = 1 << 20
WIDTHS = (256, 1024, 1024, 1024, 1024, 1024, 16)
PATIENCE_SECONDS = 300
NUM_BATCHES = 5


class Net(nn.Module):
    """About 17 MiB of parameters; no dropout, so that a plain loop needs no generator of its own."""

    def __init__(self):
        super().__init__()
        layers = []
        for inputs, outputs in pairwise(WIDTHS):
            layers += [nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers[:-2])

    def forward(self, x):
        return self.layers(x)


class Noisy(Net):
    """Drops values, so that each batch's random numbers begin where those of the batch before have ended."""

    def forward(self, x):
        return super().forward(functional.dropout(x, 0.2, self.training))


def batches():
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(64, WIDTHS[0], generator=generator) for _ in range(NUM_BATCHES)]
    return [(x, x[:, : WIDTHS[-1]].argmax(dim=1)) for x in inputs]


def task(seed=0, model=Net, **changes):
    arguments = {
        "model": model,
        "optimizer": partial(torch.optim.AdamW, lr=1e-3),
        "loss": functional.cross_entropy,
        "train": batches,
        "report_every": 1,
        "seed": seed,
    }
    return TrainTask(**(arguments | changes))


def autocast(precision):
    return nullcontext() if precision == "float32" else torch.autocast("cuda", getattr(torch, precision))


def plain_losses(described):
    """The loop anyone would write, on the GPU: built on the CPU with the task's seed, moved, trained."""
    torch.manual_seed(described.seed)
    module = described.model().cuda()
    optimizer = described.optimizer(list(module.parameters()))
    scaler = torch.amp.GradScaler("cuda", enabled=described.precision == "float16")
    losses, drawn = [], described.train()
    for number, (inputs, target) in enumerate(drawn, start=1):
        with autocast(described.precision):
            loss = described.loss(module(inputs.cuda()), target.cuda())
        scaler.scale(loss / described.accumulate).backward()
        losses.append(loss.item())
        if number % described.accumulate and number < len(drawn):
            continue
        scaler.unscale_(optimizer)
        if described.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), described.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
    return losses, state


@pytest.fixture(autouse=True)
def _whole_gpu(deterministic):
    gc.collect()
    torch.cuda.empty_cache()
    yield
    assert torch.cuda.get_per_process_memory_fraction(0) == 1.0, "what a pool has set ends with it"
    gc.collect()
    torch.cuda.empty_cache()


def losses_of(result):
    if result.error is not None:
        raise result.error
    return [entry["train_loss"] for entry in result.history]


def test_four_trials_in_a_small_budget_give_the_plain_numbers_and_stay_within_it():
    """Their state alone is several times the budget."""
    budget = 48 * MIB
    tasks = [task(seed) for seed in range(4)]
    expected = [plain_losses(described) for described in tasks]
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    with HydraExecutor(devices="cuda:0", device_memory=budget, max_concurrent=4) as pool:
        jobs = [pool.submit(described) for described in tasks]
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
        shards = {job.progress.num_shards for job in jobs}
        statistics = pool.stats().devices["cuda:0"]
    peak = torch.cuda.max_memory_allocated(0) - before
    for result, (losses, state) in zip(results, expected, strict=True):
        assert losses_of(result) == losses
        assert all(tensor.cpu().equal(state[name]) for name, tensor in result.state_dict().items())
    assert min(shards) > 1
    assert statistics.peak_bytes <= budget
    # Beside the ledger's bytes the allocator holds cuBLAS workspaces, once for each stream.
    assert peak <= budget + 32 * MIB
    assert statistics.bytes_out > 0, "state was spilled to the host"


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": 2},
        {"max_grad_norm": 0.1},
        {"precision": "bfloat16"},
        {"precision": "float16"},
        {"precision": "float16", "accumulate": 2, "max_grad_norm": 0.1},
    ],
    ids=str,
)
def test_training_features_give_the_plain_numbers(changes, num_shards):
    described = task(**changes)
    _, state = plain_losses(described)
    with HydraExecutor(devices="cuda:0", device_memory="1GiB", num_shards=num_shards) as pool:
        (result,) = pool.run([described])
    losses_of(result)
    assert all(tensor.cpu().equal(state[name]) for name, tensor in result.state_dict().items())


@pytest.mark.parametrize("num_shards", [1, 3, "layer"])
def test_one_trial_on_any_cut_gives_the_plain_numbers(num_shards):
    losses, _ = plain_losses(task())
    with HydraExecutor(devices="cuda:0", device_memory="1GiB", num_shards=num_shards) as pool:
        (result,) = pool.run([task()])
    assert losses_of(result) == losses


@pytest.mark.parametrize("model", [Net, Noisy])
def test_activations_that_measured_times_choose_change_no_number(model, monkeypatch):
    """After two of the five steps the trial goes over to another plan, with whatever the GPU's times make of that plan."""
    monkeypatch.setattr(activation_policy, "_never_moves", lambda shards, room: False)
    found = []
    for activations in ("recompute", "auto"):
        with HydraExecutor(devices="cuda:0", device_memory="1GiB", num_shards=3) as pool:
            (result,) = pool.run([task(model=model, activations=activations)])
        found.append((losses_of(result), {name: tensor.cpu() for name, tensor in result.state_dict().items()}))
    assert found[0][0] == found[1][0]
    assert all(tensor.equal(found[1][1][name]) for name, tensor in found[0][1].items())


def test_masks_are_drawn_again_by_the_recompute_and_do_not_depend_on_other_trials():
    def dropped():
        return nn.Sequential(
            nn.Linear(256, 256), nn.Dropout(0.5), nn.Linear(256, 256), nn.Dropout(0.5), nn.Linear(256, 16)
        )

    tasks = [task(seed, dropped) for seed in range(3)]
    with HydraExecutor(devices="cuda:0", device_memory="1GiB", num_shards=1) as pool:
        whole = [losses_of(result) for result in pool.run(tasks[:1])]
    with HydraExecutor(devices="cuda:0", device_memory="1GiB", num_shards=3, max_concurrent=3) as pool:
        crowded = [losses_of(result) for result in pool.run(tasks)]
    assert crowded[0] == whole[0]
    assert len({tuple(losses) for losses in crowded}) == 3


def test_a_model_that_runs_whole_gives_the_plain_numbers():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(256, 16)

        def forward(self, x):
            y = self.linear(x)
            return y if y.sum() > 0 else -y

    losses, _ = plain_losses(task(model=Branch))
    with HydraExecutor(devices="cuda:0", device_memory="1GiB") as pool:
        (result,) = pool.run([task(model=Branch)])
    assert losses_of(result) == losses


def test_a_trial_whose_update_of_all_parameters_at_once_does_not_fit_is_cut():
    """As torch updates on a GPU by default: weights, gradients and AdamW's state are four models, its temporaries a fifth."""
    described = task()
    losses, state = plain_losses(described)
    budget = int(4.7 * sum(p.nbytes for p in Net().parameters()))
    with HydraExecutor(devices="cuda:0", device_memory=budget) as pool:
        (result,) = pool.run([described])
        statistics = pool.stats().devices["cuda:0"]
    assert losses_of(result) == losses
    assert all(tensor.cpu().equal(state[name]) for name, tensor in result.state_dict().items())
    assert result.num_shards > 1
    assert statistics.peak_bytes <= budget


class Deep(nn.Module):
    """Its activations take 48 MiB, everything else half of that; it looks at a value, so it runs whole."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(24))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        x = x[:, : WIDTHS[-1]]
        return x if x.sum() > 0 else -x


def test_activations_that_do_not_fit_are_spilled_and_the_numbers_are_the_plain_ones():
    def large():
        return [(x.repeat(32, 1), y.repeat(32)) for x, y in batches()]

    described = task(model=Deep, train=large)
    losses, _ = plain_losses(described)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    budget = 48 * MIB
    with HydraExecutor(devices="cuda:0", device_memory=budget) as pool:
        (result,) = pool.run([described])
        statistics = pool.stats().devices["cuda:0"]
    assert losses_of(result) == losses
    assert statistics.bytes_out_by_kind["activations"] >= 5 * 40 * MIB
    assert statistics.peak_bytes <= budget
    assert torch.cuda.max_memory_allocated(0) - before <= budget + 32 * MIB


def most_held(monkeypatch):
    """Where a pool's ledgers are after each unit that was looked at: limit, budget, and what was found."""
    seen, fit = [], Pager.fit

    def fitted(pager, room):
        fit(pager, room)
        seen.append((pager.ledger.limit_bytes, pager.ledger.budget_bytes, room))

    monkeypatch.setattr(Pager, "fit", fitted)
    return seen


def test_what_libraries_leave_of_their_reserve_comes_back_and_a_budget_that_was_chosen_stays(monkeypatch):
    seen = most_held(monkeypatch)
    with HydraExecutor(devices="cuda:0") as pool:
        losses_of(pool.submit(task()).result(PATIENCE_SECONDS))
    assert seen, "units were looked at"
    limit, budget, room = seen[-1]
    assert budget < limit <= room.limit_bytes
    free, total = torch.cuda.mem_get_info(0)
    assert limit < free + torch.cuda.memory_reserved(0) <= total
    seen.clear()
    with HydraExecutor(devices="cuda:0", device_memory=1 << 30) as pool:
        losses_of(pool.submit(task()).result(PATIENCE_SECONDS))
    assert {(limit, budget) for limit, budget, _ in seen} == {(1 << 30, 1 << 30)}


def test_what_a_unit_takes_beside_the_ledger_is_taken_from_what_the_pool_holds(monkeypatch):
    """As a convolution does whose workspace is larger than all that was left to libraries."""
    seen, budget = most_held(monkeypatch), 1 << 30
    taken = budget // 12 + 256 * MIB + 300 * MIB

    def loss(outputs, target):
        torch.cuda.memory.caching_allocator_delete(torch.cuda.memory.caching_allocator_alloc(taken))
        return functional.cross_entropy(outputs, target)

    with HydraExecutor(devices="cuda:0", device_memory=budget) as pool:
        losses_of(pool.submit(task(loss=loss)).result(PATIENCE_SECONDS))
    limit, still, _ = seen[-1]
    assert still == budget
    assert budget // 2 < limit < budget - 100 * MIB


def test_a_unit_takes_what_the_gpu_takes_however_late_the_host_hears_of_it(monkeypatch):
    device = CudaDevice(0, 1 << 30)
    try:
        with device.worker():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

            def run(_device, _pager):
                begin.record()
                torch.cuda._sleep(int(1e8))
                end.record()
                return 0.0

            def late():
                CudaDevice.synchronize(device)
                time.sleep(1.0)

            unit = PendingUnit(kind="forward", shard=0, seconds=0.0, run=run, times=UnitTimes({}), key=("forward", 0))
            run_unit(unit, device, None, None)
            monkeypatch.setattr(device, "synchronize", late)
            watch, before_ns = device.stopwatch(), time.perf_counter_ns()
            seconds = run_unit(unit, device, None, None, watch)
            computing = begin.elapsed_time(end) / 1000
        assert computing > 0.01
        assert computing <= seconds < computing + 0.1
        assert before_ns + computing * 1e9 <= watch.ended_ns <= before_ns + (computing + 0.5) * 1e9
    finally:
        device.close()


def test_loads_and_spills_run_beside_what_computes():
    """A unit's work is queued behind both, and is not over when they are: no copy has waited for it, nor it for a copy."""
    device = CudaDevice(0, 1 << 30)
    try:
        with device.worker():
            size = 64 * MIB
            host, back = (device.on_host(lambda: device.host_empty(size)) for _ in range(2))
            host.fill_(5)
            data, other = device.empty(size), device.empty(size)
            other.fill_(7)
            copies = [device.start_load([(host, data)]), device.start_spill([(other, back)])]
            torch.cuda._sleep(int(4e9))  # seconds of the compute stream
            busy = torch.cuda.Event()
            busy.record()
            for copy in copies:
                copy.wait()
            assert not busy.query(), "the copies are over, and the compute stream is not"
            device.synchronize()
            assert (int(back.min()), int(back.max())) == (7, 7)
            assert (int(data.min()), int(data.max())) == (5, 5)
    finally:
        device.close()


@pytest.mark.parametrize("cycles", [0, 20_000_000])
def test_copies_that_are_late_change_no_number(monkeypatch, cycles):
    """Every copy stream is held up before each copy; what is sent ahead arrives when its unit should long have begun."""
    copy = cuda._copy

    def late(pairs, stream, *ready, **options):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
        copy(pairs, stream, *ready, **options)

    if cycles:
        monkeypatch.setattr(cuda, "_copy", late)
    tasks = [task(seed) for seed in range(3)]
    expected = [plain_losses(described) for described in tasks]
    with HydraExecutor(devices="cuda:0", device_memory=48 * MIB, max_concurrent=3, num_shards=4) as pool:
        results = pool.run(tasks)
        statistics = pool.stats().devices["cuda:0"]
    for result, (losses, state) in zip(results, expected, strict=True):
        assert losses_of(result) == losses
        assert all(tensor.cpu().equal(state[name]) for name, tensor in result.state_dict().items())
    assert statistics.bytes_ahead > 0
    assert statistics.peak_bytes <= 48 * MIB


def test_everything_is_given_back():
    with HydraExecutor(devices="cuda:0", device_memory="1GiB") as pool:
        results = pool.run([task()])
        losses_of(results[0])
        assert pool.stats().devices["cuda:0"].resident_bytes == 0
    state = results[0].state_dict()
    assert {tensor.device.type for tensor in state.values()} == {"cpu"}
    gc.collect()
    torch.cuda.synchronize()
    # What is left is cuBLAS workspaces.
    assert torch.cuda.memory_allocated(0) <= 32 * MIB


# Several devices: on two GPUs where there are two, and always as two devices on one.

PAIRS = ["cuda:0,0"] + (["cuda:0,1"] if torch.cuda.device_count() > 1 else [])


def pair(text, budget=1 << 30):
    """Two devices, closed by whoever opened them."""
    return discovery.open_devices(text, budget)


@pytest.mark.parametrize("text", PAIRS)
def test_what_is_taken_over_is_what_the_other_device_has_computed(text):
    """Its work is queued still when the copy is asked for, and the memory it comes to is still read by queued work."""
    one, other = pair(text)
    try:
        if other.reach(one) is DeviceCopyRoute.NONE:
            pytest.skip("these GPUs cannot access each other's memory")
        size = 16 * MIB
        with one.worker():
            data = one.empty(size)
            torch.cuda._sleep(int(1e8))
            data.fill_(7)
            with other.worker():
                target, seen = other.empty(size).fill_(1), other.empty(size)
                torch.cuda._sleep(int(1e8))
                seen.copy_(target)
                other.take_over(one, [(data, target)])
                assert (int(target.min()), int(target.max())) == (7, 7)
                assert (int(seen.min()), int(seen.max())) == (1, 1), "it had been read before"
    finally:
        for device in (one, other):
            device.close()


@pytest.mark.parametrize("text", PAIRS)
def test_a_block_moves_between_devices_without_the_host(text):
    one, other = pair(text)
    pagers = [Pager(device) for device in (one, other)]
    try:
        near = other.reach(one) is DeviceCopyRoute.NEAR
        block = Block(BlockKind.INPUTS, MIB, one.alignment)
        block.host = one.on_host(lambda: one.host_empty(MIB))
        block.host.fill_(1)
        for turn in range(20):
            pager = pagers[turn % 2]
            with pager.device.worker(), pager.lease([block], 0):
                block.data.add_(1)
                block.dirty = True
        with pagers[0].device.worker():
            bring_home(block)
        assert block.host.unique().tolist() == [21]
        if near:
            assert sum(pager.bytes_across[BlockKind.INPUTS] for pager in pagers) == 19 * MIB
            assert sum(pager.bytes_in[BlockKind.INPUTS] for pager in pagers) == MIB
        assert all(pager.ledger.used_bytes == 0 for pager in pagers)
    finally:
        for device in (one, other):
            device.close()


@pytest.mark.parametrize("text", PAIRS)
@pytest.mark.parametrize("way", [DATA_PARALLEL, PIPELINED])
@pytest.mark.parametrize("model", [Net, Noisy])
def test_a_step_split_over_two_devices_gives_the_plain_numbers(text, way, model):
    described = task(model=model, train=lambda: batches() * 4, accumulate=NUM_BATCHES, parallel=PARALLEL[way])
    _, state = plain_losses(described)
    pool = HydraExecutor(devices=text, device_memory="1GiB", num_shards=3)
    with pool:
        (result,) = pool.run([described])
        stats = pool.stats()
    losses_of(result)
    assert all(tensor.cpu().equal(state[name]) for name, tensor in result.state_dict().items())
    assert stats.steps_by_way[way] > 0
    assert all(device.units for device in stats.devices.values())


@pytest.mark.parametrize("model", [Net, Noisy])
def test_batches_that_go_through_each_shard_together_give_the_plain_numbers(model):
    """And how far a batch moves the stream is read from the state of the GPU's generator."""
    described = task(model=model, train=lambda: batches() * 4, accumulate=NUM_BATCHES)
    _, state = plain_losses(described)
    with HydraExecutor(devices="cuda:0", device_memory=32 * MIB, num_shards=3) as pool:
        (result,) = pool.run([described])
        stats = pool.stats()
    losses_of(result)
    assert all(tensor.cpu().equal(state[name]) for name, tensor in result.state_dict().items())
    assert stats.steps_by_way.get(GROUPED), stats.steps_by_way


@pytest.mark.parametrize("text", PAIRS)
def test_trials_on_two_devices_give_the_plain_numbers_within_both_budgets(text):
    budget = 48 * MIB
    tasks = [task(seed) for seed in range(4)]
    expected = [plain_losses(described) for described in tasks]
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    with HydraExecutor(devices=text, device_memory=budget, max_concurrent=4, policy="round_robin") as pool:
        results = pool.run(tasks)
        devices = pool.stats().devices
    on_first = sum(name.startswith("cuda:0") for name in devices)
    peak = torch.cuda.max_memory_allocated(0) - before
    for result, (losses, state) in zip(results, expected, strict=True):
        assert losses_of(result) == losses
        assert all(tensor.cpu().equal(state[name]) for name, tensor in result.state_dict().items())
    assert all(device.peak_bytes <= budget and device.units for device in devices.values())
    assert peak <= on_first * (budget + 32 * MIB)
    assert sum(device.bytes_across for device in devices.values()) > 0


def test_masks_do_not_depend_on_what_another_device_on_the_same_gpu_draws():
    def dropped():
        return nn.Sequential(
            nn.Linear(256, 256), nn.Dropout(0.5), nn.Linear(256, 256), nn.Dropout(0.5), nn.Linear(256, 16)
        )

    tasks = [task(seed, dropped) for seed in range(4)]
    with HydraExecutor(devices="cuda:0", device_memory="1GiB", num_shards=3, max_concurrent=1) as pool:
        alone = [losses_of(result) for result in pool.run(tasks)]
    with HydraExecutor(devices="cuda:0,0", device_memory="1GiB", num_shards=3, max_concurrent=4) as pool:
        beside = [losses_of(result) for result in pool.run(tasks)]
    assert beside == alone


def test_devices_on_one_gpu_have_their_own_budgets_and_the_allocator_the_sum():
    free, _ = discovery.gpu_memory(0)
    devices = pair("cuda:0,0", free // 4)
    try:
        assert [device.name for device in devices] == ["cuda:0/0", "cuda:0/1"]
        assert [device.budget_bytes for device in devices] == [free // 4] * 2
        beyond = 2 * LIBRARY_BYTES + torch.cuda.memory_allocated(0) + 64 * MIB
        with pytest.raises(torch.cuda.OutOfMemoryError):
            devices[0].empty(int(free // 2 * 1.09) + beyond)
    finally:
        for device in devices:
            device.close()


def test_segments_grow_in_place_and_what_was_freed_in_pieces_serves_a_large_tensor():
    (device,) = discovery.open_devices("cuda:0", "1GiB")
    try:
        pieces = [device.empty(64 * MIB) for _ in range(12)]
        del pieces[::2], pieces[:]
        assert device.empty(900 * MIB).nbytes == 900 * MIB
        assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    finally:
        device.close()
