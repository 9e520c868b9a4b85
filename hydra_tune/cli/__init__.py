"""The command line: one file for each command, collected by `hydra_tune.cli.root`."""

from hydra_tune.cli.root import main

__all__ = ["main"]
