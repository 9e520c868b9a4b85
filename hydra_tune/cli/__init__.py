"""The command line: `cli/root.py` collects the commands of `cli/commands/`.

`__main__.py` and the console script `hydra-tune` import `main`. No file of the package may import torch while `main` is
imported, so that help and wrong commands answer at once.
"""

from hydra_tune.cli.root import main

__all__ = ["main"]
