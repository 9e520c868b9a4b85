"""Process that forks the workers of loaders: a process without threads, with the program's modules loaded.

`loader_workers.py` holds a server in `SERVERS` while an executor needs workers, and takes the server before the workers
of a pass start. `isolation/child.py` forgets the servers of the process from which the child was forked, and
`isolation/parent.py` asks `is_quiet` before a fork of its own. `worker_parts.py` refuses objects of a session that a server
does not know (`LoaderForkServer.names`).

Note: two ways to begin. `LoaderForkServer.fork` copies this process within milliseconds: the workers then have the program's
modules, its `__main__`, and classes of a notebook or of a script from standard input. A copy is sound only while every other
Python thread waits, because a lock held by a busy thread stays locked in the copy for ever. So the executor takes a server when
a task with workers is submitted, where possible before the pool is at work. Where a thread is busy, `LoaderForkServer.start`
begins a new interpreter to import the loaded modules once for all workers instead of once for each.

This module knows nothing of loaders, trials or devices. `_WAITS` names functions of other files in which a pool's
threads wait: renaming such a function or file without `_WAITS` makes workers start slowly.
"""

import contextlib
import gc
import io
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Iterable
from multiprocessing import connection, context, forkserver, popen_forkserver, process, resource_tracker, spawn
from multiprocessing import util as _typed_util
from pathlib import Path
from types import FrameType
from typing import Any

# Parts of the standard library that its type hints leave out.
util: Any = _typed_util
arbitrary_address: Any = vars(connection)["arbitrary_address"]
reduction: Any = vars(context)["reduction"]

# A thread whose innermost frame is one of these waits, and holds no lock of torch or of the system.
_WAITS = {"threading.py": ("wait", "wait_for", "join", "_wait_for_tstate_lock"), "selectors.py": ("select",)}
_WAITS |= {"concurrent/futures/thread.py": ("_worker",), "zmq/sugar/poll.py": ("poll",)}
_WAITS |= {"multiprocessing/connection.py": ("_recv",)}
# Tests that run in parallel by pytest-xdist, the user's included.
_WAITS |= {"execnet/gateway_base.py": ("read",)}
# A pool's own threads call `SimpleQueue.get` there, which has no frame of its own.
_WAITS |= {"hydra_tune/pool/runtime/worker.py": ("_work",), "hydra_tune/pool/runtime/preparer.py": ("work",)}
_WAITS |= {"hydra_tune/devices/single_thread.py": ("_work",)}
# A thread that waits for ever.
_WAITS |= {"hydra_tune/older_torch.py": ("hold_guard",)}

_PATIENCE_SECONDS = 0.25
_NEVER_IMPORTED = ("__main__", "__mp_main__")


class LoaderForkServer(forkserver.ForkServer):
    """A process for forking workers.

    Attributes:
        names: for a forked server, a copy of the program's `__main__` namespace at the fork; None for a server that
            imports `__main__`.
    """

    _lock: threading.Lock
    _forkserver_address: str | None
    _forkserver_alive_fd: int | None
    _forkserver_pid: int | None

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, object] | None = None

    def fork(self) -> None:
        """Begin as a copy of this process; no other thread may be busy."""
        self.names = dict(vars(sys.modules["__main__"]))
        with self._listening() as listener:
            alive_r, alive_w = os.pipe()
            util._flush_std_streams()  # noqa: SLF001 - the copy would write buffered text again
            with warnings.catch_warnings():
                # Python 3.12 warns of threads, and counts those of native libraries, which a DataLoader forks beside as well.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _serve_forked(listener, alive_r, alive_w)
            os.close(alive_r)
            self._is_running(listener, pid, alive_w)

    def start(self) -> None:
        """Begin as a new interpreter, and import this process's modules there in the background."""
        with self._listening() as listener:
            alive_r, alive_w = os.pipe()
            spec_r, spec_w = os.pipe()
            code = f"from {__name__} import serve; serve({listener.fileno()}, {alive_r}, {spec_r})"
            flags = util._args_from_interpreter_flags()  # noqa: SLF001
            command = [spawn.get_executable(), *flags, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]
            try:
                pid = util.spawnv_passfds(command[0], command, [listener.fileno(), alive_r, spec_r])
            finally:
                os.close(alive_r)
                os.close(spec_r)
            with os.fdopen(spec_w, "wb") as file:
                pickle.dump(_loaded_here(), file)
            self._is_running(listener, pid, alive_w)

    def stop(self) -> None:
        """End the server; its workers must have ended."""
        with self._lock:
            pid = self._forkserver_pid  # None where `ensure_running` has found that the server has ended
            if self._forkserver_alive_fd is None or self._forkserver_address is None:
                return
            os.close(self._forkserver_alive_fd)
            # Killed, because a server that is still importing would not notice the closed pipe.
            if pid is not None and not _has_ended(pid, os.WNOHANG):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                _has_ended(pid, 0)
            Path(self._forkserver_address).unlink(missing_ok=True)
            self._forkserver_pid = self._forkserver_alive_fd = self._forkserver_address = None

    def ensure_running(self) -> None:
        """Raise if the server has ended; the base class calls this before each worker.

        Raises:
            ConnectionError: the server has ended.
        """
        # As in the base class, whose method this one replaces.
        resource_tracker.ensure_running()
        with self._lock:
            pid = self._forkserver_pid
            if pid is None or _has_ended(pid, os.WNOHANG):
                self._forkserver_pid = None
                raise ConnectionError("the process that forks workers has ended")

    def is_running(self) -> bool:
        """Whether the server process lives."""
        try:
            self.ensure_running()
        except ConnectionError:
            return False
        return True

    @staticmethod
    def _listening() -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(arbitrary_address("AF_UNIX"))
        listener.listen()
        return listener

    def _is_running(self, listener: socket.socket, pid: int, alive_w: int) -> None:
        resource_tracker.ensure_running()
        self._forkserver_address = listener.getsockname()
        self._forkserver_alive_fd, self._forkserver_pid = alive_w, pid


