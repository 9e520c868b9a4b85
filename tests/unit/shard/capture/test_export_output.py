"""A capture says nothing, and keeps nobody else from saying something."""

import sys
import threading

import pytest
from torch import nn

from hydra_tune.errors import CaptureError
from hydra_tune.shard.capture.export_output import quiet_export
from hydra_tune.shard.capture.step_capture import capture
from tests.unit.shard.bench import task_of, vectors


class Branching(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y


def test_a_capture_that_fails_prints_no_graph(capfd):
    model = Branching(8, 8)
    with pytest.raises(CaptureError, match="data-dependent"):
        capture(task_of(model), model, vectors(), "train")
    assert capfd.readouterr() == ("", "")


def test_other_threads_are_heard(capfd):
    stream = sys.stderr
    with quiet_export():
        sys.stderr.write("of this thread\n")
        other = threading.Thread(target=lambda: sys.stderr.write("of another\n"))
        other.start()
        other.join()
    assert sys.stderr is stream
    assert capfd.readouterr().err == "of another\n"


def test_other_threads_use_the_stream_as_ever(capfd):
    stream, found = sys.stderr, []
    with quiet_export():
        other = threading.Thread(
            target=lambda: found.extend([sys.stderr.fileno(), sys.stderr.encoding, sys.stderr.buffer])
        )
        other.start()
        other.join()
    assert found == [stream.fileno(), stream.encoding, stream.buffer]
