"""Prints the figures of a simulation, or of the comparison of a recorded run with its simulation.

`hydra-tune simulate` (`cli/commands/simulate.py`) calls `print_result` at the end, or `print_replay` with `--replay`, unless
`--json` is given. The module must not import the pool, torch or numpy.
"""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hydra_tune.quantities import format_bytes, format_seconds
from hydra_tune.simulate.optimal import BestSchedule
from hydra_tune.simulate.outcome import DeviceOutcome, SimulationResult
from hydra_tune.simulate.recorded.replay import ReplayComparison

_MOST_DEVICES = 32


def print_result(console: Console, result: SimulationResult, best: BestSchedule | None = None) -> None:
    """Print the first 32 devices, the totals and, unless None, the makespan of the best schedule of the same units."""
    console.print()
    console.print(_device_table(result.devices[:_MOST_DEVICES]))
    if len(result.devices) > _MOST_DEVICES:
        console.print(Text(f"... and {len(result.devices) - _MOST_DEVICES} more devices", style="dim"))
    console.print()
    for name, value in (*_totals(result), *_optimum(result, best)):
        console.print(Text(f"{name:<12} {value}"))


def print_replay(console: Console, played: ReplayComparison) -> None:
    """Print a comparison of a recorded run with its simulation."""
    num_commands, num_agreeing = len(played.recorded_orders), played.num_agreeing
    order = (
        f"all {num_commands} commands in the run's order"
        if played.is_same_order
        else f"{num_agreeing} of {num_commands} commands"
    )
    ratio = played.simulated_seconds / played.recorded_seconds if played.recorded_seconds else 1.0
    rows = [
        (
            "policy",
            played.policy
            if played.policy == played.recorded_policy
            else f"{played.policy}; the run's was {played.recorded_policy}",
        ),
        ("run", format_seconds(played.recorded_seconds)),
        ("simulated", f"{format_seconds(played.simulated_seconds)} ({ratio:.3f} of the run)"),
        ("order", order if played.is_same_order else f"{order} until the first that differs"),
        (
            "moved",
            f"{format_bytes(played.bytes_in + played.bytes_out)}, and {format_bytes(played.bytes_across)} between devices",
        ),
    ]
    if played.leaves_out_ahead:
        rows.append(("sent ahead", "nothing, unlike in the run: what another policy would have sent is not known"))
    for name, value in rows:
        console.print(Text(f"{name:<12} {value}"))


def _device_table(devices: tuple[DeviceOutcome, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("device", no_wrap=True)
    for name in ("busy", "waited", "units", "loads", "bytes in", "bytes out"):
        table.add_column(name, justify="right", no_wrap=True)
    for device in devices:
        table.add_row(
            Text(device.name),
            f"{device.utilisation:.1%}",
            format_seconds(device.stall_seconds),
            str(device.units),
            str(device.loads),
            format_bytes(device.bytes_in),
            format_bytes(device.bytes_out),
        )
    return table


def _optimum(result: SimulationResult, best: BestSchedule | None) -> list[tuple[str, str]]:
    if best is None or not best.makespan_seconds:
        return []
    known = (
        "proven" if best.status == "optimal" else f"the best found; none is below {format_seconds(best.bound_seconds)}"
    )
    ratio = result.makespan_seconds / best.makespan_seconds
    return [("optimum", f"{format_seconds(best.makespan_seconds)} ({known}); the makespan is {ratio:.3f} of it")]


def _totals(result: SimulationResult) -> list[tuple[str, str]]:
    bound = ""
    if result.bound_seconds:
        ratio = result.makespan_seconds / result.bound_seconds
        bound = f" ({ratio:.3f} of the bound, {format_seconds(result.bound_seconds)})"
    rows = [
        ("policy", result.policy),
        ("makespan", format_seconds(result.makespan_seconds) + bound),
        ("utilisation", f"{result.utilisation:.1%}"),
        ("units", f"{result.units_run} run, {result.units_saved} saved by pruning"),
        ("moved", f"{format_bytes(result.bytes_moved)}, {result.loads_per_unit:.3f} loads a unit"),
    ]
    if result.network_bytes:
        rows.append(("network", format_bytes(result.network_bytes)))
    return rows
