"""Opens the storage that a sweep file or the command line names, without creating one for a reader.

`run_sweep` and `check_sweep` (`sweep.py`), and `OptunaStudyReader` and `stored_study` (`study_reader.py`) open storages
here. Optuna creates a missing storage when the value of `open_storage` is used. So a reader must call `has_tables` before,
and `check_file` first where the reader wants an error for a missing file. The module must not import torch, so that
`hydra-tune list` answers at once.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend

from hydra_tune.cli.inspect.run_scan import STORAGE_FILE
from hydra_tune.errors import ConfigError

_JOURNAL = "journal:"
_SQLITE = "sqlite:///"


def has_tables(url: str) -> bool:
    """Whether a storage has Optuna's tables, or a journal has its file; creates no tables.

    Raises:
        ConfigError: the text is no URL, or the file cannot be there, as its folder is missing.
        Exception: whatever SQLAlchemy raises about the URL of a database, or its server.
    """
    path = _file(url)
    if path is None:
        from sqlalchemy import create_engine, inspect  # noqa: PLC0415 - it takes a while, and files do not need it

        return inspect(create_engine(url)).has_table("alembic_version")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {str(path.parent.absolute())!r}; make the folder")
    return path.is_file() and (url.startswith(_JOURNAL) or _has_tables(path))


def check_file(url: str) -> None:
    """Refuse a missing storage file, or an SQLite file without Optuna's tables: Optuna would create the file or tables.

    A second program that creates tables at the same time would make a search fail. A server's storage is not checked.

    Raises:
        ConfigError: the text is no URL, there is no such file, or an SQLite file has no tables of Optuna, or not all of
            them yet.
    """
    path = _file(url)
    if path is not None:
        if not path.is_file():
            raise ConfigError(f"the storage {url!r} cannot be opened: there is no file {str(path)!r}")
        if not (url.startswith(_JOURNAL) or _has_tables(path)):
            raise ConfigError(f"the storage {url!r} has no study: Optuna's tables are not there, or not yet")


def _file(url: str) -> Path | None:
    """Path of a storage's file; None for a server."""
    parts = STORAGE_FILE.fullmatch(url)
    if parts is not None:
        return Path(parts[2])
    if "://" not in url:
        raise ConfigError(f"{url!r} is no URL of a storage; did you mean '{_SQLITE}{url}'?")
    return None


def _has_tables(path: Path) -> bool:
    """Whether an SQLite file has all of Optuna's tables; True for files that Optuna will refuse by itself."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
            # Optuna writes this row last.
            return connection.execute("SELECT 1 FROM alembic_version").fetchone() is not None
    except sqlite3.DatabaseError as error:
        return "no such table" not in str(error)


def open_storage(url: str | None) -> str | BaseStorage | None:
    """Convert a sweep file's storage to a URL or storage object for Optuna."""
    if url is not None and url.startswith(_JOURNAL):
        return JournalStorage(JournalFileBackend(url.removeprefix(_JOURNAL).removeprefix("//")))
    return url
