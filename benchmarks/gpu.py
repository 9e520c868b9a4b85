"""All that needs a GPU, in one command and in parts: the tests, parity, spilling, fusion, the planner, a pool of BERTs.

    python benchmarks/gpu.py --out runs/gpu               # or `make gpu`; the same call again goes on with what is left
    python benchmarks/gpu.py --out runs/gpu --only spill --again
    python benchmarks/gpu.py --out /tmp/rehearsal --rehearse   # on CPU devices, with tiny sizes

For a machine with one GPU, torch, pytest and transformers, and no installation. Each part is a process of its own with a limit
of its own. Parts that measure nothing run side by side, the others alone. No part is begun that may not be over within
`--minutes`, so that a call ends by itself, and by their limits three calls are enough for all parts. What is known is in
FOLDER/gpu.json and, for people, FOLDER/gpu.md, written after each row of each part; a call that was killed has lost the parts
under way. A part that fails or reaches its limit leaves the end of its output (at the limit with the stack of each thread),
what nvidia-smi says, and the last events of its last pool, and the next part begins. Ends with 0 if all parts chosen have
passed, with 1 if one has not, with 3 if some are left for another call. `gpu_tables.py` writes the tables of the docs from
gpu.json.
"""

import argparse
import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path

from gpu_tables import markdown

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
MINUTES, AT_THE_END_SECONDS = 9.0, 15.0  # of a call; what is left of them for a process's end and for nvidia-smi
LOOK_SECONDS, DYING_SECONDS = 0.25, 5.0
MOST_TOGETHER = max(1, len(os.sched_getaffinity(0)) - 1)  # of parts that measure nothing
MOST_OUTPUT, MOST_EVENTS = 20_000, 4_000  # characters
REHEARSAL_SECONDS = 600.0  # of any part, for machines that do much else
PASSED, FAILED, LATE, RUNNING = "passed", "failed", "at its limit", "running"
QUICK_TESTS = (  # in one process
    ("cuda_code", "shared_base"),
    ("cuda_graphs", "groups", "loops", "own_code", "own_functions"),
    ("lightning", "trainer"),
)
_TEST = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        name: its group, or its group and more after a slash.
        command: after the interpreter; `{folder}` is a folder of its own.
        seconds: its limit.
        passes: exit codes with which it has passed.
        is_timed: whether it measures, and so runs alone.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    passes: tuple[int, ...] = (0,)
    is_timed: bool = True


