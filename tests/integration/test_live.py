"""The live view of real pools: what it says is what `pool.stats()` and the results say."""

import os
import pty
import re
import signal
import threading
import time

import pytest
import torch
from torch import nn

from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.errors import ConfigError
from hydra_tune.observe.live.screen import sweep_lines
from hydra_tune.pool.views.live_snapshot import SweepMonitor
from tests.support.cli_project import Project
from tests.support.forked import Forked, run_code

X = torch.linspace(-1, 1, 64).reshape(16, 4)


def fail():
    raise RuntimeError("no [bold]such[/] model")


def task(
    model=lambda: nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), **more
):
    return TrainTask(
        model=model,
        optimizer=torch.optim.Adam,
        loss=nn.functional.mse_loss,
        train=lambda: [(X, X.sum(1, keepdim=True))] * 6,
        epochs=5,
        **more,
    )  # fmt: skip


def texts(view, width, height=30):
    return ["".join(segment.text for segment in line) for line in sweep_lines(view, (), width, height)]


@pytest.fixture
def watched():
    """A pool that is watched, and the trials of which was said that they ended."""
    said = []
    watch = SweepMonitor(
        "試 [red]sweep[/]", "minimize", lambda trial, metric: said.append((trial.name, trial.state, metric))
    )
    with HydraExecutor(devices="cpu:2", device_memory="1MiB", max_concurrent=4, num_shards=3) as pool:
        yield pool, watch, said


def test_a_pool_is_shown_as_it_is(watched):
    pool, watch, said = watched
    stream = pool.events()
    whole, pruned = pool.submit(task(), "whole"), pool.submit(task(), "prune me", stream)
    failing = pool.submit(task(fail), "[red]名前[/]")
    watch.add([whole, pruned, failing])
    stream.get(timeout=60)  # its first report
    waiting = watch.snapshot(pool.stats())
    (trial,) = (trial for trial in waiting.trials if trial.name == "prune me")
    assert (trial.state, trial.epoch, trial.epochs, len(trial.values)) == ("waiting", 1, 5, 1)
    assert trial.value == trial.values[0]
    for width in (80, 160):
        lines = texts(waiting, width)
        line = next(line for line in lines if "prune me waiting" in line)
        assert f"1/5 {trial.value:>10.5g} ▄ " in line
        assert max(map(len, lines)) <= width
    pruned.prune()
    results = [job.result(60) for job in (whole, pruned, failing)]
    stats = pool.stats()
    view = watch.snapshot(stats, is_over=True)
    assert [t.state for t in view.trials] == ["completed", "pruned", "failed"] == [r.status for r in results]
    assert view.trials[0].values == tuple(report["train_loss"] for report in results[0].history)
    assert view.trials[0].compute_seconds == results[0].compute_seconds > 0
    assert [(device.name, device.units) for device in view.devices] == [(n, d.units) for n, d in stats.devices.items()]
    assert view.units_run == stats.units_run
    assert sum(result.units_run for result in results) == stats.units_run
    busy = sum(device.busy_seconds for device in stats.devices.values())
    assert 0 < sum(result.compute_seconds for result in results) <= busy
    assert 0 < view.bound_seconds <= view.elapsed_seconds == view.makespan_seconds
    assert sorted(said) == [(t.name, t.state, "train_loss") for t in sorted(view.trials, key=lambda t: t.name)]
    assert "3 ended  1 done  1 pruned  1 failed  0 in flight" in texts(view, 80)[1]


def test_more_trials_than_lines_are_summarised(watched):
    pool, watch, _ = watched
    stream = pool.events()  # of which nobody is told: no trial goes on behind its first report
    jobs = [pool.submit(task(), events=stream) for _ in range(40)]
    watch.add(jobs)
    watch.add(jobs[:3])  # which it has already
    view = watch.snapshot(pool.stats())
    for job in jobs:
        job.cancel()
    assert len(view.trials) == 40
    lines = texts(view, 80, 24)
    assert len(lines) <= 24
    shown = sum(line.startswith("job ") or line.lstrip().startswith("job ") for line in lines)
    more = next(line for line in lines if line.startswith("... and"))
    num_more = int(re.match(r"\.\.\. and (\d+) more: .*queued", more)[1])
    assert shown + num_more == sum(not trial.is_over for trial in view.trials)


def test_without_a_terminal_there_is_a_line_for_each_job_and_the_summary(capsys):
    with HydraExecutor(devices="cpu:1", device_memory="1MiB") as pool, pool.live(name="mine"):
        pool.run([task(), task(fail)], on_error="return")
    out = capsys.readouterr().out
    assert out.count("job 0  completed  train_loss ") == 1
    assert "job 1  failed  epoch 0/5  RuntimeError: no [bold]such[/] model" in out
    assert re.search(r"sweep mine: done after [\d.]+ ?m?s$", out, re.MULTILINE)
    assert "\x1b" not in out


def test_an_error_in_the_block_ends_the_view(capsys):
    with HydraExecutor(devices="cpu:1", device_memory="1MiB") as pool:
        with pytest.raises(KeyError), pool.live():
            raise KeyError
        assert not [thread for thread in threading.enumerate() if thread.name == "hydra-view"]
        with pytest.raises(ConfigError, match="goal must be 'minimize' or 'maximize', not 'up'"), pool.live(goal="up"):
            pass


SCRIPT = """
import logging, os, sys, threading, time
terminal = os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)
for number in (1, 2):
    os.dup2(terminal, number)
os.close(terminal)
import model
from hydra_tune import HydraExecutor

logging.basicConfig()
try:
    with HydraExecutor(devices="cpu:1", device_memory="1MiB") as pool, pool.live():
        job = pool.submit(model.build(0.01, epochs=100000))
        while job.state != "running" or not job.progress.step:
            time.sleep(0.05)
        logging.warning("at work")
        time.sleep(600)
except KeyboardInterrupt:
    pass
print("threads:", [t.name for t in threading.enumerate() if t.name.startswith("hydra-")])
"""


@pytest.fixture
def on_terminal(tmp_path):
    """Run a script on a terminal of its own and interrupt it when it has sent some text; returns all that was sent."""
    Project(tmp_path)
    main, terminal = pty.openpty()

    def run(until):
        environment = Project.environment(TERM="xterm-256color", COLUMNS="80", LINES="24")
        with Forked(run_code, SCRIPT, os.ttyname(terminal), cwd=tmp_path, environment=environment) as process:
            sent, deadline = os.read(main, 1 << 16).decode(errors="replace"), time.monotonic() + 120
            os.close(terminal)  # the process has it
            while time.monotonic() < deadline:
                try:
                    data = os.read(main, 1 << 16)
                except OSError:  # the other end is closed
                    break
                sent += data.decode(errors="replace")
                if until and until in sent:
                    process.send_signal(signal.SIGINT)
                    until = ""
            process.communicate(60)
            assert process.returncode == 0
        return sent

    yield run
    os.close(main)


def test_an_interrupt_leaves_the_terminal_as_it_was(on_terminal):
    sent = on_terminal("WARNING:root:at work")
    assert sent.count("\x1b[?1049h") == sent.count("\x1b[?1049l") == 1
    assert sent.rfind("\x1b[?25h") > sent.rfind("\x1b[?25l") >= 0
    after = sent[sent.index("\x1b[?1049l") :]
    assert "WARNING:root:at work" in after  # it was logged to the terminal, which the view had
    assert "threads: []" in after
