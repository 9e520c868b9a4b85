"""What a pool spares Ray Tune: 16 short trials in one pool, and as stock Ray trainables that train with torch themselves.

python benchmarks/ray_overhead.py [--trials 16] [--epochs 4] [--only stock|pool|report]

One Ray for all; each part is timed from its first line to the end of `Tuner.fit()`, the start of pools included and that of Ray
left out. `report` is one trial that has almost nothing to compute: its step is what a report costs. Beside it is a trainable
that does nothing at all: what is between two of its reports is Ray's own.
"""

import argparse
import os
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build(config):
    """A small network on random data; called in a pool."""
    from functools import partial  # noqa: PLC0415

    import torch  # noqa: PLC0415

    from hydra_tune import TrainTask  # noqa: PLC0415

    def network():
        return torch.nn.Sequential(
            torch.nn.Linear(32, config["width"]), torch.nn.Tanh(), torch.nn.Linear(config["width"], 1)
        )

    def batches():
        generator = torch.Generator().manual_seed(0)
        return [
            (torch.randn(64, 32, generator=generator), torch.randn(64, 1, generator=generator))
            for _ in range(config["batches"])
        ]

    return TrainTask(
        model=network,
        optimizer=partial(torch.optim.Adam, lr=config["lr"]),
        loss=torch.nn.functional.mse_loss,
        train=batches,
        epochs=config["epochs"],
    )


def stock():
    """The same training as a trainable of Ray's, a process with torch for each trial."""
    from ray import tune  # noqa: PLC0415

    class Stock(tune.Trainable):
        def setup(self, config):
            import torch  # noqa: PLC0415

            torch.set_num_threads(1)
            self.torch, self.task = torch, build(config)
            torch.manual_seed(self.task.seed)
            self.module = self.task.model()
            self.optimizer = self.task.optimizer(self.module.parameters())

        def step(self):
            losses = []
            for inputs, targets in self.task.train():
                loss = self.task.loss(self.module(inputs), targets)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss.item())
            return {"train_loss": sum(losses) / len(losses), "done": self.iteration + 1 == self.task.epochs}

        def save_checkpoint(self, checkpoint_dir):
            self.torch.save(self.module.state_dict(), Path(checkpoint_dir) / "model.pt")

        def load_checkpoint(self, checkpoint):
            self.module.load_state_dict(self.torch.load(Path(checkpoint) / "model.pt"))

    return Stock


def stamped(trained):
    """The same trainable, which says when each of its steps is over."""

    class Stamped(trained):
        def step(self):
            return {**super().step(), "at": time.perf_counter()}

    return Stamped


def idle():
    """A trainable that does nothing."""
    from ray import tune  # noqa: PLC0415

    class Idle(tune.Trainable):
        def setup(self, config):
            self.epochs = config["epochs"]

        def step(self):
            return {"train_loss": 0.0, "done": self.iteration + 1 == self.epochs}

        def save_checkpoint(self, checkpoint_dir):
            """There is nothing to save."""

        def load_checkpoint(self, checkpoint):
            """Nor to load."""

    return Idle


def told(what, results):
    """Say what the reports of one trial took."""
    frame = results[0].metrics_dataframe[20:]
    each, at = sorted(frame["time_this_iter_s"]), list(frame["at"])
    print(
        f"{what}: {1000 * statistics.median(each):.2f} ms in the median, {1000 * each[int(0.95 * len(each))]:.2f} ms at 95%; "
        f"one each {1000 * (at[-1] - at[0]) / (len(at) - 1):.2f} ms",
        flush=True,
    )


def fit(trained, trials, *, epochs, batches, callbacks=()):
    """Run a search; returns its results."""
    from ray import tune  # noqa: PLC0415

    return tune.Tuner(
        trained,
        param_space={
            "lr": tune.grid_search([0.01 / 2 ** (number / 4) for number in range(trials)]),
            "width": 64,
            "batches": batches,
            "epochs": epochs,
        },
        tune_config=tune.TuneConfig(
            metric="train_loss", mode="min", max_concurrent_trials=4, reuse_actors=bool(callbacks)
        ),
        run_config=tune.RunConfig(storage_path=tempfile.mkdtemp(), verbose=0, callbacks=list(callbacks)),
    ).fit()


def in_pool(trials, **sizes):
    import hydra_tune_ray  # noqa: PLC0415
    from hydra_tune_ray.pools import pools_of  # noqa: PLC0415

    trained = stamped(hydra_tune_ray.trainable(build, devices="cpu:2", device_memory="64MiB"))
    results = fit(trained, trials, callbacks=[hydra_tune_ray.PoolCallback(trained)], **sizes)
    pools_of(trained).close()
    return results


def timed(what, run):
    began = time.perf_counter()
    results = run()
    seconds = time.perf_counter() - began
    assert results.num_errors == 0, results.errors
    print(f"{what}: {seconds:.1f} s", flush=True)
    return seconds, results


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--only", choices=["stock", "pool", "report"])
    options = parser.parse_args()
    token = Path(tempfile.mkdtemp()) / "token"
    token.write_text(secrets.token_hex(16))
    token.chmod(0o600)
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations")]),
    }
    sys.path[:0] = [str(ROOT), str(ROOT / "integrations")]
    import ray  # noqa: PLC0415

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
    )
    sizes = {"epochs": options.epochs, "batches": options.batches}
    seconds = {}
    if options.only in (None, "pool"):
        seconds["pool"], _ = timed(f"{options.trials} trials in one pool", lambda: in_pool(options.trials, **sizes))
    if options.only in (None, "stock"):
        seconds["stock"], _ = timed(f"{options.trials} stock trainables", lambda: fit(stock(), options.trials, **sizes))
    if len(seconds) == 2:
        print(f"ratio: {seconds['stock'] / seconds['pool']:.2f}", flush=True)
    if options.only in (None, "report"):
        _, results = timed("300 reports of one trial", lambda: in_pool(1, epochs=300, batches=1))
        told("a report, its one optimizer step included", results)
        _, results = timed("300 reports of Ray alone", lambda: fit(stamped(idle()), 1, epochs=300, batches=1))
        told("a report of a trainable that does nothing", results)
    ray.shutdown()


if __name__ == "__main__":
    main()
