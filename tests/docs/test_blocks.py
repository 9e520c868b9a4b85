"""Every block of Python and every command of the guides runs as it stands, page by page, in an empty folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, PageCode, pages

GUIDES = [ROOT / "README.md", *pages("start", "howto")]
_MOST_SECONDS = 240


def run(command, folder, page):
    source = (
        "" if page.stem == "install" else f"{ROOT}{os.pathsep}{ROOT / 'integrations'}"
    )  # not before what it installs
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": source,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on the loopback only
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_MOST_SECONDS, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.timeout(2 * _MOST_SECONDS + 60)
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page, tmp_path):
    """First the files, then the program, then the commands; `hydra-tune` is a clone there."""
    code = PageCode.of(page)
    (tmp_path / "hydra-tune").symlink_to(ROOT)
    for name, text in code.files.items():
        (tmp_path / name).write_text(text)
    if code.program:
        (tmp_path / "program.py").write_text(code.program)
        run([sys.executable, "program.py"], tmp_path, page)
    if code.commands:
        run(["bash", "-euo", "pipefail", "-c", code.commands], tmp_path, page)
        shutil.rmtree(tmp_path / "env", ignore_errors=True)  # an environment with torch is large


def test_guides_have_code_of_no_other_language():
    """Code in a language that this file does not run would go untested."""
    for page in pages("start", "howto"):
        for line in page.read_text().splitlines():
            if line.startswith("```") and line != "```":
                language = line.strip("`")
                assert language in ("python", "console", "yaml", "text") or language.startswith("{"), (
                    f"{page.relative_to(DOCS)}: {line}"
                )
