"""A sweep of 64 small MLPs on scikit-learn's digits: stock Optuna with a plain PyTorch objective against fused trials.

    python benchmarks/fusion_sweep.py                   # one job and one device, then two of each
    python benchmarks/fusion_sweep.py --jobs 1 --trials 16 --epochs 3 --arms stock fused

Each arm searches learning rate, momentum and weight decay (with --search-dropout also dropout, which trials must have
in common to be fused), in a process of its own with one intra-op thread, from the same seeded sampler, and reports the
validation accuracy of every epoch. "stock" is the objective that PyTorch's and Optuna's tutorials write, with a
DataLoader; "by hand" is the same with tensors indexed by hand, without a loader; "unfused" and "fused" are hydra-
tune's. Times are those of `study.optimize`, and of hydra-tune all that it adds: the import of its own modules, of what its
captures import, the pool's beginning and its end, captures and traces. What every arm imports is left out: torch, what torch's
first optimizer imports, Optuna and scikit-learn. The trials in flight are one group, whatever there is of devices; with --size
they are several.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "integrations")]

import optuna  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402 - which the first optimizer of a process would import, in every arm
from sklearn.datasets import load_digits  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

_BEGAN = time.perf_counter(), time.process_time()
import hydra_tune_optuna  # noqa: E402
from hydra_tune import HydraExecutor, TrainTask  # noqa: E402

IMPORTED = time.perf_counter() - _BEGAN[0], time.process_time() - _BEGAN[1]

BATCH, WIDTH = 32, 64
ARMS = ("stock", "by hand", "unfused", "fused")


def digits():
    """Training and validation data: 1437 and 360 samples."""
    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return TensorDataset(x[:1437].clone(), y[:1437].clone()), TensorDataset(x[1437:].clone(), y[1437:].clone())


TRAIN, VALIDATE = digits()


def mlp(dropout):
    first = [nn.Linear(64, WIDTH), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*first, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def suggest(trial, dropout):
    """The rates, and dropout unless it is given."""
    rates = {
        "lr": trial.suggest_float("lr", 1e-3, 0.3, log=True),
        "momentum": trial.suggest_float("momentum", 0.0, 0.95),
        "weight_decay": trial.suggest_float("weight_decay", 1e-6, 1e-2, log=True),
    }
    return rates, trial.suggest_float("dropout", 0.05, 0.5) if dropout is None else dropout


def stock(trial, epochs, dropout):
    """What the tutorials write."""
    rates, dropout = suggest(trial, dropout)
    torch.manual_seed(trial.number)
    model = mlp(dropout)
    optimizer = torch.optim.SGD(model.parameters(), **rates)
    train = DataLoader(TRAIN, batch_size=BATCH, shuffle=True)
    validate = DataLoader(VALIDATE, batch_size=BATCH)
    accuracy = 0.0
    for epoch in range(epochs):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        model.eval()
        correct = 0
        with torch.no_grad():
            for x, y in validate:
                correct += (model(x).argmax(1) == y).sum().item()
        accuracy = correct / len(VALIDATE)
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy


def by_hand(trial, epochs, dropout):
    """The same by somebody who knows what a loader costs."""
    rates, dropout = suggest(trial, dropout)
    torch.manual_seed(trial.number)
    model = mlp(dropout)
    optimizer = torch.optim.SGD(model.parameters(), **rates)
    (x, y), (held_x, held_y) = TRAIN.tensors, VALIDATE.tensors
    accuracy = 0.0
    for epoch in range(epochs):
        model.train()
        for chosen in torch.randperm(len(x)).split(BATCH):
            loss = functional.cross_entropy(model(x[chosen]), y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(held_x).argmax(1) == held_y).float().mean().item()
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy


def accuracy_of(module, batch):
    x, y = batch
    return {"accuracy": (module(x).argmax(1) == y).float().mean()}


def task(trial, epochs, dropout):
    """The same as a task."""
    rates, dropout = suggest(trial, dropout)
    return TrainTask(
        model=partial(mlp, dropout),
        optimizer=partial(torch.optim.SGD, **rates),
        train=TRAIN,
        validate=VALIDATE,
        batch_size=BATCH,
        loss=functional.cross_entropy,
        evaluate=accuracy_of,
        epochs=epochs,
        metric="val_accuracy",
        seed=trial.number,
    )


def sampler_of(name):
    return optuna.samplers.TPESampler(seed=0) if name == "tpe" else optuna.samplers.RandomSampler(seed=0)


def run(arm, jobs, options):
    """One search; returns seconds, CPU seconds and the best accuracy."""
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    arguments = {"epochs": options.epochs, "dropout": None if options.search_dropout else options.dropout}
    create = {"direction": "maximize", "sampler": sampler_of(options.sampler), "pruner": optuna.pruners.NopPruner()}
    if arm in ("stock", "by hand"):
        study = optuna.create_study(**create)
        start, cpu = time.perf_counter(), time.process_time()
        study.optimize(partial(stock if arm == "stock" else by_hand, **arguments), n_trials=options.trials, n_jobs=jobs)
        return time.perf_counter() - start, time.process_time() - cpu, study.best_value
    fusion = "on" if arm == "fused" else "off"
    size, flying = options.size or options.members, options.members if arm == "fused" else None
    start, cpu = time.perf_counter(), time.process_time()
    with HydraExecutor(f"cpu:{jobs}", "4GiB", fusion=fusion, fusion_size=size, max_concurrent=flying) as pool:
        study = hydra_tune_optuna.create_study(executor=pool, **create)
        study.optimize(partial(task, **arguments), n_trials=options.trials)
    seconds = time.perf_counter() - start, time.process_time() - cpu
    wall, cpu = (own + imported for own, imported in zip(seconds, IMPORTED, strict=True))
    return wall, cpu, study.best_value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--members", type=int, default=32, help="trials in flight")
    parser.add_argument("--size", type=int, help="of a group; all that are in flight unless given")
    parser.add_argument("--sampler", choices=["tpe", "random"], default="tpe")
    parser.add_argument("--dropout", type=float, default=0.0, help="of all trials")
    parser.add_argument("--search-dropout", action="store_true", help="in place of --dropout")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(run(options.one, options.jobs[0], options)))
        return
    print("jobs  arm          wall      CPU  best accuracy  wall against stock")
    for jobs in options.jobs:
        base = None
        for arm in options.arms:
            command = [sys.executable, __file__, *sys.argv[1:], "--jobs", str(jobs), "--one", arm]
            found = subprocess.run(command, capture_output=True, text=True, check=True)
            wall, cpu, best = json.loads(found.stdout.splitlines()[-1])
            base = base or wall
            print(f"{jobs:4}  {arm:8} {wall:7.1f} s {cpu:6.1f} s {best:14.4f} {base / wall:17.2f}x", flush=True)


if __name__ == "__main__":
    main()