def _has_ended(pid: int, options: int) -> bool:
    """Wait for a child as `os.waitpid` does; return whether the child has ended."""
    try:
        return os.waitpid(pid, options)[0] != 0
    except ChildProcessError:
        # The program takes the ends of all its children, as by `signal.signal(signal.SIGCHLD, signal.SIG_IGN)`.
        return True


class ForkServerRegistry:
    """The servers of present workers, the newest last: alive until the last holder leaves.

    Without a holder, a server that `current` has begun lives until the next `hold`, or until the program's end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[LoaderForkServer] = []
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._provided: LoaderForkServer | None = None  # the newest server that `hold` has begun

    def hold(self, holder: object, *, begins: bool = True) -> None:
        """Keep servers alive until `leave`; provide a server now if `begins`.

        A new server starts where no holder uses the present server, or `current` has begun the present server, which lacks
        classes that the program has defined since. A forked server knows only the classes defined in a notebook before the
        fork, so a server forked from a program without a main file is replaced, too, if the process may be copied again.
        """
        with self._lock:
            if begins and not self._holders:
                self._stop()
            self._holders.add(holder)
            if not begins:
                return
            latest = self._running[-1] if self._running else None
            if (
                latest is None
                or latest is not self._provided
                or (latest.names is not None and not has_main_file() and is_quiet())
            ):
                self._begin()
                self._provided = self._running[-1]

    def forget(self) -> None:
        """Forget the servers in a forked copy of this process: only the original may end the servers."""
        self._lock, self._running, self._holders = threading.Lock(), [], weakref.WeakSet()
        self._provided = None

    def leave(self, holder: object) -> None:
        """End the servers, unless another holder needs them."""
        with self._lock:
            if holder in self._holders:
                self._holders.discard(holder)
                if not self._holders:
                    self._stop()

    def current(self) -> LoaderForkServer:
        """Return the newest server; begin another if that server has ended, or if there is none."""
        with self._lock:
            if not self._running or not self._running[-1].is_running():
                self._begin()
            return self._running[-1]

    def _begin(self) -> None:
        server = LoaderForkServer()
        if is_quiet():
            server.fork()
        else:
            server.start()
        self._running.append(server)

    def _stop(self) -> None:
        while self._running:
            self._running.pop().stop()


SERVERS = ForkServerRegistry()


class LoaderForkContext(context.ForkServerContext):
    """Multiprocessing context whose processes are forked by a server."""

    def __init__(self, server: LoaderForkServer) -> None:
        super().__init__()
        self.server = server

    def Process(self, *arguments: Any, **options: Any) -> "_LoaderWorkerProcess":  # type: ignore[override]  # noqa: N802
        """Return an unstarted process."""
        worker_process = _LoaderWorkerProcess(*arguments, **options)
        worker_process.server = self.server
        return worker_process


class _LoaderWorkerProcess(process.BaseProcess):
    _start_method = "forkserver"
    server: LoaderForkServer

    def run(self) -> None:
        """Run in the worker."""
        _let_the_server_end()
        super().run()

    @staticmethod
    def _Popen(process_obj: "_LoaderWorkerProcess") -> Any:  # noqa: N802 - named by the base class
        return _LoaderWorkerPopen(process_obj)


class _LoaderWorkerPopen(popen_forkserver.Popen):
    _fds: list[int]

    def _launch(self, process_obj: _LoaderWorkerProcess) -> None:
        """Launch as the base class does, but through the process's own server and without a main script to import."""
        server = vars(process_obj).pop("server")
        file = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(_preparation(process_obj.name), file)
            reduction.dump(process_obj, file)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, data_w = server.connect_to_new_process(self._fds)
        # The worker learns from the end of this pipe that this process has ended.
        parent_w = os.dup(data_w)
        self.finalizer = util.Finalize(self, util.close_fds, (parent_w, self.sentinel))
        with os.fdopen(data_w, "wb") as pipe:
            pipe.write(file.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


def _let_the_server_end() -> None:
    """Release, in a worker, the pipe by whose end the server learns that the program has ended.

    The standard library hands the pipe to each worker. The worker's own end waits for the server's end, so server and
    worker would both outlive a killed program. The file number stays taken, because child processes of the worker
    inherit the number.
    """
    alive = vars(forkserver)["_forkserver"]._forkserver_alive_fd  # noqa: SLF001 - set by the server's fork
    if alive is not None:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, alive)
        os.close(null)


