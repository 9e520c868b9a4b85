"""The command line. One file per command; `hydra_tune.cli.root` finds them."""

from hydra_tune.cli.root import main

__all__ = ["main"]
