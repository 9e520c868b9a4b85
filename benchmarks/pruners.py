"""Which pruners work at which width: shard units run by the same seeded searches, with eager and staggered admission.

    python benchmarks/pruners.py                       # on cpu:2; the table of docs/results/pruning.md
    python benchmarks/pruners.py --pruners median --widths 8 --seeds 1

Each search is of small networks on made-up data, all of the same number of steps, with a random sampler: at every width and
with every pruner a seed draws the same trials. So a search without pruning always runs the same units, and what is below
that was saved. Wider than the devices, the figures depend on timing and differ a little between runs.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import mean

import optuna
import torch
from torch import nn

import hydra_tune_optuna
from hydra_tune import HydraExecutor, TrainTask

EPOCHS = 9
_GENERATOR = torch.Generator().manual_seed(0)
_CENTRES = torch.randn(10, 64, generator=_GENERATOR)
_LABELS = torch.randint(0, 10, (384,), generator=_GENERATOR)
_INPUTS = _CENTRES[_LABELS] + 3.0 * torch.randn(384, 64, generator=_GENERATOR)
TRAIN = torch.utils.data.TensorDataset(_INPUTS[:256], _LABELS[:256])
VALIDATE = torch.utils.data.TensorDataset(_INPUTS[256:], _LABELS[256:])

PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    "percentile": partial(optuna.pruners.PercentilePruner, 25.0),
    "wilcoxon": optuna.pruners.WilcoxonPruner,
    "halving": partial(optuna.pruners.SuccessiveHalvingPruner, min_resource=1),
    "halving_auto": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": partial(optuna.pruners.HyperbandPruner, max_resource=EPOCHS),
    "hyperband_auto": optuna.pruners.HyperbandPruner,
    "threshold": partial(optuna.pruners.ThresholdPruner, upper=2.5, n_warmup_steps=2),
    "patient": partial(optuna.pruners.PatientPruner, None, patience=1),
}


def network(width: int) -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def build(trial: optuna.Trial) -> TrainTask:
    """A trial: from hardly learning to diverging."""
    width = trial.suggest_categorical("width", [16, 32])
    learning_rate = trial.suggest_float("learning_rate", 1e-3, 3.0, log=True)
    return TrainTask(
        model=partial(network, width),
        optimizer=partial(torch.optim.SGD, lr=learning_rate),
        train=TRAIN,
        validate=VALIDATE,
        batch_size=128,
        loss=nn.functional.cross_entropy,
        epochs=EPOCHS,
        metric="val_loss",
        result="best",
    )


@dataclass(frozen=True, kw_only=True)
class Search:
    """What one search came to."""

    units_run: int
    units_saved: int
    pruned: int
    best: float
    seconds: float


def search(pool: HydraExecutor, pruner: str, *, seed: int, trials: int) -> Search:
    """One seeded search in a pool that may have served others."""
    study = hydra_tune_optuna.create_study(
        study_name=f"search {seed}",  # which gives Hyperband its brackets
        sampler=optuna.samplers.RandomSampler(seed=seed),
        pruner=PRUNERS[pruner](),
        executor=pool,
    )
    before, start = pool.stats(), time.perf_counter()
    study.optimize(build, n_trials=trials)
    seconds, after = time.perf_counter() - start, pool.stats()
    return Search(
        units_run=after.units_run - before.units_run,
        units_saved=after.units_saved - before.units_saved,
        pruned=sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials),
        best=study.best_value,
        seconds=seconds,
    )


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:2")
    parser.add_argument("--policy", default="lrtf")
    parser.add_argument("--pruners", nargs="+", default=list(PRUNERS), choices=list(PRUNERS))
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 2, 4, 8, 24])
    parser.add_argument("--admissions", nargs="+", default=["eager", "staggered"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=24)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(
        f"{options.trials} trials of {EPOCHS} epochs, {options.devices}, {options.policy}, means of {options.seeds} seeds"
    )
    print("pruner          width  admission   units run  units saved  saved  pruned    best  seconds")
    for width in options.widths:
        for admission in options.admissions if width > 1 else ["eager"]:
            with HydraExecutor(
                devices=options.devices,
                device_memory="64MiB",
                policy=options.policy,
                max_concurrent=width,
                admission=admission,
            ) as pool:
                for pruner in options.pruners:
                    seen = [search(pool, pruner, seed=seed, trials=options.trials) for seed in range(options.seeds)]
                    _print_row(pruner, width, admission, seen)


def _print_row(pruner: str, width: int, admission: str, seen: list[Search]) -> None:
    run, saved = mean(one.units_run for one in seen), mean(one.units_saved for one in seen)
    print(
        f"{pruner:<15} {width:5}  {admission:<10} {run:10.0f} {saved:12.0f} {saved / (run + saved):6.0%} "
        f"{mean(one.pruned for one in seen):7.1f} {mean(one.best for one in seen):7.4f} "
        f"{mean(one.seconds for one in seen):8.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
