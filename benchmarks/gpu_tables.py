"""What `gpu.py` has found, as Markdown: the page beside gpu.json, and the tables of the docs.

    python benchmarks/gpu_tables.py runs/gpu/gpu.json    # keeps the file in docs/results, and writes the tables there
    python benchmarks/gpu_tables.py                      # the tables alone, from docs/results/gpu.json

A page names the parts, or groups of parts, that a place is for: `<!-- gpu: spill pool -->`, and ends it with
`<!-- end of gpu -->`. What is between is written here, and says that nothing was run while there is no gpu.json.
"""

import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
NOT_RUN = "*Not run on a GPU yet.*"
_AS_EXPECTED = ("passed", "bitwise")
_PLACE = re.compile(r"(<!-- gpu: ([^>]*) -->\n).*?(<!-- end of gpu -->)", re.DOTALL)


def main(arguments):
    if arguments:
        shutil.copy(arguments[0], RESULTS / "gpu.json")
    found = known()
    for page in sorted(RESULTS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        page.write_text(rewritten(text, found), encoding="utf-8")


def known():
    """What docs/results/gpu.json has; None if there is no such file."""
    path = RESULTS / "gpu.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def rewritten(text, found):
    """A page with the tables that its places name, of what `gpu.py` has found; None: nothing."""
    return _PLACE.sub(lambda place: f"{place[1]}\n{_tables(place[2].split(), found)}\n\n{place[3]}", text)


def markdown(found):
    """The page beside gpu.json: a table of all parts, and of each its rows, and what it leaves where it has not passed."""
    parts = found["parts"]
    heads = ("part", "status", "seconds", "limit", "begun")
    summary = [
        {
            **dict.fromkeys(heads, ""),
            **{name: part.get(name, "") for name in heads},
            "part": name,
            "begun": part["when"],
        }
        for name, part in parts.items()
    ]
    blocks = [f"# On a GPU\n\n{found['machine']}", table(summary)]
    for name, part in parts.items():
        blocks += [f"## {name}: {part['status']}", rows_of(part)]
        for key in ("output", "nvidia_smi", "events"):
            if key in part:
                blocks.append(f"{key}:\n\n````\n{part[key].rstrip()}\n````")
    return "\n\n".join(block for block in blocks if block)


def rows_of(part):
    """A part's rows; of outcomes how often there is each, and the rows that did not come out as they should."""
    rows = part["rows"]
    if not all("outcome" in row for row in rows):
        return table(rows)
    counts = Counter(row["outcome"] for row in rows)
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    others = table([row for row in rows if row["outcome"] not in _AS_EXPECTED])
    return f"{told}\n\n{others}".strip()


def table(rows):
    """Rows that are dicts, as a table; those that lack a column have it empty."""
    heads = list(dict.fromkeys(name for row in rows for name in row))
    if not heads:
        return ""
    lines = [heads, ["---"] * len(heads), *([row.get(head, "") for head in heads] for row in rows)]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value):
    return " ".join(str(value).split()).replace("|", "\\|")


def _tables(names, found):
    """Of all parts of these names or groups."""
    if found is None:
        return NOT_RUN
    parts = {name: part for name, part in found["parts"].items() if {name, name.partition("/")[0]} & set(names)}
    if not parts:
        return NOT_RUN
    dates = sorted({part["when"].partition(" ")[0] for part in parts.values()})
    blocks = [f"{found['machine']}; {', '.join(dates)}. Command: `make gpu`."]
    for name, part in parts.items():
        took = f", {part['seconds']:g} s" if "seconds" in part else ""
        blocks += [f"{name}: {part['status']}{took}", rows_of(part)]
    return "\n\n".join(block for block in blocks if block)


if __name__ == "__main__":
    main(sys.argv[1:])
