"""The state of a loop: in checkpoints, where the loop goes on, and where other objects hold its memory."""

from functools import partial

import pytest
import torch
from torch import nn

from hydra_tune import HydraExecutor, LoopTask, Reported, TrainTask, train_plain
from hydra_tune.errors import CheckpointError, TaskError
from tests.parity.exact import differences, without_seconds

pytestmark = pytest.mark.timeout(120)
STEPS = 8


class Counting(torch.optim.SGD):
    """Lowers its rate by counts of its own: one in an attribute, and one in the state of the whole optimizer."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        self.state["odd"] = self.state.get("odd", 0) + self.calls % 2
        for group in self.param_groups:
            group["lr"] = 0.1 / (self.calls + self.state["odd"])
        return super().step(closure)


def counted(loop, ends=None, steps=STEPS):
    """Train with two optimizers, the first of which steps half as often."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = [Counting(model[place].parameters(), lr=0.1, momentum=0.9) for place in (0, 2)]
    loop.register(model, *optimizers, steps=steps)
    for number in range(loop.start_step, steps):
        loss = model(torch.randn(16, 4)).square().mean()
        model.zero_grad()
        loss.backward()
        optimizers[1].step()
        if number % 2:
            optimizers[0].step()
        loop.report(loss.item(), step=number)
        if ends is not None:
            ends(number)
        loop.step()


def test_a_resumed_loop_has_the_counts_of_each_of_its_optimizers(tmp_path, caplog):
    def ends(number):
        if number == 5:
            raise KeyError("a fault")

    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path) as pool:
        (failed,) = pool.run([LoopTask(lambda loop: counted(loop, ends))], on_error="return")
        assert isinstance(failed.error, KeyError)
        resumed = pool.submit(LoopTask(counted), resume_from=failed.checkpoint).result()
    plain = train_plain(LoopTask(counted))
    assert resumed.status == "completed", resumed.error
    assert without_seconds(resumed.history) == without_seconds(plain.history)
    assert list(differences(plain.state_dict(), resumed.state_dict())) == []
    assert "in no checkpoint" not in caplog.text


class Average:
    """State of the user's own."""

    def __init__(self):
        self.value = 0.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.mark.parametrize("registers", [False, True])
def test_variables_with_a_state_that_is_not_registered_are_named_once(registers, tmp_path, caplog):
    def step(scheduler, loop):
        average = Average()  # of a function that the loop calls
        scheduler.step()
        loop.step()
        del average

    def fn(loop):
        model, teacher, criterion = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False), nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        warm = torch.optim.lr_scheduler.ConstantLR(optimizer)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm], milestones=[])
        ema, kind = Average(), Average
        loop.register(model, optimizer, *([scheduler, ema] if registers else []))
        for number in range(3):
            x = torch.randn(8, 4)
            criterion(model(x), teacher(x)).backward()
            optimizer.step()
            loop.report(kind().value, step=number)
            step(scheduler, loop)

    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path) as pool:
        assert pool.loop(fn, "own").result().status == "completed"
    (message,) = [record.getMessage() for record in caplog.records if "does not register" in record.getMessage()]
    left_out = "'average'" if registers else "'scheduler', 'average', 'warm', 'ema'"
    assert message.startswith(f"own does not register {left_out}, whose state changes are not saved")
    caplog.clear()
    with HydraExecutor(devices="cpu:1") as pool:
        pool.loop(fn).result()
    train_plain(LoopTask(fn))
    assert "does not register" not in caplog.text, "nothing is saved"


def test_a_parameter_of_two_optimizers_trains_and_is_in_no_checkpoint(tmp_path):
    def fn(loop):
        model = nn.Linear(4, 1)
        optimizers = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(model.parameters())
        loop.register(model, *optimizers, steps=STEPS)
        for number in range(STEPS):
            model.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            optimizers[number % 2].step()
            loop.step()

    task = LoopTask(fn)
    with HydraExecutor(devices="cpu:1") as pool:
        result = pool.run(task)
    assert list(differences(train_plain(task).state_dict(), result.state_dict())) == []
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path) as pool:
        (refused,) = pool.run([task], on_error="return")
    assert isinstance(refused.error, CheckpointError)
    assert "two of its optimizers have parameter 'weight'" in str(refused.error)


def test_a_loop_that_follows_the_events_of_another_pool_lets_that_pool_cut_its_models():
    def fn(loop):
        loop.register(nn.Linear(2, 2))
        with HydraExecutor(devices="cpu:1", num_shards=2) as inner:
            events = inner.events()
            job = inner.submit(cut, events=events)
            while isinstance(events.get(), Reported):
                job.proceed()
        loop.report(float(job.result().num_shards))

    rows = torch.randn(16, 4)
    cut = TrainTask(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)),
        optimizer=torch.optim.SGD,
        loss=nn.functional.mse_loss,
        train=torch.utils.data.TensorDataset(rows, rows),
        batch_size=8,
    )
    with HydraExecutor(devices="cpu:1") as pool:
        assert pool.run(LoopTask(fn)).metrics == {"value": 2.0}


def test_a_loop_that_was_complete_ends_where_it_resumes(tmp_path):
    """Its function would go on with the last weights, or repeat the last report."""

    def fn(loop):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        loop.register(model, optimizer)
        for _ in range(5):
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
            loop.step(may_resume=False)
        loop.report(model.weight.sum())

    task = LoopTask(fn)
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path) as pool:
        result = pool.run(task)
        resumed = pool.submit(task, resume_from=result.checkpoint).result()
    assert resumed.status == "completed", resumed.error
    assert without_seconds(resumed.history) == without_seconds(result.history)
    assert list(differences(result.state_dict(), resumed.state_dict())) == []


