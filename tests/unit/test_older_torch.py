"""What older versions of torch do wrong, as seen from outside; and that one place says which versions are supported."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from hydra_tune.older_torch import is_pointwise, mend_lstm_shapes
from hydra_tune.shard.capture.export_output import quiet_export
from hydra_tune_ray.installed import NEXT, OLDEST

ROOT = Path(__file__).parents[2]
_ENTERS_ON_THREADS = """
import threading
from torch._subclasses.fake_tensor import FakeTensorMode
from hydra_tune.older_torch import keep_cuda_guard

def enter():
    with FakeTensorMode():
        pass

for target in [keep_cuda_guard, *[enter] * 20]:
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    junk = [bytearray(size) for size in range(8, 512)]
"""


@pytest.mark.parametrize("name", ["leaky_relu", "leaky_relu_", "hardtanh_", "elu_", "gelu", "add.Tensor"])
def test_operators_on_single_elements_are_known_as_such(name):
    packet, _, overload = name.partition(".")
    assert is_pointwise(getattr(getattr(torch.ops.aten, packet), overload or "default"))


@pytest.mark.parametrize("name", ["softmax.int", "sum.default", "linear.default"])
def test_operators_on_several_elements_are_known_as_such(name):
    packet, _, overload = name.partition(".")
    assert not is_pointwise(getattr(getattr(torch.ops.aten, packet), overload))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}, {"proj_size": 3}], ids=str
)
@pytest.mark.parametrize("batch", [1, 6])
def test_final_states_of_an_lstm_have_their_shape_without_bytes(options, batch):
    mend_lstm_shapes()
    recurrent = nn.LSTM(8, 4, **options)
    inputs = torch.zeros(3, batch, 8)
    expected = [state.shape for state in recurrent(inputs)[1]]
    with quiet_export():
        exported = torch.export.export(recurrent, (inputs,), strict=False)
    outputs = next(node for node in exported.graph.nodes if node.op == "output").args[0]
    assert [node.meta["val"].shape for node in outputs[1:]] == expected


@pytest.mark.cases(1 / 3)
def test_threads_that_end_may_enter_fake_mode():
    program = [sys.executable, "-c", _ENTERS_ON_THREADS]
    ended = subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT, timeout=240)
    assert ended.returncode == 0, ended.stderr


def test_the_readme_names_the_versions_that_are_required():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch_range = next(line for line in project["dependencies"] if line.startswith("torch"))
    oldest, beyond = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", torch_range).groups()
    readme = (ROOT / "README.md").read_text()
    assert f"PyTorch 2.{oldest} to 2.{int(beyond) - 1}" in readme
    oldest_ray, beyond_ray = re.fullmatch(
        r"ray\[tune\]>=2\.(\d+),<2\.(\d+)", project["optional-dependencies"]["ray"][0]
    ).groups()
    assert f"Ray 2.{oldest_ray} to 2.{int(beyond_ray) - 1}" in readme
    assert ((2, int(oldest_ray)), (2, int(beyond_ray))) == (OLDEST, NEXT)
    assert f"TORCH ?= 2.{oldest}.*" in (ROOT / "Makefile").read_text()