def has_main_file() -> bool:
    """Whether the main script is a file or a module, and so importable in another process."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or hasattr(main, "__file__")


def serve(listener_fd: int, alive_r: int, spec_fd: int) -> None:
    """Run a server in a new interpreter.

    Args:
        listener_fd: file number of the socket for requests of workers.
        alive_r: pipe that ends with the program.
        spec_fd: pipe with the pickled preparation and module names.
    """
    with os.fdopen(spec_fd, "rb") as file:
        preparation, names = pickle.load(file)  # noqa: S301 - from the program that has begun this process
    _name_process()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    current: Any = process.current_process()
    current._inheriting = True  # noqa: SLF001 - as in a process that is being spawned
    try:
        spawn.prepare(preparation)
    except BaseException:  # noqa: BLE001 - the script may exit; a worker that misses a class reports the class itself
        traceback.print_exc()
    _import_all(names)
    del current._inheriting  # noqa: SLF001
    forkserver.main(listener_fd, alive_r, [])


def _import_all(names: Iterable[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            try:
                __import__(name)
            except BaseException:  # noqa: BLE001, S112 - a module that cannot be imported by its name
                continue


def _loaded_here() -> tuple[dict[str, Any], list[str]]:
    """Return the preparation data of a new interpreter, and the modules to import, in the order of their import here."""
    data = {"sys_path": list(sys.path), "sys_argv": list(sys.argv), "dir": str(Path.cwd())}
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    path = getattr(main, "__file__", None)
    if name is not None:
        data["init_main_from_name"] = name
    elif path is not None:
        data["init_main_from_path"] = str(Path(vars(process)["ORIGINAL_DIR"] or ".") / path)
    loaded = [name for name, module in list(sys.modules.items()) if getattr(module, "__spec__", None) is not None]
    return data, [name for name in loaded if name not in _NEVER_IMPORTED]


def _preparation(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "authkey": process.current_process().authkey,
        "log_to_stderr": util._log_to_stderr,  # noqa: SLF001
        "sys_path": list(sys.path),
        "sys_argv": list(sys.argv),
        "dir": str(Path.cwd()),
    }


def is_quiet() -> bool:
    """Whether this process may be copied: every other Python thread waits now, or starts to wait within the patience.

    New threads take a moment to reach a first wait.
    """
    end = time.monotonic() + _PATIENCE_SECONDS
    while not (quiet := all(map(_waits, _other_frames()))) and time.monotonic() < end:
        time.sleep(0.002)
    return quiet


def _other_frames() -> list[FrameType]:
    return [frame for key, frame in sys._current_frames().items() if key != threading.get_ident()]  # noqa: SLF001


def _waits(frame: FrameType) -> bool:
    code = frame.f_code
    return any(code.co_filename.endswith(f"/{file}") and code.co_name in names for file, names in _WAITS.items())


def _serve_forked(listener: socket.socket, alive_r: int, alive_w: int) -> None:
    """Serve in the copy of the program; nothing else of the program goes on in the copy."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The program's own handlers must not run in the copy.
        signal.set_wakeup_fd(-1)
        os.close(alive_w)
        _name_process()
        _let_go_of_files({listener.fileno(), alive_r})
        # A collection in the copy would run finalizers of the user's on objects that belong to the program.
        gc.freeze()
        forkserver.main(listener.detach(), alive_r, [])
    except Exception:  # noqa: BLE001 - the process ends here and prints why
        traceback.print_exc()
    finally:
        # Without exit handlers, which belong to the program.
        os._exit(0)


def _let_go_of_files(kept: set[int]) -> None:
    """Close the program's files, such as pipes whose other end waits for all writers to close.

    The file numbers stay taken by the null device: objects of the program that own the numbers would otherwise close
    files of others later.
    """
    null = os.open(os.devnull, os.O_RDWR)
    kept = kept | {0, 1, 2, null}
    for stream in (sys.stdout, sys.stderr):
        try:
            kept.add(stream.fileno())
        except (AttributeError, OSError, ValueError):
            continue
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number not in kept:
            try:
                os.fstat(number)
            # The descriptor of the listing itself, which is closed by now.
            except OSError:
                continue
            os.dup2(null, number, inheritable=False)


def _name_process() -> None:
    try:
        Path("/proc/self/comm").write_text("hydra-workers", encoding="ascii")
    except OSError:
        return
