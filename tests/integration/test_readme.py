"""The README's first program runs as it stands, in a process of its own; and the license comes with what is built."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_MOST_LINES = 25


def quickstart():
    section = (ROOT / "README.md").read_text().partition("## Quickstart\n")[2].partition("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return program


@pytest.mark.timeout(180)
def test_the_quickstart_runs_as_it_is(tmp_path):
    program = quickstart()
    assert len(program.splitlines()) <= _MOST_LINES
    (tmp_path / "quickstart.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'integrations'}"}
    done = subprocess.run(
        [sys.executable, "quickstart.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "may prune few or none" not in done.stderr  # a first run says nothing that has to be mended
    best = re.fullmatch(r"\{'width': (\d+), 'lr': ([\d.e-]+)\} ([\d.]+)", done.stdout.strip().splitlines()[-1])
    assert best, done.stdout
    assert 4 <= int(best[1]) <= 64
    assert 0.0 < float(best[3]) < 0.7


@pytest.mark.timeout(180)
def test_what_is_built_has_the_license(tmp_path):
    build = "import hatchling.build as b, sys; print(b.build_wheel(sys.argv[1])); print(b.build_sdist(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=150, check=True
    )
    wheel, sdist = done.stdout.split()[-2:]
    license_text = (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in license_text
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(name) == license_text
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()
    with tarfile.open(tmp_path / sdist) as archive:
        (name,) = [name for name in archive.getnames() if name.endswith("/LICENSE")]
        assert archive.extractfile(name).read() == license_text
