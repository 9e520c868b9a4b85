"""The table of μ-TWO's comparison: a row of each case, kept in a file as they come, so that a run that was cut off goes on."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

HFTA, CAPUCHIN = "fits, one after another", "full fusion"
ITERATIONS = 10_000

HEADS = (
    "model",
    "trials",
    "demand",
    "limit",
    "at once: kept / planned",
    "as HFTA",
    "full fusion",
    "chosen",
    "over HFTA",
    "over full fusion",
    "chosen / fastest",
    "predicted / measured (by the clock)",
    f"hours of {ITERATIONS:,}: HFTA / full fusion / chosen",
)


@dataclass
class Ran:
    """A member of the portfolio that was run.

    Attributes:
        name: of it.
        sizes: trials in each sub-array of each part.
        predicted_seconds: of a step of all trials.
        seconds: as measured; on a CPU at the pace of the profiles.
        clock_seconds: by the clock.
        planned_bytes: its peak.
        allocated_bytes: the most on a GPU.
    """

    name: str
    sizes: list[list[int]]
    predicted_seconds: float
    seconds: float
    clock_seconds: float
    planned_bytes: int
    allocated_bytes: int | None = None


@dataclass
class Row:
    """A case: trials of a model in less memory than all of them need with everything kept.

    Attributes:
        model: its name.
        trials: of it.
        wanted_demand: what all need, over the limit, as asked for.
        max_size: the most trials in a sub-array, where there is a limit.
        demand: of the limit that was set; less, where no plan meets the one that was asked for.
        limit_bytes: that was set.
        kept: the most trials that are fused with everything kept in it.
        held: the most trials in a pair or sub-array of what was run.
        ran: the members that were measured.
        names: which of these each name of the portfolio does: some do the same.
        chosen: which of these goes on.
        why: what is to be said beside it, or why there is nothing.
        taken_seconds: of planning, profiling and measuring it.
    """

    model: str
    trials: int
    wanted_demand: float
    max_size: int | None
    demand: float | None = None
    limit_bytes: int | None = None
    kept: int = 0
    held: int = 0
    ran: list[Ran] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    chosen: int | None = None
    why: str = ""
    taken_seconds: float = 0.0

    @property
    def key(self):
        """What is asked for."""
        return self.model, self.trials, self.wanted_demand, self.max_size

    def of(self, name):
        """What was run of a name of the portfolio; None where it does not fit."""
        return self.ran[self.names[name]] if name in self.names else None

    @property
    def own(self):
        """What was chosen."""
        return None if self.chosen is None else self.ran[self.chosen]

    @property
    def fastest(self):
        """Of all that were run."""
        return min(self.ran, key=lambda one: one.seconds)

    def cells(self):
        """As of `HEADS`."""
        demand = f"{self.demand or self.wanted_demand:.3g}"
        if self.demand is not None and abs(self.demand - self.wanted_demand) > 0.05 * self.wanted_demand:
            demand += f" (for {self.wanted_demand:g})"
        if self.own is None:
            return [self.model, str(self.trials), demand, *["-"] * (len(HEADS) - 3)]
        hfta, capuchin, own = self.of(HFTA), self.of(CAPUCHIN), self.own
        return [
            self.model,
            str(self.trials),
            demand,
            f"{self.limit_bytes / 2**20:.3g} MiB",
            f"{self.kept} / {self.held}",
            _milliseconds(hfta),
            _milliseconds(capuchin),
            f"{_milliseconds(own)} ({own.name}, {' + '.join('+'.join(map(str, part)) for part in own.sizes)})",
            _over(hfta, own),
            _over(capuchin, own),
            _over(own, self.fastest),
            f"{own.predicted_seconds / own.seconds:.2f} ({own.predicted_seconds / own.clock_seconds:.2f})",
            " / ".join(
                "-" if one is None else f"{one.seconds * ITERATIONS / 3600:.3f}" for one in (hfta, capuchin, own)
            ),
        ]


def _milliseconds(one):
    return "does not fit" if one is None else f"{one.seconds * 1e3:.1f} ms"


def _over(slower, faster):
    return "-" if slower is None else f"{slower.seconds / faster.seconds:.2f}"


class Table:
    """Rows, and the files they are in.

    Args:
        setting: of all of them, which those in the file must have as well.
        as_json: the file that keeps them; what is there already is taken up.
        as_markdown: the file for people.

    Raises:
        SystemExit: the rows in the file were measured otherwise.
    """

    def __init__(self, setting, as_json=None, as_markdown=None):
        self._setting, self._json, self._markdown = setting, as_json, as_markdown
        self.rows = []
        if as_json is not None and as_json.exists():
            found = json.loads(as_json.read_text())
            if found["setting"] != setting:
                raise SystemExit(
                    f"{as_json} has rows of {found['setting']}, and these would be of {setting}; give another file, or "
                    "remove that one"
                )
            self.rows = [Row(**{**one, "ran": [Ran(**ran) for ran in one["ran"]]}) for one in found["rows"]]

    def has(self, row):
        """Whether such a row is there already."""
        return any(one.key == row.key for one in self.rows)

    def add(self, row):
        """Take one up, and write the files."""
        self.rows.append(row)
        if self._json is not None:
            rows = [asdict(one) for one in self.rows]
            _written(self._json, json.dumps({"setting": self._setting, "rows": rows}, indent=1) + "\n")
        if self._markdown is not None:
            _written(self._markdown, self.markdown())

    def markdown(self):
        """All rows."""
        setting = ", ".join(f"{name} {value}" for name, value in self._setting.items())
        lines = [
            f"Steps of all trials, on a CPU at the pace of the profiles; {setting}.",
            "",
            _line(HEADS),
            "|" + "---|" * len(HEADS),
        ]
        lines += [_line(row.cells()) for row in self.rows]
        said = [f"* {row.model}, {row.trials} trials, {row.wanted_demand:g}: {row.why}" for row in self.rows if row.why]
        taken = sum(row.taken_seconds for row in self.rows)
        return (
            "\n".join([*lines, "", *said, *([""] if said else []), f"All rows took {taken / 60:.1f} minutes."]) + "\n"
        )


def _line(cells):
    return f"| {' | '.join(cells)} |"


def _written(path, text):
    """At once, so that whoever is cut off leaves a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(f"{path}.new")
    beside.write_text(text)
    beside.replace(path)
