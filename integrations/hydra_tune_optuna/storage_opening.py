"""Opens the storage that a sweep file or the command line names, without creating one for a reader.

`run_sweep` (`sweep.py`), `find_weights` (`finding.py`) and `OptunaStudyReader` (`study_reader.py`) open storages here. The
module must not import torch, so that `hydra-tune list` answers at once.
"""

from pathlib import Path

from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend

from hydra_tune.errors import ConfigError

_JOURNAL = "journal:"
_FILES = ("journal://", "journal:", "sqlite:///")


def check_file(url: str) -> None:
    """Refuse a storage file that does not exist: Optuna would create the file, while a reader wants an error.

    Raises:
        ConfigError: no such file.
    """
    prefix = next((prefix for prefix in _FILES if url.startswith(prefix)), None)
    if prefix is not None:
        # Without the options of a database's URL.
        path = Path(url.removeprefix(prefix).partition("?")[0])
        if not path.is_file():
            raise ConfigError(f"the storage {url!r} cannot be opened: there is no file {str(path)!r}")


def open_storage(url: str | None) -> str | BaseStorage | None:
    """Convert a sweep file's storage to a URL or storage object for Optuna."""
    if url is not None and url.startswith(_JOURNAL):
        return JournalStorage(JournalFileBackend(url.removeprefix(_JOURNAL).removeprefix("//")))
    return url
