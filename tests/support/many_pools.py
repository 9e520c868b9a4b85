"""A program that has N pools one after the other, each with a model of its own, and started on a thread that ends with it."""

import sys
import threading

from torch import nn

from tests.unit.pool.tasks import short, train


def run_pool(width: int) -> None:
    """Have a pool of its own capture and train a model that no pool before had."""
    described = short(model=lambda: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4)), epochs=1)
    sys.stdout.write(f"{width} {train(described, num_shards='layer').status}\n")


if __name__ == "__main__":
    for width in range(1, int(sys.argv[1]) + 1):
        thread = threading.Thread(target=run_pool, args=(width,))
        thread.start()
        thread.join()
