"""What a process loads that trains on a pool, up to what torch loads only when it captures: for processes that are forked."""

# ruff: noqa: F401
import optuna
import torch._dynamo
import torch._export.non_strict_utils
import torch.export._trace

import hydra_tune.cli.commands.sweep
import hydra_tune.executor
import hydra_tune_optuna.sweep
