"""Old paths of modules that users may import: each works for one more release, with a warning that names the new path.

`__init__.py` calls `find_old_paths` when a program first imports `hydra_tune`. An old path gives the module of the new
path, the same object. The module must import nothing of the package, whose import stays cheap.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OLD_PATHS = {
    "hydra_tune.fusion.planner": "hydra_tune.planner",
}


class OldPathFinder(MetaPathFinder):
    """Finds a module under its old path, and the modules of a package that has moved as a whole."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the new path of a module; None for a module that has not moved."""
        for old, new in OLD_PATHS.items():
            if fullname == old or fullname.startswith(f"{old}."):
                return ModuleSpec(fullname, MovedLoader(new + fullname.removeprefix(old)))
        return None


class MovedLoader(Loader):
    """Imports a module by its new path."""

    def __init__(self, path: str) -> None:
        self._path = path

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module by the new path; the old path names the same module from now on."""
        warnings.warn(
            f"{spec.name} is {self._path} now; the old path goes in the next release", DeprecationWarning, stacklevel=2
        )
        module = import_module(self._path)
        # The import system gives the module the spec of the old path after this call.
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of the new path, because the module has run already."""
        module.__spec__ = self._spec


def find_old_paths() -> None:
    """Have imports find old paths from now on."""
    if not any(isinstance(finder, OldPathFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldPathFinder())
