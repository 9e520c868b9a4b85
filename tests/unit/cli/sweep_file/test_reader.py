"""A sweep file is read as people who know wandb's mean it, and every mistake is told with its line and column."""

import math
import re
import time
from textwrap import dedent

import pytest

from hydra_tune.cli.sweep_file.domains import ChoiceDomain, FloatDomain, IntDomain
from hydra_tune.cli.sweep_file.reader import read_sweep_file
from hydra_tune.cli.sweep_file.spec import PruningRule
from hydra_tune.cli.sweep_file.yaml_marks import read_yaml
from hydra_tune.errors import SweepFileError

GOOD = """\
task: train:build
metric: {name: val_loss}
run_cap: 3
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read_text(text):
        path = tmp_path / "space.yaml"
        path.write_bytes(text if isinstance(text, bytes) else dedent(text).encode())
        return read_sweep_file(path.relative_to(tmp_path))

    return read_text


@pytest.fixture
def problems(read):
    def problems_of(text):
        with pytest.raises(SweepFileError) as caught:
            read(text)
        return str(caught.value).splitlines()

    return problems_of


def test_a_whole_file(read):
    spec = read("""\
        name: vit
        description: as small as it gets
        task: train:build
        method: random
        metric:
          name: val_acc
          goal: maximize
        run_cap: 16
        seed: 7
        parameters:
          lr: {distribution: log_uniform_values, min: 1e-5, max: 1e-1}
          width: {values: [64, 128]}
          heads: {value: 4}
          layers: {min: 1, max: 6}
          dropout: {min: 0, max: 0.5}
          act: {distribution: categorical, values: [relu, null, true, 0.5]}
        early_terminate: {type: hyperband, min_iter: 2, eta: 4, max_iter: 27}
        hydra:
          devices: cpu:2
          device_memory: 11GiB
          host_memory: 1000000
          spill_dir: /scratch
          policy: fifo
          admission: staggered
          buffer_fraction: 0.2
          max_concurrent: 8
          num_shards: 4
          fusion: auto
          fusion_size: 4
          event_log_limit: 50MB
          loader_warning: 2min
          loader_timeout: 90
          max_retries: 0
          storage: sqlite:///trials.db
          study: second
        """)
    assert (spec.name, spec.task, spec.method, spec.run_cap, spec.seed) == ("vit", "train:build", "random", 16, 7)
    assert (spec.metric, spec.goal) == ("val_acc", "maximize")
    assert spec.parameters == {
        "lr": FloatDomain(low=1e-5, high=0.1, log=True),
        "width": ChoiceDomain(values=(64, 128)),
        "heads": ChoiceDomain(values=(4,)),
        "layers": IntDomain(low=1, high=6),
        "dropout": FloatDomain(low=0.0, high=0.5),
        "act": ChoiceDomain(values=("relu", None, True, 0.5)),
    }
    assert spec.pruning == PruningRule(type="hyperband", options={"min_iter": 2, "eta": 4, "max_iter": 27})
    assert spec.engine == {
        "devices": "cpu:2",
        "device_memory": "11GiB",
        "host_memory": 1000000,
        "spill_dir": "/scratch",
        "policy": "fifo",
        "admission": "staggered",
        "buffer_fraction": 0.2,
        "max_concurrent": 8,
        "num_shards": 4,
        "loader_warning": 120.0,
        "loader_timeout": 90.0,
        "max_retries": 0,
        "fusion": "auto",
        "fusion_size": 4,
        "event_log_limit": "50MB",
    }
    assert (spec.storage, spec.study) == ("sqlite:///trials.db", "second")
    assert spec.at("parameters.lr") == "space.yaml:11:3: parameters.lr"
    assert spec.at("hydra.devices") == "space.yaml:19:12: hydra.devices"
    assert spec.at("not.there") == "not.there"


def test_what_is_left_out_has_the_defaults_of_the_documentation(read):
    spec = read(GOOD)
    assert (spec.method, spec.goal, spec.parameters, spec.pruning) == ("bayes", "minimize", None, None)
    assert (spec.seed, spec.storage, spec.study, spec.engine) == (None, None, None, {})


@pytest.mark.parametrize(("written", "fusion"), [("on", "on"), ("off", "off"), ("'on'", "on"), ("auto", "auto")])
def test_yaml_may_read_on_and_off_as_it_likes(read, written, fusion):
    assert read(GOOD + f"hydra: {{fusion: {written}}}\n").engine == {"fusion": fusion}


def test_former_names_are_read_as_the_present_ones(read):
    spec = read(GOOD + "hydra: {fuse: on, fuse_size: 4, fuse_compile: inductor, fuse_planner: off}\n")
    assert spec.engine == {"fusion": "on", "fusion_size": 4, "fusion_compile": "inductor", "fusion_planner": "off"}
    assert spec.at("hydra.fusion_size") == "space.yaml:4:30: hydra.fusion_size"


def test_a_former_name_beside_the_present_one_is_refused(problems):
    assert problems(GOOD + "hydra: {fusion: on, fuse: off}\n") == [
        "space.yaml:4:21: hydra.fuse is the former name of fusion, which is given as well; leave it out"
    ]


def test_the_name_is_the_study_unless_there_is_another(read):
    assert read("name: vit\n" + GOOD).study == "vit"
    assert read("name: vit\n" + GOOD + "hydra: {study: b}\n").study == "b"


@pytest.mark.parametrize(
    ("entry", "domain"),
    [
        ("{value: 3}", ChoiceDomain(values=(3,))),
        ("{value: null}", ChoiceDomain(values=(None,))),
        ("{value: yes}", ChoiceDomain(values=(True,))),
        ("{distribution: constant, value: a}", ChoiceDomain(values=("a",))),
        ("{values: [1]}", ChoiceDomain(values=(1,))),
        ("{min: 1, max: 3}", IntDomain(low=1, high=3)),
        ("{min: -3, max: 3.0}", FloatDomain(low=-3.0, high=3.0)),
        ("{distribution: uniform, min: 0, max: 1}", FloatDomain(low=0.0, high=1.0)),
        ("{distribution: int_uniform, min: 0, max: 9}", IntDomain(low=0, high=9)),
        ("{distribution: q_uniform, min: 16, max: 64, q: 16}", IntDomain(low=16, high=64, step=16)),
        ("{distribution: q_uniform, min: 0, max: 10}", IntDomain(low=0, high=10)),
        ("{distribution: q_uniform, min: 0.05, max: 0.5, q: 0.1}", FloatDomain(low=0.1, high=0.5, step=0.1)),
        ("{min: 10, max: 40, q: 16}", IntDomain(low=16, high=32, step=16)),
        ("{distribution: log_uniform_values, min: 1e-6, max: 1}", FloatDomain(low=1e-6, high=1.0, log=True)),
        ("{distribution: log_uniform, min: -2, max: 0}", FloatDomain(low=math.exp(-2), high=1.0, log=True)),
        ("{distribution: q_log_uniform_values, min: 1, max: 512}", IntDomain(low=1, high=512, log=True)),
        (
            "{distribution: q_log_uniform_values, min: 8, max: 512, q: 8}",
            FloatDomain(low=8.0, high=512.0, log=True, multiple=8.0),
        ),
        ("{distribution: q_log_uniform, min: 0, max: 2}", IntDomain(low=1, high=7, log=True)),
    ],
)
def test_each_distribution(read, entry, domain):
    assert read(f"{GOOD}parameters:\n  x: {entry}\n").parameters == {"x": domain}


def test_a_long_run_of_digits_is_read_in_time():
    """`hydra-tune list` reads every YAML file of a folder."""
    began = time.process_time()
    assert read_yaml(f"a: {'1' * 60000}x").data == {"a": f"{'1' * 60000}x"}
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize("number", ["1e-6", "1E-6", "0.000001", "1.0e-6", ".1e-5", "+1e-6"])
def test_a_number_with_an_exponent_is_a_number(read, number):
    domain = read(f"{GOOD}parameters:\n  x: {{distribution: log_uniform_values, min: {number}, max: 1}}\n").parameters[
        "x"
    ]
    assert domain.low == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (
            "{distribution: log_uniform_values, min: 0.1, max: 1e-5}",
            "5:3: parameters.lr: min (0.1) must be < max (1e-05)",
        ),
        ("{min: 3, max: 3}", "5:3: parameters.lr: min (3) must be < max (3)"),
        ("{min: 3}", "5:3: parameters.lr: int_uniform needs max"),
        ("{distribution: uniform}", "5:3: parameters.lr: uniform needs min and max"),
        ("{}", "5:3: parameters.lr: needs value, values, or min and max"),
        ("{q: 3}", "5:3: parameters.lr: needs value, values, or min and max"),
        ("{value: 3, min: 3}", "5:3: parameters.lr: min does not go with constant, which takes value"),
        ("{min: 1, max: 3, values: [1]}", "5:3: parameters.lr: min does not go with categorical, which takes values"),
        ("{min: .inf, max: 3}", "5:13: parameters.lr.min: must be a number, not inf"),
        ("{min: low, max: 3}", "5:13: parameters.lr.min: must be a number, not 'low'"),
        ("{min: true, max: 3}", "5:13: parameters.lr.min: must be a number, not true"),
        ("{min: 1, max: 3, q: 0}", "5:27: parameters.lr.q: must be > 0, not 0"),
        ("{min: 17, max: 31, q: 16}", "5:3: parameters.lr: there is no multiple of q (16) from 17 to 31"),
        (
            "{distribution: int_uniform, min: 0.5, max: 3}",
            "5:3: parameters.lr: min (0.5) must be a whole number for int_uniform; for real numbers use uniform",
        ),
        (
            "{distribution: log_uniform_values, min: 0, max: 1}",
            "5:3: parameters.lr: min (0) must be > 0 on a log scale",
        ),
        (
            "{distribution: log_uniform, min: 1, max: 1000}",
            (
                "5:3: parameters.lr: e**min to e**max (min 1, max 1000) is outside the numbers of a computer; "
                "for limits that are not exponents use log_uniform_values"
            ),
        ),
        (
            "{distribution: unifrom, min: 0, max: 1}",
            "5:22: parameters.lr.distribution: 'unifrom' is not supported; did you mean 'uniform'?",
        ),
        ("{distribution: 3, min: 0, max: 1}", "5:22: parameters.lr.distribution: must be text"),
        ("{values: 3}", "5:16: parameters.lr.values: must be a list, not 3"),
        ("{values: []}", "5:16: parameters.lr.values: must not be empty"),
        ("{values: [1, 2, 1]}", "5:3: parameters.lr: values has 1 twice"),
        ("{values: [1, true]}", "5:3: parameters.lr: values has True twice (equal to 1)"),
        (
            "{values: [[1, 2]]}",
            "5:17: parameters.lr.values.0: must be text, a number, true, false or null, not a list",
        ),
        ("{value: {a: 1}}", "5:15: parameters.lr.value: must be text, a number, true, false or null, not a map"),
        ("{vales: [1]}", "5:8: unknown key 'parameters.lr.vales'; did you mean 'values'?"),
        ("0.1", "5:7: parameters.lr: must be a map, not 0.1; for a fixed value write lr: {value: 0.1}"),
    ],
)
def test_a_wrong_parameter(problems, entry, problem):
    assert problems(f"{GOOD}parameters:\n  lr: {entry}\n") == [f"space.yaml:{problem}"]


def test_a_distribution_without_a_counterpart_is_named_and_so_are_the_others(problems):
    found = problems(f"{GOOD}parameters:\n  lr:\n    distribution: normal\n    mu: 0\n    sigma: 1\n")
    assert found[0].startswith("space.yaml:6:19: parameters.lr.distribution: 'normal' is not supported; known are ")
    assert "log_uniform_values" in found[0]
    assert [line.partition(";")[0] for line in found[1:]] == [
        "space.yaml:7:5: unknown key 'parameters.lr.mu'",
        "space.yaml:8:5: unknown key 'parameters.lr.sigma'",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "1:1: the file is empty; it needs at least task and metric"),
        (b"# nothing\n", "1:1: the file is empty; it needs at least task and metric"),
        (b"- task\n", "1:1: a sweep file is a map of keys such as task: and metric:, not a list"),
        (b"\n  hello\n", "2:3: a sweep file is a map of keys such as task: and metric:, not 'hello'"),
        (b"task: a:b\n", "1:1: metric is missing"),
        (b"metric: {name: val_loss}\n", "1:1: task is missing"),
        (b"task: a:b\nmetric: {goal: minimize}\n", "2:1: metric.name is missing"),
        (b"task: a:b\nmetric: val_loss\n", "2:9: metric: must be a map, not 'val_loss'"),
        (
            b"task: a:b\nmetric: [val_loss, val_acc]\n",
            "2:9: metric: must be a map, not a list; a file has one metric: for several use create_study(directions=...)",
        ),
        (b"task: a:b\nmetric: {name: x, goal: maximise}\n",
         "2:25: metric.goal: must be one of minimize, maximize, not 'maximise'; did you mean 'maximize'?"),
        (b"task: [a, b]\nmetric: {name: x}\n", "1:7: task: must be text, not a list"),
        (b"task: ''\nmetric: {name: x}\n", "1:7: task: must not be empty"),
        (b"task: a:b\nmetric: {name: x}\ntask: c:d\n", "3:1: 'task' is given twice, first on line 1"),
        (b"task: a:b\nmetric:\n  name: x\n name: y\n", "4:2: expected <block end>, but found '<block mapping start>'"),
        (b"task: a:b\n\tmetric: x\n", "2:1: found character '\\t' that cannot start any token"),
        (b"task: 'a\n", "2:1: found unexpected end of stream"),
        (b"task: a:b\nmetric: *m\n", "2:9: found undefined alias 'm'"),
        (b"task: a:b\n--- \ntask: c:d\n", "2:1: expected a single document in the stream, but found another document"),
        (b"task: !!python/object/apply:os.system [ls]\nmetric: {name: x}\n",
         ("1:7: the tag !!python/object/apply:os.system is not allowed; "
         "only maps, lists, text, numbers, true/false and null")),
        (b"task: !!python/name:os.system\nmetric: {name: x}\n",
         "1:7: the tag !!python/name:os.system is not allowed; only maps, lists, text, numbers, true/false and null"),
        (b"task: a:b\nmetric: {name: x}\nseed: !!int four\n", "3:7: 'four' is not a valid int"),
        (b"task: a:b\nmetric: {name: x}\nseed: !!timestamp four\n", "3:7: 'four' is not a valid timestamp"),
        (b"task: a:b\nmetric: &m {name: *m}\n", "2:9: a value cannot contain itself"),
        (b"task: a:b\nmetric: {name: x}\n1: 2\n",
         "3:1: '1' cannot be a key; keys are text (put it in quotes if you mean text)"),
        (b"task: a:b\nname: \xff\n", "2:7: not text in UTF-8"),
        (b"task: a:b\nname: a\x00b\n", "2:8: character '\\x00' is not allowed in YAML"),
        (b"[" * 5000, "1:1: nested too deeply"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_one(problems, text, problem):
    assert problems(text) == [f"space.yaml:{problem}"]


def test_a_file_runs_nothing(problems, tmp_path):
    """Wherever in it the call is, and whatever else is wrong."""
    mark = tmp_path / "ran"
    calls = f"!!python/object/apply:os.mkdir [{mark}]", f"!!python/object/new:os.mkdir [{mark}]"
    for call in calls:
        for text in (call, f"task: {call}", f"task: a:b\nmetric: {{name: x}}\nparameters: {{lr: {{value: {call}}}}}\n"):
            assert any("is not allowed; only maps, lists, text" in problem for problem in problems(text.encode()))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (
            "hydra: {checkpoint_every: never}",
            (
                "4:27: hydra.checkpoint_every: must be a number of optimizer steps, or a time such as '30s', '5min' or "
                "'1h', not 'never'"
            ),
        ),
        (
            "hydra: {checkpoint_every: 0}",
            (
                "4:27: hydra.checkpoint_every: must be a number of optimizer steps, or a time such as '30s', '5min' or "
                "'1h', not 0"
            ),
        ),
        (
            "hydra: {loader_timeout: never}",
            "4:25: hydra.loader_timeout: must be a time above 0, in seconds or as '30s', '5min' or '1h', not 'never'",
        ),
        ("hydra: {max_retries: -1}", "4:22: hydra.max_retries: must be >= 0, not -1"),
        (
            "hydra: {stop_seconds: -1}",
            "4:23: hydra.stop_seconds: must be a time above 0, in seconds or as '30s', '5min' or '1h', not -1",
        ),
        ("metod: bayes", "4:1: unknown key 'metod'; did you mean 'method'?"),
        ("Name: bayes", "4:1: unknown key 'Name'; did you mean 'name'?"),
        ("method: bayesian", "4:9: method: must be one of bayes, random, grid, not 'bayesian'; did you mean 'bayes'?"),
        ("method: grid", "4:9: method: grid needs parameters"),
        ("seed: -1", "4:7: seed: must be >= 0, not -1"),
        ("seed: 1.5", "4:7: seed: must be a whole number, not 1.5"),
        ("seed: '1'", "4:7: seed: must be a whole number, not '1'"),
        ("seed: true", "4:7: seed: must be a whole number, not true"),
        ("name: 3", "4:7: name: must be text, not 3"),
        ("name: [a]", "4:7: name: must be text, not a list"),
        ("early_terminate: hyperband", "4:18: early_terminate: must be a map, not 'hyperband'"),
        ("early_terminate: {eta: 3}", "4:18: early_terminate: needs a type: hyperband, successive_halving or median"),
        (
            "early_terminate: {type: hyperban}",
            (
                "4:18: early_terminate: type must be one of hyperband, successive_halving, median, not 'hyperban'; "
                "did you mean 'hyperband'?"
            ),
        ),
        ("early_terminate: {type: hyperband, min_iter: 0}", "4:46: early_terminate.min_iter: must be >= 1, not 0"),
        (
            "early_terminate: {type: hyperband, min_itr: 1}",
            "4:36: unknown key 'early_terminate.min_itr'; did you mean 'min_iter'?",
        ),
        (
            "early_terminate: {type: median, min_iter: 1}",
            (
                "4:33: unknown key 'early_terminate.min_iter'; "
                "known are type, n_startup_trials, n_warmup_steps, interval_steps, n_min_trials"
            ),
        ),
        (
            "early_terminate: {type: hyperband, min_iter: 9, max_iter: 3}",
            "4:59: early_terminate: min_iter (9) must be <= max_iter (3)",
        ),
        ("parameters: {}", "4:13: parameters: must not be empty"),
        ("parameters: [lr]", "4:13: parameters: must be a map, not a list"),
        (
            "parameters: {class: {value: 3}}",
            "4:14: parameters.class: cannot be the name of an argument; the function is called with name=value",
        ),
        ("hydra: {divices: cpu}", "4:9: unknown key 'hydra.divices'; did you mean 'devices'?"),
        ("hydra: {devices: 2}", "4:18: hydra.devices: must be text, not 2"),
        (
            "hydra: {device_memory: lots}",
            "4:24: hydra.device_memory: must be a size such as '11GiB', '800 MB' or '4096', not 'lots'",
        ),
        ("hydra: {device_memory: 0}", "4:24: hydra.device_memory: must be more than 0 bytes, not 0"),
        ("hydra: {buffer_fraction: 1}", "4:26: hydra.buffer_fraction: must be auto, or from 0 to below 1, not 1"),
        (
            "hydra: {num_shards: layers}",
            "4:21: hydra.num_shards: must be a whole number of at least 1, layer or tuned, not 'layers'",
        ),
        ("hydra: {max_concurrent: 0}", "4:25: hydra.max_concurrent: must be >= 1, not 0"),
        (
            "hydra: {policy: lifo}",
            (
                "4:17: hydra.policy: must be one of 'lrtf', 'lrtf_paper', 'srtf', 'fifo', 'round_robin', 'fair', 'lpt', "
                "'random', not 'lifo'; did you mean 'fifo'?"
            ),
        ),
        ("hydra: {policy: 3}", "4:17: hydra.policy: must be text, not 3"),
        ("hydra: {fusion: always}", "4:17: hydra.fusion: must be auto, on or off, not 'always'"),
        ("hydra: {fusion: 1}", "4:17: hydra.fusion: must be auto, on or off, not 1"),
        ("hydra: {fusion_size: 1}", "4:22: hydra.fusion_size: must be >= 2, not 1"),
        ("hydra: {fuse: always}", "4:15: hydra.fuse: must be auto, on or off, not 'always'"),
        ("hydra: {fusions: on}", "4:9: unknown key 'hydra.fusions'; did you mean 'fusion'?"),
        (
            "parameters: {lr: 0.1}",
            "4:18: parameters.lr: must be a map, not 0.1; for a fixed value write lr: {value: 0.1}",
        ),
        (
            "parameters: {a: 'no'}",
            "4:17: parameters.a: must be a map, not 'no'; for a fixed value write a: {value: 'no'}",
        ),
        (
            "parameters: {lr: [0.1, 1, relu]}",
            "4:18: parameters.lr: must be a map, not a list; for a choice write lr: {values: [0.1, 1, relu]}",
        ),
        (
            "hydra: {admission: stagered}",
            "4:20: hydra.admission: must be one of auto, eager, staggered, not 'stagered'; did you mean 'staggered'?",
        ),
    ],
)
def test_a_wrong_key_or_value(problems, more, problem):
    assert problems(GOOD + more + "\n") == [f"space.yaml:{problem}"]


HUGE = "1" + "0" * 400
"""A whole number beyond all real ones."""


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("seed: !!int ''", "4:7: '' is not a valid int"),
        ("parameters:\n  a: {value: !!float ''}", "5:14: '' is not a valid float"),
        (f"seed: !!float 1{':0' * 400}.0", f"4:7: '1{':0' * 400}.0' is not a valid float"),
        (f"parameters:\n  a: {{min: 0, max: {HUGE}}}", "5:20: parameters.a.max: must be a number, not 1000"),
        (
            "method: grid\nparameters:\n  a: {min: 1, max: 100000000000000000000}",
            "4:9: method: the grid has 100000000000000000000 points, more than 100000",
        ),
    ],
)
def test_values_beyond_what_python_takes_are_problems_of_the_file(problems, more, problem):
    (found,) = problems(GOOD + more + "\n")
    assert found.startswith(f"space.yaml:{problem}")


def test_a_grid_needs_values_that_can_be_counted(problems):
    found = problems(GOOD + "method: grid\nparameters:\n  lr: {min: 0.1, max: 0.2}\n  n: {min: 1, max: 200000}\n")
    assert found == [
        "space.yaml:4:9: method: the grid has 200000 points, more than 100000",
        "space.yaml:6:3: parameters.lr: a grid needs values it can count; give values, whole min and max, or q",
    ]


def test_all_problems_are_told_at_once_in_the_order_of_the_file(problems):
    found = problems("""\
        tsak: train:build
        metric: {name: val_loss, gaol: minimize}
        run_cap: ten
        parameters:
          lr: {min: 2, max: 1}
        seed: 1
        seed: 2
        """)
    assert [re.match(r"space\.yaml:(\d+:\d+):", line)[1] for line in found] == [
        "1:1",
        "1:1",
        "2:26",
        "3:10",
        "5:3",
        "7:1",
    ]


def test_merged_maps_may_be_overridden_and_used_again(read):
    spec = read(GOOD + "parameters:\n  a: &base {min: 1, max: 3}\n  b: &next {<<: *base, max: 5}\n  c: *next\n")
    assert spec.parameters["b"] == spec.parameters["c"] == IntDomain(low=1, high=5)


def test_own_keys_come_before_merged_ones_and_those_of_earlier_maps_before_later_ones(read):
    spec = read(
        GOOD + "parameters:\n  a: {<<: [{min: 1, max: 3}, {min: 2, max: 9, distribution: int_uniform}]}\n"
        "  b: &base {min: 1, max: 3}\n  c: &next {<<: *base, max: 5}\n  d: {<<: [*next, *base]}\n  e: {<<: *next}\n"
    )
    assert [spec.parameters[name] for name in "abde"] == [IntDomain(low=1, high=high) for high in (3, 3, 5, 5)]


def test_merged_keys_keep_the_order_of_the_file(read):
    """A seeded search draws the parameters in their order."""
    parameters = (
        "parameters:\n  <<: [{b: {min: 1, max: 2}, a: {min: 1, max: 2}}, {b: {min: 3, max: 4}, c: {min: 1, max: 2}}]\n"
    )
    spec = read(GOOD + parameters + "  a: {min: 5, max: 6}\n")
    assert list(spec.parameters) == ["b", "a", "c"]
    assert [domain.low for domain in spec.parameters.values()] == [1, 5, 1]


def test_what_is_merged_has_to_be_a_map(problems):
    assert problems(GOOD + "parameters:\n  a: {<<: [{min: 1}, 3], max: 3}\n") == [
        "space.yaml:5:22: '<<' takes a map or a list of maps, not !!int"
    ]


def test_aliases_that_multiply_are_refused(problems):
    levels = "\n".join(f"  - &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 9))
    found = problems(f"task: a:b\nmetric: {{name: x}}\nbomb:\n  - &l0 [1, 2]\n{levels}\n")
    assert len(found) == 1
    assert "too many values" in found[0]


def test_merges_that_multiply_are_refused(problems):
    many = ", ".join(f"k{n}: 1" for n in range(1000))
    found = problems(
        f"task: a:b\nmetric: {{name: x}}\nbase: &base {{{many}}}\nbomb: {{<<: [{', '.join(['*base'] * 200)}]}}\n"
    )
    assert len(found) == 1
    assert "too many values" in found[0]


def test_a_byte_order_mark_is_no_content(read):
    assert read(b"\xef\xbb\xbf" + GOOD.encode()).task == "train:build"


def test_weights_are_kept_where_it_is_said(read, problems):
    spec = read(GOOD + "hydra: {keep_best: 3, weights_dir: kept}\n")
    assert (spec.keep_best, spec.weights_dir, spec.engine) == (3, "kept", {})
    assert problems(GOOD + "hydra: {weights_dir: kept}\n") == [
        "space.yaml:4:9: hydra.weights_dir: is where weights are kept, and none are; add keep_best: 1 or more"
    ]
    assert problems(GOOD + "hydra: {keep_best: 0}\n") == ["space.yaml:4:20: hydra.keep_best: must be >= 1, not 0"]
