"""One arm of the benchmark in this process: the pool, or plain PyTorch one trial after another."""

import gc
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import transformer  # noqa: E402 - benchmarks/ is the script's folder

from hydra_tune import HydraExecutor, Reported, train_plain  # noqa: E402 - tests/ needs the path above
from tests.support.tracker import StorageTracker  # noqa: E402

NUM_TRIALS = 8
ARMS = ("cpu:1", "cpu:2", "spilled", "plain-1", "plain-2")


def training_peak_bytes() -> int:
    """The most bytes one trial's storages take in plain PyTorch, from building the model to the third step."""
    tracker = StorageTracker()
    gc.collect()
    gc.disable()
    with tracker():
        train_plain(transformer.build(0, 3))
    gc.enable()
    return max(tracker.peak_bytes)


def run_pool(devices: str, budget_bytes: int | None, num_steps: int) -> dict[str, float]:
    tasks = [transformer.build(seed, num_steps) for seed in range(NUM_TRIALS)]
    with HydraExecutor(devices=devices, device_memory=budget_bytes, max_concurrent=NUM_TRIALS) as pool:
        started, cpu_started = time.perf_counter(), time.process_time()
        stream, num_shards, running = pool.events(), 0, NUM_TRIALS
        jobs = [pool.submit(task, events=stream) for task in tasks]
        while running:
            event = stream.get()
            if isinstance(event, Reported):
                num_shards = event.job.progress.num_shards
                event.job.proceed()
            else:
                running -= 1
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        stats = pool.stats()
    results = [job.result() for job in jobs]
    for result in results:
        if result.error is not None:
            raise result.error
    devices_stats = stats.devices.values()
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "scheduler_share": stats.scheduler_seconds / seconds,
        "busy_share": sum(device.busy_seconds for device in devices_stats) / len(devices_stats) / seconds,
        "num_shards": num_shards,
        "peak_bytes": max(device.peak_bytes for device in devices_stats),
        "bytes_in": sum(device.bytes_in for device in devices_stats),
        "bytes_out": sum(device.bytes_out for device in devices_stats),
        "loss": results[0].history[-1]["train_loss"],
    }


def run_plain(num_steps: int) -> dict[str, float]:
    tasks = [transformer.build(seed, num_steps) for seed in range(NUM_TRIALS)]
    started, cpu_started = time.perf_counter(), time.process_time()
    results = [train_plain(task) for task in tasks]
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    step_seconds = seconds / (NUM_TRIALS * num_steps)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "step_seconds": step_seconds,
        "loss": results[0].history[-1]["train_loss"],
    }


def run_arm(arm: str, num_steps: int, budget_bytes: int) -> dict[str, float]:
    """Run one arm here; the process was started for it."""
    if arm.startswith("plain"):
        torch.set_num_threads(int(arm[-1]))
        return run_plain(num_steps)
    torch.set_num_threads(1)
    if arm == "spilled":
        return run_pool("cpu:2", budget_bytes, num_steps)
    return run_pool(arm, None, num_steps)
