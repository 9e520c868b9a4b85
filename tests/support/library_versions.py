"""The integrations' tests with the oldest and the newest supported versions of their libraries: `make compat-integrations`.

Each version gets an environment of its own below `build/compat`, which adds the version to the packages of the Python that
runs this module, and so to its torch. The last line of each run, and a table, tell how many tests passed.
"""

import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = {
    "transformers": ["test_transformers_trainer.py"],
    "trl": ["test_trl_trainer.py"],
    "sentence-transformers": ["test_sentence_trainer.py"],
    "lightning": ["test_lightning.py", "test_lightning_monitors.py"],
}
ENDS = ["transformers==4.50.*", "transformers<6", "lightning==2.3.*", "lightning<3"]
"""The ranges of `pyproject.toml`, oldest and newest."""


def beside(requirement: str) -> list[str]:
    """Name what a version needs in place of the newest packages."""
    if requirement.startswith("transformers==4."):
        return ["datasets<4.5"]  # the last that take the huggingface_hub of transformers 4
    return ["setuptools<81"] if requirement.startswith("lightning==2.3.") else []  # the last that have pkg_resources


def tested(requirements: list[str], arguments: list[str]) -> list[str]:
    """Install requirements, run the tests of the first one, and return version, passed, skipped and failed."""
    library = requirements[0].partition("=")[0].partition("<")[0]
    name = "".join(each if each.isalnum() or each in ".-" else "_" for each in "-".join(requirements))
    folder = ROOT / "build" / "compat" / name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        own = next(folder.glob("lib/python3*/site-packages"))
        (own / "beside.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    subprocess.run([*install, *requirements, *beside(requirements[0])], check=True)
    tests = [f"tests/integration/{test}" for test in TESTS[library]]
    results = folder / "results.xml"
    results.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", f"--junitxml={results}", *tests, *arguments]
    subprocess.run(command, cwd=ROOT, check=False)
    asked = f"import importlib.metadata as m; print(m.version({library!r}))"
    version = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip()
    if not results.exists():  # a test ended the process
        return [f"{library} {version}", "-", "-", "did not end"]
    suite = ET.parse(results).getroot().find("testsuite")
    counts = {each: int(suite.get(each)) for each in ("tests", "skipped", "failures", "errors")}
    failed = counts["failures"] + counts["errors"]
    return [
        f"{library} {version}",
        *map(str, (counts["tests"] - counts["skipped"] - failed, counts["skipped"], failed)),
    ]


def main() -> None:
    """Test the ends, or the versions that the command line names: "transformers==4.57.* trl==1.16.*" is one environment."""
    given = sys.argv[1:]
    arguments = given[given.index("--") + 1 :] if "--" in given else []
    versions = given[: given.index("--")] if "--" in given else given
    rows = [["version", "passed", "skipped", "failed"], ["---"] * 4]
    for each in versions or ENDS:
        rows.append(tested(each.split(), arguments))
        sys.stdout.write(f"{' '.join(rows[-1])}\n")
    sys.stdout.write("".join(f"| {' | '.join(row)} |\n" for row in rows))
    sys.exit(any(row[3] != "0" for row in rows[2:]))


if __name__ == "__main__":
    main()