def test_a_complete_loop_that_registers_more_steps_goes_on(tmp_path):
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path) as pool:
        result = pool.run(LoopTask(partial(counted, steps=4)))
        resumed = pool.submit(LoopTask(counted), resume_from=result.checkpoint).result()
    assert list(differences(train_plain(LoopTask(counted)).state_dict(), resumed.state_dict())) == []


def test_a_save_due_where_the_loop_cannot_resume_follows_at_the_next_step_where_it_can(tmp_path):
    def fn(loop):
        loop.register(nn.Linear(4, 1))
        begun.append(loop.start_step)
        for number in range(loop.start_step, 6):
            if not loop.start_step and number == 4:
                raise KeyError("a fault")
            loop.step(may_resume=number % 3 == 2)

    begun = []
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path, checkpoint_every=2) as pool:
        (failed,) = pool.run([LoopTask(fn)], on_error="return")
        assert pool.submit(LoopTask(fn), resume_from=failed.checkpoint).result().status == "completed"
    assert begun == [0, 3]


def test_gradients_made_before_register_are_not_counted_again_on_resume(tmp_path):
    def fn(loop):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(16, 4)).square().mean().backward()
        loop.register(model, optimizer, steps=4)
        for number in range(loop.start_step, 4):
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            loop.report(model.weight.sum(), step=number)
            if fails and number == 2:
                raise KeyError("a fault")
            loop.step()

    fails = [True]
    task = LoopTask(fn)
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path) as pool:
        (failed,) = pool.run([task], on_error="return")
        fails.clear()
        resumed = pool.submit(task, resume_from=failed.checkpoint).result()
    assert list(differences(train_plain(task).state_dict(), resumed.state_dict())) == []


class Exchanging(torch.optim.SGD):
    """Exchanges the memory of each parameter with that of its average at every step."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            average = state.setdefault("average", parameter.detach() * 0.5)
            average.lerp_(parameter.detach(), 0.1)
            parameter.data, average.data = average.data, parameter.data


def exchanged_copies(loop):
    """Averages beside the model, which change places with the weights for a unit."""
    model = nn.Linear(8, 400)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    loop.register(model, optimizer)
    for number in range(STEPS):
        model.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        for place, parameter in enumerate(model.parameters()):
            averages[place].lerp_(parameter.detach(), 0.1)
        for turn in range(2):
            for place, parameter in enumerate(model.parameters()):
                parameter.data, averages[place] = averages[place], parameter.data
            loop.report(model(torch.ones(1, 8)).sum(), step=2 * number + turn)
            loop.step()


def exchanged_state(loop):
    model = nn.Linear(8, 400)
    optimizer = Exchanging(model.parameters(), lr=0.1, momentum=0.9)
    loop.register(model, optimizer)
    for number in range(STEPS):
        model.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        loop.report(model(torch.ones(1, 8)).sum(), step=number)
        loop.step()


@pytest.mark.parametrize("fn", [exchanged_copies, exchanged_state])
def test_weights_exchanged_with_other_tensors_stay_apart_from_these(fn, monkeypatch):
    """On devices with memory of their own, which would copy the new weights over the memory that the loop still holds."""
    monkeypatch.setattr("hydra_tune.train.loop.burst.BURST_SECONDS", 0.0)
    task = LoopTask(fn)
    with HydraExecutor(devices="cpu:1", link_bandwidth="10GB/s", max_concurrent=2) as pool:
        results = pool.run([task, task])
    plain = train_plain(task)
    for result in results:
        assert without_seconds(result.history) == without_seconds(plain.history)
        assert list(differences(plain.state_dict(), result.state_dict())) == []


def in_inference_mode(loop):
    loop.register(model := nn.Linear(4, 1))
    with torch.inference_mode():
        model(torch.randn(2, 4))
        loop.step()
    model(torch.randn(2, 4))


class Listed:
    """A part of a loop whose state is no dict."""

    def state_dict(self):
        return [1]

    def load_state_dict(self, state):
        del state


def with_a_list(loop):
    loop.register(nn.Linear(4, 1), Listed())


@pytest.mark.parametrize(
    ("fn", "words"),
    [(in_inference_mode, r"within torch.inference_mode\(\)"), (with_a_list, r"state_dict\(\) of Listed returns list")],
)
def test_what_a_loop_cannot_have_is_refused_by_name(fn, words):
    with HydraExecutor(devices="cpu:1") as pool:
        (result,) = pool.run([LoopTask(fn)], on_error="return")
    with pytest.raises(TaskError, match=words):
        raise result.error


def with_views(loop):
    """Take views of the weights after the first moves, and read and write through them from then on."""
    model = nn.Linear(2000, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loop.register(model, optimizer, steps=30)
    views = None
    for number in range(30):
        model.zero_grad()
        model(torch.randn(4, 2000)).square().mean().backward()
        optimizer.step()
        if number == 15:
            views = model.state_dict()
        if views is not None:
            views["bias"].mul_(0.5)
        loop.report(model.weight.sum() if views is None else views["weight"].sum(), step=number)
        loop.step()


def test_views_of_weights_stay_theirs_where_another_trial_takes_the_room(monkeypatch):
    monkeypatch.setattr("hydra_tune.train.loop.burst.BURST_SECONDS", 0.0)
    task = LoopTask(with_views)
    with HydraExecutor(devices="cpu:1", device_memory="6500KiB", max_concurrent=2, policy="round_robin") as pool:
        results = pool.run([task, task])
        assert pool.stats().devices["cpu:0"].bytes_out_by_kind["parameters"] > 0
    plain = train_plain(task)
    for result in results:
        assert without_seconds(result.history) == without_seconds(plain.history)
        assert list(differences(plain.state_dict(), result.state_dict())) == []
