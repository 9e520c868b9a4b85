"""Which threads may be there when the process is copied for workers."""

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hydra_tune.train.data.worker_server import _WAITS, LoaderForkServer

ROOT = Path(__file__).parents[4]


def test_functions_of_ours_that_count_as_waiting_are_there():
    ours = {file: names for file, names in _WAITS.items() if file.startswith("hydra_tune/")}
    assert len(ours) >= 4
    for file, names in ours.items():
        functions = {
            node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert set(names) <= functions


def made_of(process, path):
    server = LoaderForkServer()
    server._forkserver_pid, server._forkserver_address = process.pid, str(path)
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    return server


def test_a_server_whose_end_the_program_has_taken_counts_as_ended(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    assert process.wait() == 0
    made_of(process, tmp_path / "socket").stop()
    server = made_of(process, tmp_path / "socket")
    assert not server.is_running()
    server.stop()


def test_a_killed_server_leaves_neither_its_pipe_nor_its_socket():
    server = LoaderForkServer()
    server.start()
    os.kill(server._forkserver_pid, signal.SIGKILL)
    while server.is_running():
        time.sleep(0.01)
    address, pipe = Path(server._forkserver_address), Path("/proc/self/fd", str(server._forkserver_alive_fd))
    assert address.exists()
    assert pipe.exists()
    server.stop()
    assert not address.exists()
    assert not pipe.exists()


def test_a_server_can_be_stopped_where_the_program_ignores_the_ends_of_children(tmp_path):
    earlier = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        server = made_of(process, tmp_path / "socket")
        assert server.is_running()
        server.stop()
        process.wait()
        process.stdin.close()
    finally:
        signal.signal(signal.SIGCHLD, earlier)