def gpu_parts():
    """In the order in which they run."""
    files = sorted(path.stem.removeprefix("test_") for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    quick = {name for names in QUICK_TESTS for name in names}
    for names in (*QUICK_TESTS, *((name,) for name in files if name not in quick)):
        paths = [f"tests/gpu/test_{name}.py" for name in names]
        yield Part(f"tests/{'+'.join(names)}", _pytest(*paths), 200, is_timed=False)
    for cut in ("own code", "one shard", "two shards", "three shards", "a shard per layer"):
        yield _script(f"parity/{cut}", 200, "gpu_parity.py", cut, "--events", "{folder}/events.jsonl", is_timed=False)
    sizes = ("--depth", "12", "--caps", "12", "6", "--host", "60", "--limit", "85", "--shards", "tuned")
    yield _script("spill", 200, "gpu_spill.py", *sizes, "--events", "{folder}/events.jsonl")
    yield _script("fusion", 145, "gpu_fusion.py", "--counts", "16", "1", "64", "--minutes", "2.2")
    for model in ("vit", "bert"):
        kept = ("--json", "{folder}/rows.json")
        yield _script(f"planner/{model}", 115, "mutwo.py", model, "--device", "cuda", "--minutes", "1.2", *kept)
    yield _script("workloads", 145, "hydra_workloads.py", "--device", "cuda", "--steps", "30")
    yield _script("pool", 125, "gpu_pool.py", "--steps", "20", "--flying", "16", "--events", "{folder}/events.jsonl")


def rehearsed_parts():
    """The same scripts on CPU devices; tests for GPUs are skipped there."""
    at = ("--devices", "cpu:1", "--events", "{folder}/events.jsonl")
    small = ("--width", "16", "--heads", "2", "--depth", "2", "--length", "8", "--caps", "0.1", "--host", "1")
    plans = ("--count", "2", "--demand", "1.5", "--warm-up", "1", "--steps", "1", "--seconds", "0.1")
    yield Part("tests", _pytest("tests/gpu"), REHEARSAL_SECONDS, passes=(0, 5))
    yield _script("parity/own code", REHEARSAL_SECONDS, "gpu_parity.py", "own code", *at, "--models", "mlp", "cnn")
    yield _script("spill", REHEARSAL_SECONDS, "gpu_spill.py", *at, *small)
    yield _script("fusion", REHEARSAL_SECONDS, "gpu_fusion.py", "tiny", "--device", "cpu", "--quick", "--counts", "2")
    yield _script("planner", REHEARSAL_SECONDS, "mutwo.py", "dlrm", "--scale", "tiny", *plans)
    pool = ("--tiny", "--trials", "3", "--steps", "2", "--memory", "5MiB", "--host", "1GiB", "--flying", "3")
    yield _script("pool", REHEARSAL_SECONDS, "gpu_pool.py", *at, *pool)


def _pytest(*paths):
    apart = (
        "-p",
        "no:cacheprovider",
        "-p",
        "no:timeout",
        "--basetemp",
        "{folder}/tmp",
        "-o",
        "faulthandler_timeout=60",
    )
    return ("-m", "pytest", "-v", "--tb=short", "-m", "not slow", *apart, *paths)


def _script(name, seconds, script, *arguments, is_timed=True):
    return Part(name, (str(BENCHMARKS / script), *arguments), seconds, is_timed=is_timed)


class Results:
    """What is known of the parts, in the two files.

    Args:
        out: their folder.
        machine: what they ran on.

    Raises:
        SystemExit: the folder has those of another machine.
    """

    def __init__(self, out, machine):
        self._json, self._markdown = out / "gpu.json", out / "gpu.md"
        self._found = {"machine": machine, "parts": {}}
        if self._json.exists():
            self._found = json.loads(self._json.read_text(encoding="utf-8"))
        if self._found["machine"] != machine:
            raise SystemExit(
                f"{self._json} is of {self._found['machine']}, and this is {machine}; give another folder as --out"
            )

    def has_ended(self, name):
        """Whether a part has run to some end; one that was running when its call was killed has not."""
        return self._found["parts"].get(name, {}).get("status", RUNNING) != RUNNING

    def has_passed(self, name):
        """Whether it has passed."""
        return self._found["parts"].get(name, {}).get("status") == PASSED

    def write(self, name, **known):
        """What is known of a part from now on; nothing is written where that is known already."""
        if self._found["parts"].get(name) == known:
            return
        self._found["parts"][name] = known
        for path, text in ((self._json, json.dumps(self._found, indent=1)), (self._markdown, markdown(self._found))):
            beside = path.with_suffix(".new")
            beside.write_text(text + "\n", encoding="utf-8")
            beside.replace(path)


def first_of(parts):
    """The parts that run first: one that measures, or as many others as there are cores for."""
    untimed = list(takewhile(lambda part: not part.is_timed, parts))
    return untimed[:MOST_TOGETHER] or parts[:1]


def cores_of(number, count):
    """The cores of one of so many parts: two at least, so that a thread that waits for the GPU keeps no other from a core."""
    every = sorted(os.sched_getaffinity(0))
    width = min(len(every), max(2, -(-len(every) // count)))
    first = number * len(every) // count
    return {every[index % len(every)] for index in range(first, first + width)}


class RunningPart:
    """A part under way, in a process of its own, on its own cores of the host."""

    def __init__(self, part, out, results, cores):
        self._part, self._results = part, results
        self._folder = out / part.name.replace("/", "-").replace(" ", "-")
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.rglob("*.jsonl"):
            old.unlink()
        self._log, self._begun = self._folder / "output.txt", time.monotonic()
        command = [sys.executable, *(text.replace("{folder}", str(self._folder)) for text in part.command)]
        self._when = datetime.now(tz=UTC).strftime("%Y-%m-%d %H:%M")
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(_apart, cores),  # noqa: PLW1509 - this process has one thread
            )

    def look(self):
        """Write what comes of it as it comes; returns its status."""
        is_late = time.monotonic() - self._begun > self._part.seconds
        known = {"when": self._when, "limit": self._part.seconds, "rows": rows_of(self._log)}
        if self._process.poll() is None and not is_late:
            self._results.write(self._part.name, status=RUNNING, **known)
            return RUNNING
        self.end()
        status = LATE if is_late else PASSED if self._process.returncode in self._part.passes else FAILED
        known |= {"seconds": round(time.monotonic() - self._begun, 1), "rows": rows_of(self._log)}
        if status != PASSED:
            known |= {"exit": self._process.returncode, "output": tail(self._log, MOST_OUTPUT)}
            known |= {"nvidia_smi": nvidia_smi(), "events": last_events(self._folder)}
        self._results.write(self._part.name, status=status, **known)
        return status

    def end(self):
        """End the process and all that it has started."""
        end(self._process)


def run(parts, out, results):
    """Run parts side by side, each to its end or to its limit."""
    running = {
        part.name: RunningPart(part, out, results, cores_of(number, len(parts))) for number, part in enumerate(parts)
    }
    try:
        while running:
            for name in list(running):
                status = running[name].look()
                if status != RUNNING:
                    del running[name]
                    print(f"{name}: {status}", flush=True)
            time.sleep(LOOK_SECONDS if running else 0)
    finally:
        for part in running.values():
            part.end()


def environment():
    """Of all parts: from the checkout, with one intra-op thread, and a stack of each thread where one is aborted."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    return os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _apart(cores):
    """Keep to some cores, and end with the parent: a part whose call is killed would disturb what the next call measures."""
    os.sched_setaffinity(0, cores)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an abort is for the stacks
    with suppress(OSError, AttributeError):  # elsewhere than on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end(process):
    """End a process and all that it has started, if it has not ended: first so that it says where it is."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(DYING_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def rows_of(log):
    """What the output says for programs: lines `row: {...}`, and those of pytest; of one `id` the last counts."""
    rows = {}
    with log.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines):
            test = _TEST.match(line)
            if test:
                rows[test[1]] = {"test": test[1].partition("::")[2], "outcome": test[2].lower()}
            elif line.startswith("row: {") and line.endswith("\n"):
                row = json.loads(line.removeprefix("row: "))
                rows[row.pop("id", number)] = row
    return list(rows.values())


def tail(path, most):
    """The end of a file."""
    return path.read_text(encoding="utf-8", errors="replace")[-most:]


def last_events(folder):
    """The end of the newest event log of a pool in a folder, in whole lines."""
    logs = sorted(folder.rglob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    if not logs:
        return "no pool has written any"
    kept = deque(maxlen=200)
    with logs[-1].open(encoding="utf-8", errors="replace") as lines:
        kept.extend(lines)
    while sum(map(len, kept)) > MOST_EVENTS and len(kept) > 1:
        kept.popleft()
    return "".join(kept)


def nvidia_smi(*arguments):
    """What it says, or why nothing."""
    try:
        command = ["nvidia-smi", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return done.stdout.strip() or done.stderr.strip()


def machine_of(*, is_rehearsal):
    """The GPU, its driver, Python and torch; CUDA is not asked, for this process is to take none of the GPU's memory."""
    if is_rehearsal:
        gpu = "no GPU: a rehearsal, whose figures say nothing"
    else:
        gpu = nvidia_smi("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    return f"{gpu}; Python {sys.version.split()[0]}, torch {version('torch')}"


def chosen(parts, only, skip):
    """Parts by their names, or by their groups' names."""
    names = {name for part in parts for name in (part.name, part.name.partition("/")[0])}
    for name in (*only, *skip):
        if name not in names:
            raise SystemExit(f"there is no part {name!r}; there are {', '.join(part.name for part in parts)}")

    def is_among(part, asked):
        return part.name in asked or part.name.partition("/")[0] in asked

    return [part for part in parts if (not only or is_among(part, only)) and not is_among(part, skip)]


def asked(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu.json and gpu.md")
    parser.add_argument("--only", nargs="+", default=[], help="parts, or groups of parts: tests, parity, spill, ...")
    parser.add_argument("--skip", nargs="+", default=[], help="likewise")
    parser.add_argument("--again", action="store_true", help="also those that have ended before")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of this call")
    parser.add_argument("--rehearse", action="store_true", help="on CPU devices, with tiny sizes")
    return parser.parse_args(arguments)


def main(arguments=None):
    options, begun = asked(arguments), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part under way ends with this
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    parts = chosen(list(rehearsed_parts() if options.rehearse else gpu_parts()), options.only, options.skip)
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out.resolve(), machine_of(is_rehearsal=options.rehearse))
    due = [part for part in parts if options.again or not results.has_ended(part.name)]
    while due:
        left = 60 * options.minutes - AT_THE_END_SECONDS - (time.monotonic() - begun)
        if due[0].seconds > left:
            break
        together = first_of(due)
        del due[: len(together)]
        for part in together:
            print(f"{part.name}: begun, {part.seconds:g} s at the most", flush=True)
        run(together, options.out.resolve(), results)
    if due:
        print(f"left for another call: {', '.join(part.name for part in due)}", flush=True)
        return 3
    return 0 if all(results.has_passed(part.name) for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
