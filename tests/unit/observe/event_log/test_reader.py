"""Reading a log: what a crash leaves is read, what is none is refused with what helps."""

import json
import re

import pytest

from hydra_tune.errors import ConfigError
from hydra_tune.observe.event_log.reader import read_log
from tests.unit.observe.event_log.test_run_figures import HEADER, over, unit

WHOLE = [json.dumps(line) + "\n" for line in (HEADER, unit(0, 1, 2), unit(2, 3, 4))]


def write(tmp_path, text):
    path = tmp_path / "run.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("cut", [1, 20, len(WHOLE[2]) - 1])
def test_a_line_that_was_cut_is_left_out(tmp_path, cut):
    found = read_log(write(tmp_path, "".join(WHOLE[:2]) + WHOLE[2][:cut]))
    assert (len(found.units), found.is_cut, found.end_ns) == (1, True, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: its run was ended before anything was written; hydra-tune sweep writes one to runs/"),
        ("hello\n", "is not an event log: its first line is no header; hydra-tune sweep writes one"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "is not an event log"),
        ("[1]\n", "is not an event log"),
        ('{"traceEvents": []}\n', "is not an event log"),
        (
            json.dumps({**HEADER, "hydra_tune_event_log": 9}) + "\n",
            "of format 9, and this version reads 1; read it with",
        ),
        (json.dumps({"hydra_tune_event_log": 1}) + "\n", "is damaged in line 1"),
        ("".join(WHOLE) + "{broken\n" + WHOLE[1], "is damaged in line 4 .*; the lines before can be read: head -n 3 "),
        (WHOLE[0] + '{"event":"unit"}\n', "is damaged in line 2 .KeyError: 'start_ns'"),
        (WHOLE[0] + '{"event":"party"}\n', "there is no event 'party'"),
        (WHOLE[0] + "[]\n", "is damaged in line 2"),
        (WHOLE[0], "no unit has run, so there is nothing to show; if the run still goes on, try again later"),
        (
            WHOLE[0] + json.dumps({**over("0:a", "failed"), "error": "TypeError: no lr"}) + "\n",
            "no unit has run.*; its first trial that failed said: TypeError: no lr",
        ),
    ],
)
def test_what_is_no_log_is_refused_with_what_helps(tmp_path, text, message):
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        read_log(write(tmp_path, text))


def test_a_file_that_is_not_there_is_refused_with_what_helps(tmp_path):
    with pytest.raises(ConfigError, match=r"none.jsonl': it is not there; hydra-tune sweep writes one to runs/"):
        read_log(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="directory"):
        read_log(tmp_path)
