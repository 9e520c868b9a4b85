"""What the trials of one small Hugging Face Trainer cost in a pool, and the memory of a process that searches long.

    python benchmarks/trainer.py                # eight trials: CPU time in three arms, three rounds
    python benchmarks/trainer.py --search 100   # a search: memory of the process along the way

Arms of the first command: stock trainings one after another, and the pool on `cpu:2` without and with fusion. A run is a
forked process, and its time is the CPU time of all its threads, from its first Trainer to its last result. Imports and a
first stock training come before. A ratio is that of two medians over the rounds.

The search runs `hyperparameter_search` on one device that has room for one and a half trainings. The memory is the
process's own (`Pss_Anon`: without files, which count less where other processes map the files, too).
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "integrations")]

import optuna  # noqa: E402 - the imports need the path and the variables above
import torch  # noqa: E402
import transformers  # noqa: E402
from pool import machine  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

import hydra_tune_transformers  # noqa: E402
from hydra_tune import HydraExecutor  # noqa: E402

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
ARMS = {"stock": None, "pool": "off", "fused": "on", "auto": "auto"}


def model_init() -> Any:
    """A BERT of two layers of width 64."""
    config = transformers.BertConfig(vocab_size=52, num_labels=3, max_position_embeddings=32, **SIZES)
    return transformers.BertForSequenceClassification(config)


def make_trainer(folder: str, rows: int, epochs: int, number: int = 0) -> Trainer:
    """The Trainer of a trial, each with its own learning rate and the same data."""
    data = [{"input_ids": [2 + (3 * i + j) % 50 for j in range(16)], "labels": i % 3} for i in range(rows + 32)]
    args = TrainingArguments(
        folder,
        num_train_epochs=epochs,
        learning_rate=1e-4 * (1 + number),
        eval_strategy="epoch",
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return Trainer(model_init=model_init, args=args, train_dataset=data[:rows], eval_dataset=data[rows:])


def run_arm(arm: str, makes: list[Callable[[], Trainer]]) -> dict[str, Any]:
    """Train each trial, and return the CPU time and the sizes of the groups."""
    begun = time.process_time()
    sizes = []
    if arm == "stock":
        for make in makes:
            make().train()
    else:
        with HydraExecutor("cpu:2", fusion=ARMS[arm]) as pool:
            results = pool.run([hydra_tune_transformers.task_from_trainer(make) for make in makes])
            sizes = [getattr(result, "group_size", None) or 1 for result in results]
    return {"seconds": time.process_time() - begun, "sizes": sizes}


def _answer(queue: Any, function: Callable[..., Any], *arguments: Any) -> None:
    queue.put(function(*arguments))


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a forked process."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=_answer, args=(queue, function, *arguments))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{function.__name__}{arguments} failed")
    return queue.get()


def cost(folder: str, rows: int, epochs: int, rounds: int, arms: list[str]) -> None:
    """Print the CPU time of eight trials in each arm."""
    makes = [partial(make_trainer, folder, rows, epochs, number) for number in range(8)]
    make_trainer(folder, 16, 1).train()
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(rounds):
        for arm in arms:
            run = forked(run_arm, arm, makes)
            seconds[arm].append(run["seconds"])
            print(f"round {number + 1} {arm:6} {run['seconds']:6.2f} s CPU {run['sizes']}", flush=True)
    medians = {arm: statistics.median(runs) for arm, runs in seconds.items()}
    for arm, median in medians.items():
        print(f"{arm:6} {median:6.2f} s CPU, {median / medians[arms[0]]:.2f} of {arms[0]}")


def own_memory() -> int:
    """Return the memory of the process without files, which other processes share, in bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("smaps_rollup has no Pss_Anon; run on Linux 5.4 or newer")


def search(folder: str, num_trials: int) -> None:
    """Print the memory of the process along a search of many trials."""
    trainer = make_trainer(folder, 32, 1)
    with HydraExecutor("cpu:1", num_shards=1) as pool:
        pool.run([hydra_tune_transformers.task_from_trainer(partial(make_trainer, folder, 32, 1))])
        (device,) = pool.stats().devices.values()
    budget = device.peak_bytes * 3 // 2
    memory: list[int] = []

    def objective(metrics: dict[str, float]) -> float:
        memory.append(own_memory())
        return metrics["eval_loss"]

    def space(trial: Any) -> dict[str, Any]:
        return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)}

    with HydraExecutor("cpu:1", device_memory=budget) as pool:
        best = hydra_tune_transformers.hyperparameter_search(
            trainer, space, objective, n_trials=num_trials, executor=pool, pruner=optuna.pruners.NopPruner()
        )
        (device,) = pool.stats().devices.values()
    print(f"{len(memory)} of {num_trials} trials reported; best {best.objective:.4f}")
    print(f"budget {budget / 2**20:.2f} MiB, peak on the device {device.peak_bytes / 2**20:.2f} MiB")
    for number in range(10, num_trials + 1, 10):
        print(f"after trial {number:4}: {memory[number - 1] / 2**20:.1f} MiB")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", type=int, metavar="TRIALS", help="trials of a search, in place of the arms")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=256, help="samples of an epoch, in batches of 8")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--arms", nargs="+", default=["stock", "pool", "fused"], choices=list(ARMS))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    print(f"{machine()}, transformers {transformers.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if options.search:
            search(folder, options.search)
        else:
            cost(folder, options.rows, options.epochs, options.rounds, options.arms)


if __name__ == "__main__":
    main()
