"""Ray Tune's ASHA over vision transformers on handwritten digits, all trials of a node in one pool.

python examples/ray/sweep.py                          # on this machine
python examples/ray/sweep.py --address auto           # on the cluster that this machine is a node of
"""

import argparse
import os
import sys
from pathlib import Path

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

import hydra_tune_ray

DIGITS = str(Path(__file__).parents[1] / "digits")


def build(config):
    """Describe the training; called in a pool, which is where `digits` and torch are imported."""
    import digits  # noqa: PLC0415

    return digits.build_vit(**config)


def main():
    """Run the search and print what it found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="local", help="of a Ray cluster: auto, or HOST:6379")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument(
        "--storage", default=str(Path("~/ray_results").expanduser()), help="where Ray keeps its results"
    )
    options = parser.parse_args()

    paths = os.pathsep.join([DIGITS, *sys.path])
    ray.init(address=options.address, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    trained = hydra_tune_ray.trainable(build, devices="cpu:2", device_memory="5MiB")
    tuner = tune.Tuner(
        trained,
        param_space={
            "lr": tune.loguniform(3e-4, 2e-2),
            "width": tune.choice([48, 64]),
            "depth": tune.choice([4, 5, 6]),
            "dropout": tune.choice([0.0, 0.1]),
            "epochs": options.epochs,
        },
        tune_config=tune.TuneConfig(
            metric="val_acc",
            mode="max",
            num_samples=options.trials,
            scheduler=ASHAScheduler(max_t=options.epochs, grace_period=2, reduction_factor=2),
            max_concurrent_trials=4,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="digits",
            storage_path=options.storage,
            callbacks=[hydra_tune_ray.PoolCallback(trained)],
            failure_config=tune.FailureConfig(max_failures=2),
        ),
    )
    best = tuner.fit().get_best_result()
    module = hydra_tune_ray.load_module(build, best)
    print(f"best val_acc {best.metrics['val_acc']:.4f} with {best.config}")
    print(f"{sum(parameter.numel() for parameter in module.parameters())} parameters")
    ray.shutdown()


if __name__ == "__main__":
    sys.path.insert(0, DIGITS)
    main()
