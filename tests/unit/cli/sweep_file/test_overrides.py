"""`--set NAME=VALUE` changes what a sweep file fixes, and nothing else."""

import pytest

from hydra_tune.cli.sweep_file.domains import ChoiceDomain, FloatDomain
from hydra_tune.cli.sweep_file.overrides import with_settings
from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.errors import SweepFileError

SPEC = SweepSpec(
    file="space.yaml",
    task="train:build",
    metric="val_loss",
    parameters={
        "lr": FloatDomain(low=1e-4, high=0.1, log=True),
        "width": ChoiceDomain(values=(64, 128)),
        "data": ChoiceDomain(values=(None,)),
        "epochs": ChoiceDomain(values=(8,)),
    },
    places={"parameters.lr": "space.yaml:6:3", "parameters.width": "space.yaml:7:3"},
)


def set_in(spec, *settings):
    return {
        name: domain.values[0] for name, domain in with_settings(spec, settings).parameters.items() if name in FIXED
    }


FIXED = ("data", "epochs")


def test_nothing_set_changes_nothing():
    assert with_settings(SPEC, ()) == SPEC
    without = SweepSpec(file="space.yaml", task="train:build", metric="val_loss")
    assert with_settings(without, ()) == without


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("data=texts/my book.txt", "texts/my book.txt"),
        ("data=/a=b.txt", "/a=b.txt"),
        ("data=3", 3),
        ("data='3'", "3"),
        ("data=1e-6", 1e-6),
        ("data=null", None),
        ("data=true", True),
        ("data=''", ""),
    ],
)
def test_values_are_read_as_in_the_file(setting, value):
    given = with_settings(SPEC, (setting,)).parameters["data"]
    assert given == ChoiceDomain(values=(value,))
    assert type(given.values[0]) is type(value)


def test_several_are_set_and_the_order_of_parameters_stays():
    spec = with_settings(SPEC, ("epochs=2", "data=a.txt"))
    assert list(spec.parameters) == list(SPEC.parameters)
    assert set_in(SPEC, "epochs=2", "data=a.txt") == {"data": "a.txt", "epochs": 2}
    assert spec.parameters["lr"] is SPEC.parameters["lr"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("data",), "--set data: must be NAME=VALUE, e.g. --set epochs=3"),
        (("=3",), "--set =3: must be NAME=VALUE, e.g. --set epochs=3"),
        (("data=",), "--set data=: has no value; for no value write null, for empty text ''"),
        (("epoch=3",), "--set epoch=3: space.yaml has no parameter 'epoch'; did you mean 'epochs'?"),
        (
            ("seed=3",),
            "--set seed=3: space.yaml has no parameter 'seed'; the file fixes data, epochs; --set changes parameters alone",
        ),
        (
            ("width=64",),
            "--set width=64: space.yaml:7:3: parameters.width is searched, not fixed; change its range there",
        ),
        (("epochs=1", "epochs=2"), "--set epochs=2: epochs is set twice; give one value"),
        (
            ("data=[a]",),
            "--set data=[a]: must be text, a number, true, false or null, not a list; put the value in quotes",
        ),
        (("epoch=3", "data"), "--set epoch=3: "),
    ],
)
def test_what_makes_no_sense_is_told_with_its_remedy(settings, told):
    with pytest.raises(SweepFileError) as caught:
        with_settings(SPEC, settings)
    assert told in str(caught.value)


def test_what_is_not_yaml_is_told():
    with pytest.raises(SweepFileError, match="put the value in quotes of its own if you mean text"):
        with_settings(SPEC, ("data=*.txt",))


def test_every_problem_is_told():
    with pytest.raises(SweepFileError) as caught:
        with_settings(SPEC, ("epoch=3", "data"))
    assert len(str(caught.value).splitlines()) == 2


def test_a_file_without_parameters_has_nothing_to_set():
    spec = SweepSpec(file="space.yaml", task="train:build", metric="val_loss")
    with pytest.raises(SweepFileError, match=r"has no parameters:, so train:build draws them itself"):
        with_settings(spec, ("epochs=3",))
