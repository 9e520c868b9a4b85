"""Which of the product's waits a test would miss: `python benchmarks/stream_deletions.py`.

Deletes, one at a time and in a scratch copy, every record of an event, every wait for one, for a stream or for a copy, and
whatever keeps memory from being given back while a copy works on it; runs the tests of stream order against each; and prints
which deletion a test has noticed. Ends with 1 if one goes unnoticed that is not named in `KNOWN`, with the reason.

A test that waits for ever has noticed, too: each run ends after `--seconds`.
"""

import argparse
import ast
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEVICES = ("tests/unit/devices/test_cuda_streams.py", "tests/unit/memory/test_stream_order.py")
PLANS = (
    "tests/unit/planner/run/test_copy_engine.py",
    "tests/unit/planner/run/test_thread_copies.py",
    "tests/unit/devices/test_cuda_beside_plans.py",
)
CLOCKS = ("tests/unit/devices/test_gpu_clocks.py",)
STATE = ("tests/unit/train/state/test_host_optimizer.py", "tests/integration/test_streams_of_pools.py")
TESTS = {
    "devices/copying.py": DEVICES,
    "devices/cuda.py": DEVICES,
    "devices/cuda_graphs.py": ("tests/unit/devices/test_cuda_graphs.py",),
    "devices/stopwatch.py": CLOCKS,
    "planner/run/copy_engine.py": PLANS,
    "planner/profile/profiler.py": CLOCKS,
    "memory/pager.py": DEVICES,
    "train/state/host_optimizer.py": STATE,
    "train/state/model_state.py": STATE,
    "train/state/tensor_groups.py": STATE,
    "train/loop/batch_units.py": CLOCKS,
}
OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow")
CONFTEST = {False: ("--noconftest",), True: ()}  # it takes long to import
STATEMENTS = {"record", "wait_event", "wait_stream", "synchronize", "record_stream", "wait", "result", "exception"}
KEEPS = {"self._held[id(source)] = source", "self._held[id(target)] = target"}
KNOWN = {  # by a deletion's name: why nothing changes without it
    "cuda.py: beside": "torch's own barriers keep the order; it has copies that leave one GPU go one after the other",
}


@dataclass(frozen=True)
class Deletion:
    """One place, and what stands there instead."""

    path: str
    line: int
    begin: int
    end: int
    text: str
    instead: str

    @property
    def name(self) -> str:
        """Without the line."""
        return f"{Path(self.path).name}: {' '.join(self.text.split())}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {' '.join(self.text.split())}" + (
            f" -> {self.instead}" if self.instead != "pass" else ""
        )


def deletions() -> Iterator[Deletion]:
    """All there are."""
    for module in TESTS:
        path = f"hydra_tune/{module}"
        source = (ROOT / path).read_bytes()
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))

        def made(node: ast.AST, instead: str, path=path, source=source, starts=starts) -> Deletion:
            begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            return Deletion(path, node.lineno, begin, end, source[begin:end].decode(), instead)

        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _name(node.value) in STATEMENTS:
                yield made(node, "pass")
            elif isinstance(node, ast.Call) and _name(node) == "wait_quietly":
                yield made(node, "True")
            elif isinstance(node, ast.Call) and _name(node) == "_copy" and path.endswith("cuda.py"):
                yield from (made(one.value, "()") for one in node.keywords if one.arg == "beside")
            elif isinstance(node, ast.Call) and _name(node) == "computed" and not node.args:
                yield made(node, "torch.cuda.Event()")
            elif isinstance(node, ast.Assign) and (found := made(node, "")).text in KEEPS:
                _, _, value = found.text.partition(" = ")
                yield made(node.value, f"None and {value}")


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def tests_of(deletion: Deletion) -> tuple[str, ...]:
    """Those that are about its module."""
    return TESTS[deletion.path.removeprefix("hydra_tune/")]


def noticed(scratch: Path, output: Path, tests: Iterable[str], seconds: int) -> bool:
    """Run the tests in a process of their own; whether one has failed, or has not ended."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(written, 1)
        os.dup2(written, 2)
        os.chdir(scratch)
        elsewhere = [one for one in sys.path if one not in ("", str(ROOT))]
        sys.path[:] = [str(scratch), str(scratch / "integrations"), *elsewhere]
        for module in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[module]
        code = 3
        try:
            import pytest  # noqa: PLC0415 - after the folder is another

            code = int(pytest.main([*OPTIONS, *CONFTEST[tests is STATE], *tests]))
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status != 0
        time.sleep(0.1)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with output.open("a") as file:
        file.write(f"\nE   not over after {seconds} seconds\n")
    return True


def reason(output: Path) -> str:
    """The first that a run complains of."""
    lines = output.read_text(errors="replace").splitlines()
    errors = [line for line in lines if re.match(r"E  +\S", line)]
    return " ".join(errors[0].split()[1:])[:100] if errors else (lines[-1][:100] if lines else "")


def main() -> int:
    """Print a line for each, and how many there are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="those whose name this regular expression finds")
    parser.add_argument("--seconds", type=int, default=240, help="for a run of the tests")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    options = parser.parse_args()
    every = list(dict.fromkeys(deletions()))
    sources = "".join((ROOT / "hydra_tune" / module).read_text() for module in TESTS)
    if gone := {text for text in KEEPS if text not in sources}:
        print(f"no longer in the product: {gone}")
        return 2
    found = [one for one in every if re.search(options.only, str(one))]
    if options.list:
        print("\n".join(map(str, found)))
        return 0
    import torch._dynamo  # noqa: F401, PLC0415 - once for all runs, for it takes long to import

    missed = []
    with tempfile.TemporaryDirectory() as folder:
        scratch, output = Path(folder) / "copy", Path(folder) / "output"
        shutil.copytree(ROOT, scratch, ignore=shutil.ignore_patterns(".*", "__pycache__", "build"))
        for tests in {tests_of(one) for one in found}:
            if noticed(scratch, output, tests, options.seconds):
                print(output.read_text(errors="replace"))
                print("the tests fail as they are")
                return 2
        for one in found:
            whole = (ROOT / one.path).read_bytes()
            (scratch / one.path).write_bytes(whole[: one.begin] + one.instead.encode() + whole[one.end :])
            is_noticed = noticed(scratch, output, tests_of(one), options.seconds)
            (scratch / one.path).write_bytes(whole)
            known = next((why for name, why in KNOWN.items() if name == one.name), None)
            said = f"noticed: {reason(output)}" if is_noticed else f"NOT NOTICED{'' if known is None else f': {known}'}"
            print(f"{one}\n    {said}", flush=True)
            missed += [] if is_noticed else [known]
    count = len(found) - len(missed)
    print(f"{len(found)} deletions: {count} noticed, {len(missed)} not ({missed.count(None)} for no known reason)")
    return int(None in missed)


if __name__ == "__main__":
    sys.exit(main())
