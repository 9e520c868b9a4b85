"""What a sweep came to can be read at 80 columns, and by machines."""

import io
import json
import math
from dataclasses import replace

import numpy as np
from rich.console import Console

from hydra_tune.observe.live.snapshot import TrialView
from hydra_tune.observe.live.summary import print_summary, to_json, trial_line


def printed(view, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_summary(console, view)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_completed_trials_rank_before_pruned_ones_and_the_goal_counts(view):
    assert [trial.number for trial in view.ranked] == [1, 0, 2]
    assert [trial.number for trial in replace(view, goal="minimize").ranked] == [0, 1, 2]
    assert view.best.number == 1


def test_nan_ranks_nowhere_and_infinity_last(view):
    odd = (
        TrialView(number=8, state="completed", value=math.nan),
        TrialView(number=9, state="completed", value=-math.inf),
    )
    assert [trial.number for trial in replace(view, trials=view.trials + odd).ranked] == [1, 0, 9, 2]


def test_a_pruned_trial_is_not_the_best(view):
    assert replace(view, trials=view.trials[2:]).best is None


def test_a_trial_that_violates_constraints_is_not_the_best(view):
    first, second, *others = view.trials
    trials = (first, replace(second, is_feasible=False), *others)
    assert [trial.number for trial in replace(view, trials=trials).ranked] == [0, 1, 2]
    assert replace(view, trials=trials).best.number == 0
    assert replace(view, trials=trials[1:]).best is None
    lines = printed(replace(view, trials=trials[1:], status="completed"))
    assert any(line.startswith("no completed trial fulfils the constraints") for line in lines)


def test_the_table_and_the_totals(view):
    lines = printed(replace(view, status="completed"))
    table = lines.index("rank  trial  val_acc  epochs  shards  state      parameters")
    assert lines[table + 1] == "   1      1     0.97     8/8       4  completed  lr=0.001235 width=128 act=relu"
    assert lines[table + 3] == "   3      2     0.98     2/8          pruned     lr=0.001235 width=128 act=relu"
    best = lines.index("best: trial 1, val_acc 0.97")
    assert lines[best + 1 : best + 4] == ["  lr: 0.00123456", "  width: 128", "  act: relu"]
    assert "1 trial failed: RuntimeError: boom (train.py:6)" in lines
    device = next(line for line in lines if line.startswith("cpu:0"))
    figures = "93% 5.0 MiB / 5.0 MiB 1.0 GiB 1.0 MiB 2.0 MiB 500"
    assert device.split() == ["cpu:0", *figures.split()]
    assert "sweep vit: done after 1m32s" in lines
    assert "units run: 900" in lines
    assert "units saved by pruning: 100 (10% of what was planned)" in lines


def test_brackets_in_names_are_no_markup(view):
    trials = tuple(replace(trial, name=f"net[wide] {trial.number}") for trial in view.trials)
    lines = printed(replace(view, status="completed", metric="f1[micro]", trials=trials))
    table = next(index for index, line in enumerate(lines) if line.startswith("rank"))
    assert "f1[micro]" in lines[table]
    assert "net[wide] 1" in lines[table + 1]


def test_trials_that_were_computed_together_are_counted(view):
    assert not any("together" in line for line in printed(view))
    first, second, *rest = view.trials
    fused = (replace(first, group_size=4), replace(second, group_size=2), *rest)
    assert "computed together: 2 trials, up to 4 at a time" in printed(replace(view, trials=fused))
    assert to_json(replace(view, trials=fused))["trials"][0]["group_size"] == 4


def test_memory_that_a_plain_loop_would_take_is_named_where_a_device_has_less(view):
    first, second, *rest = view.trials
    trials = (replace(first, one_shard_bytes=6 << 20), replace(second, one_shard_bytes=20 << 20), *rest)
    line = "memory: a plain loop would take at least 20.0 MiB for trial 1 (counted, not run); a device had 5.0 MiB"
    assert line in printed(replace(view, trials=trials))
    fitting = (replace(first, one_shard_bytes=5 << 20), second, *rest)
    for trials in (fitting, view.trials, ()):
        assert not any(line.startswith("memory") for line in printed(replace(view, trials=trials)))


def test_the_event_log_is_named_in_one_piece(view):
    path = f"runs/{'x' * 100}.jsonl"
    assert f"event log: {path}" in printed(replace(view, event_log=path))
    assert not any(line.startswith("event log") for line in printed(view))


def test_the_weights_that_are_kept_are_named_in_one_piece_the_first_three(view):
    paths = {number: f"/weights/{'x' * 100}/trial-{number}.safetensors" for number in (4, 1, 7, 2, 3)}
    lines = printed(replace(view, weights=paths))
    assert [line for line in lines if line.startswith("weights of trial")] == [
        f"weights of trial {number}: {paths[number]}" for number in (4, 1, 7)
    ]
    assert "... and of 2 more beside them" in lines
    assert to_json(replace(view, weights=paths))["weights"] == {str(number): path for number, path in paths.items()}


def test_many_parameters_fit_80_columns(view):
    params = {f"parameter_{n}": 0.123456 * n for n in range(12)}
    trial = replace(view.trials[0], params=params)
    lines = printed(replace(view, trials=(trial,) * 30))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert all(name in text for name in params)
    assert "... and 20 more" in lines


def test_equal_errors_are_counted_and_many_different_ones_cut(view):
    same = tuple(TrialView(number=n, state="failed", error="ValueError: same") for n in range(5))
    other = tuple(TrialView(number=n, state="failed", error=f"ValueError: {n}") for n in range(5, 10))
    lines = printed(replace(view, trials=same + other))
    assert "5 trials failed: ValueError: same" in lines
    assert "... and 3 other errors" in lines
    assert "no trial completed" in lines


def test_without_a_completed_trial_the_best_report_is_told(view):
    under_way = (
        TrialView(number=0, state="cancelled", value=0.9, epoch=2, epochs=8, params={"lr": 0.1}),
        TrialView(number=1, state="interrupted", value=0.91, epoch=3, epochs=8, params={"lr": 0.2}),
        TrialView(number=2, state="failed", value=0.99),
        TrialView(number=3, state="cancelled", value=math.nan),
        TrialView(number=4, state="cancelled"),
    )
    told = "no trial completed; the best so far: trial 1, val_acc 0.91 in epoch 3/8 (lr=0.2)"
    assert told in printed(replace(view, trials=under_way))
    least = replace(view, trials=under_way, goal="minimize")
    assert any(line.startswith("no trial completed; the best so far: trial 0, val_acc 0.9 ") for line in printed(least))
    assert "no trial completed" in printed(replace(view, trials=under_way[3:]))


def test_the_bound_of_a_long_sweep_is_told_and_none_of_a_short_one(view):
    long = replace(view, status="completed", bound_seconds=40.0)
    assert "sweep vit: done after 1m32s, of which 40s is the least that its units take on these devices" in printed(
        long
    )
    assert "sweep vit: done after 40s" in printed(replace(long, elapsed_seconds=40.0))


def test_json_has_it_all_and_no_nan(view):
    odd = TrialView(number=8, state="completed", value=math.inf, params={"x": math.nan})
    data = json.loads(json.dumps(to_json(replace(view, trials=(*view.trials, odd), status="failed")), allow_nan=False))
    assert data["metric"] == {"name": "val_acc", "goal": "maximize"}
    assert data["best"]["number"] == 8
    assert data["best"]["value"] == "inf"
    assert data["best"]["params"] == {"x": "nan"}
    assert data["counts"] == {"completed": 3, "pruned": 1, "failed": 1, "cancelled": 0, "interrupted": 0}
    assert (data["units_run"], data["units_saved"], data["elapsed_seconds"]) == (900, 100, 92.0)
    assert data["devices"]["cpu:0"]["peak_bytes"] == 5 << 20
    assert [trial["state"] for trial in data["trials"]][:4] == ["completed", "completed", "pruned", "failed"]
    assert data["status"] == "failed"


def test_parameters_that_are_no_values_of_json_are_texts_there(view):
    params = {"act": Console, "width": np.int64(8), "sizes": (4, math.inf, Console), "none": None, "wide": True}
    trial = TrialView(number=0, state="completed", value=0.5, params=params)
    data = json.loads(json.dumps(to_json(replace(view, trials=(trial,))), allow_nan=False))
    expected = {"act": str(Console), "width": "8", "sizes": [4, "inf", str(Console)], "none": None, "wide": True}
    assert data["best"]["params"] == data["trials"][0]["params"] == expected


def test_a_line_for_a_trial(view):
    assert trial_line(view.trials[2], "val_acc") == (
        "trial 2  pruned  val_acc 0.98  epoch 2/8  lr=0.001235 width=128 act=relu"
    )
    assert trial_line(view.trials[3], "val_acc").endswith("RuntimeError: boom (train.py:6)")
