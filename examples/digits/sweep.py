"""The sweep of `space.yaml`, from Python: plain Optuna but for one import, one argument and what `build` returns.

python examples/digits/sweep.py
"""

import digits

import hydra_tune_optuna as optuna
from hydra_tune import HydraExecutor


def build(trial):
    """Draw hyperparameters as always; describe the training instead of running it."""
    return digits.build_vit(
        lr=trial.suggest_float("lr", 3e-4, 2e-2, log=True),
        width=trial.suggest_categorical("width", [48, 64]),
        depth=trial.suggest_categorical("depth", [4, 6]),
        dropout=trial.suggest_categorical("dropout", [0.0, 0.1]),
        epochs=5,
    )


def main():
    """Run the sweep and print what it found."""
    with HydraExecutor(devices="cpu:2", device_memory="5MiB") as pool:
        study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=0),
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
            executor=pool,
        )
        study.optimize(build, n_trials=8)
        stats = pool.stats()
    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"best val_acc {study.best_value:.4f} with {study.best_params}")
    print(f"{len(study.trials)} trials, {pruned} pruned: {stats.units_run} units run, {stats.units_saved} saved")


if __name__ == "__main__":
    main()
