"""The choice of a task by which its steps run a certain way."""

from hydra_tune.train.parallel.cost_model import DATA_PARALLEL, GROUPED, ONE_DEVICE, PIPELINED

PARALLEL = {None: "auto", DATA_PARALLEL: "data", PIPELINED: "pipeline", GROUPED: "none", ONE_DEVICE: "none"}
