"""The sweep of `space.yaml`, from Python: plain Optuna but for one import, one argument and what `build` returns.

python examples/text/sweep.py [--data my.txt]
"""

import argparse

import language

import hydra_tune_optuna as optuna
from hydra_tune import HydraExecutor


def build(trial, data):
    """Draw hyperparameters as always; describe the training instead of running it."""
    return language.build_causal(
        data=data,
        lr=trial.suggest_float("lr", 5e-4, 2e-2, log=True),
        width=trial.suggest_categorical("width", [64, 96]),
        depth=trial.suggest_categorical("depth", [3, 4]),
        dropout=trial.suggest_categorical("dropout", [0.0, 0.1]),
    )


def main():
    """Run the sweep and print what it found."""
    parser = argparse.ArgumentParser(description="A hyperparameter search over a small causal language model.")
    parser.add_argument("--data", metavar="FILE", help="a text in UTF-8; Python's own documentation unless given")
    parser.add_argument("--trials", type=int, default=10, metavar="N", help="trials of the search (10)")
    given = parser.parse_args()
    if given.trials < 1:
        parser.error(f"argument --trials: {given.trials} is too few; give 1 or more")
    try:
        language.build_causal(data=given.data)  # costs nothing but reading the text, which trials share
    except ValueError as error:
        parser.error(str(error))
    with HydraExecutor(devices="cpu:2", device_memory="7MiB") as pool:
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=0),
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=2, reduction_factor=2),
            executor=pool,
        )
        study.optimize(lambda trial: build(trial, given.data), n_trials=given.trials)
        stats = pool.stats()
    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"best val_bits_per_byte {study.best_value:.3f} with {study.best_params}")
    print(f"{len(study.trials)} trials, {pruned} pruned: {stats.units_run} units run, {stats.units_saved} saved")


if __name__ == "__main__":
    main()
