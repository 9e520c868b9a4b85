"""Whatever goes wrong in one trial ends that trial alone; whatever goes wrong in the pool leaves nobody waiting."""

import copy
import gc
import signal
import threading
import time
import traceback
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune import Failed, Finished, HydraExecutor, Reported, TrainTask
from hydra_tune.errors import HydraTuneError
from hydra_tune.schedule import Scheduler
from hydra_tune.train.trial import Trial
from tests.support.gathered import gather
from tests.support.tracker import StorageTracker
from tests.unit.pool.tasks import (
    PATIENCE_SECONDS,
    SAMPLES,
    X,
    Y,
    against_plain,
    mlp,
    one_batch,
    running,
    short,
    task,
)

pytestmark = [pytest.mark.usefixtures("captured_once")]


class FaultError(Exception):
    """What the tests' code raises."""


def until(condition):
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def fail(*arguments, **named):
    raise FaultError


def fail_with_itself_as_the_cause(*arguments, **named):
    try:
        fail()
    except FaultError as error:
        raise error from error


class FailsLater(nn.Module):
    """Cannot be captured, and fails in its third training step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 4), 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 6:
            raise FaultError
        return self.layer(x)


def _data_that_ends_badly():
    yield from one_batch()
    raise FaultError


def _failing_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: fail() if epoch else 1.0)


class FailingSGD(torch.optim.SGD):
    def step(self, closure=None):
        raise FaultError


class EndsProcess(nn.Linear):
    def forward(self, x):
        raise SystemExit(3)


class FailingSamples(TensorDataset):
    def __getitem__(self, index):
        if index > 20:
            raise FaultError
        return super().__getitem__(index)


def failing_loader(**options):
    return DataLoader(SAMPLES, batch_size=8, **options)


def hooked():
    """What a callback of the user's does that hangs on the model."""
    module = mlp()
    module.register_forward_hook(fail)
    return module


@pytest.mark.parametrize(
    "changes",
    [
        {"train": FailingSamples(X, Y), "batch_size": 8},
        {"train": failing_loader(collate_fn=fail)},
        {"model": hooked},
        {"loss": None, "step": fail},
        {"model": fail},
        {"optimizer": fail},
        {"param_groups": fail},
        {"scheduler": fail},
        {"scheduler": _failing_scheduler},
        {"train": fail},
        {"train": _data_that_ends_badly},
        {"loss": fail},
        {"loss": fail_with_itself_as_the_cause},
        {"model": FailsLater, "epochs": 9},
        {"optimizer": partial(FailingSGD, lr=0.1)},
        {"validate": one_batch, "evaluate": fail, "metric": "val_acc"},
        {"validate": fail},
    ],
    ids=lambda changes: "-".join(f"{k}:{getattr(v, '__name__', type(v).__name__)}" for k, v in changes.items()),
)
def test_an_error_in_a_trials_code_fails_that_trial_alone(changes):
    with running(devices="cpu:2") as pool:
        stream = pool.events()
        other = pool.submit(task(epochs=4))
        job = pool.submit(short(**changes), events=stream)
        while isinstance(event := stream.get(PATIENCE_SECONDS), Reported):
            job.proceed()
        assert isinstance(event, Failed)
        assert isinstance(event.result.error, FaultError)
        assert event.result.error.__traceback__ is not None
        assert against_plain(other.task, other.result(PATIENCE_SECONDS)) == []


def test_an_exit_in_a_trials_code_ends_neither_the_process_nor_the_pool():
    with running() as pool:
        result = pool.submit(short(model=partial(EndsProcess, 8, 4))).result(PATIENCE_SECONDS)
        assert result.status == "failed"
        assert pool.submit(short()).result(PATIENCE_SECONDS).status == "completed"


def test_an_instrument_that_raises_fails_the_trial_it_was_entered_for():
    units = []

    @contextmanager
    def instrument():
        units.append(1)
        if len(units) == 3:
            raise FaultError
        yield

    with running(instrument=instrument) as pool:
        result = pool.submit(task()).result(PATIENCE_SECONDS)
        assert isinstance(result.error, FaultError)
        assert pool.submit(task()).result(PATIENCE_SECONDS).status == "completed"


class Breaks:
    """A policy that raises from its nth choice on, or on the main thread once armed."""

    def __init__(self, choices=None):
        self.left, self.armed = choices, False

    def choose(self, device, candidates):
        if self.left is not None:
            self.left -= 1
        if self.left == 0 or (self.armed and threading.current_thread() is threading.main_thread()):
            raise FaultError
        return candidates[0]


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
@pytest.mark.parametrize("choices", [1, 2, 7, 12])
def test_a_policy_that_raises_fails_every_job_and_leaves_none_waiting(devices, choices):
    submitted = threading.Event()

    def data():
        assert submitted.wait(PATIENCE_SECONDS)  # else the pool may refuse the last ones
        yield from zip(X.split(8), Y.split(8), strict=True)

    with running(devices=devices, policy=Breaks(choices), num_shards=3) as pool:
        stream = pool.events()
        jobs = [pool.submit(task(train=data, epochs=5), events=stream if i % 2 else None) for i in range(4)]
        submitted.set()
        for job in jobs:
            result = job.result(PATIENCE_SECONDS)
            assert result.status == "failed"
            assert isinstance(result.error, FaultError)
        with pytest.raises(HydraTuneError):
            pool.submit(task())


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_a_policy_that_raises_while_a_driver_answers_leaves_no_job_waiting(devices):
    policy = Breaks()
    with running(devices=devices, policy=policy) as pool:
        stream = pool.events()
        jobs = [pool.submit(short(), events=stream) for _ in range(2)]
        assert all(isinstance(stream.get(PATIENCE_SECONDS), Reported) for _ in jobs)
        policy.armed = True
        for job in jobs:
            with suppress(FaultError):
                job.proceed()
        for job in jobs:
            assert job.result(PATIENCE_SECONDS).status == "failed"


def test_a_failed_trial_keeps_no_model_alive_though_its_error_is_kept():
    models = []

    def model():
        module = mlp()
        models.append(weakref.ref(module))
        return module

    with running() as pool:
        result = pool.submit(short(model=model, train=_data_that_ends_badly)).result(PATIENCE_SECONDS)
        assert isinstance(result.error, FaultError)
        until(lambda: (gc.collect(), models[0]())[1] is None)  # its worker's frames may be there a moment longer
        assert result.error.__traceback__ is not None, "the lines are still to be seen"


class FailsInTime(torch.optim.SGD):
    """Fails later than the pilots' copies step; counts by parameter, because a count of all steps cannot be cut."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                if self.state[p]["steps"] > 4:
                    fail()
        return super().step(closure)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    backward = staticmethod(fail)


def step_that_fails_in_backward(module, batch):
    return FailsInBackward.apply(functional.cross_entropy(module(batch[0]), batch[1]))


def ends_badly():
    """The last batch has classes that there are none of, which a loss finds when it is computed."""
    return [(X[:8], Y[:8]), (X[8:16], Y[8:16]), (X[16:], Y[16:]), (X[:8], Y[:8] + 4)]


BAD, UPDATES = {"train": ends_badly}, {"optimizer": partial(FailsInTime, lr=0.01), "epochs": 9}
CUT, FITS, FUSED = {"num_shards": 3}, {"num_shards": None}, {"fusion": "on", "fusion_size": 2}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("changes", "options", "place"),
    [
        ({"optimizer": fail}, {}, "building.py"),
        ({"loss": fail}, {}, "plan_cache.py"),
        ({"model": FailsLater, "epochs": 9}, {}, "eager_plan.py"),
        (BAD, CUT, "chain.py"),
        ({"validate": ends_badly}, CUT, "chain.py"),
        (BAD | {"accumulate": 2}, CUT, "chain.py"),
        (UPDATES, CUT, "training_batch.py"),
        (UPDATES, CUT | {"optimizer_placement": "host"}, "host_optimizer.py"),
        (BAD, FITS, "burst.py"),
        ({"loss": None, "step": step_that_fails_in_backward}, FITS, "direct.py"),
        (BAD, FUSED, "chain.py"),  # alone, after the group has failed
        (BAD | {"accumulate": 2}, FUSED, "chain.py"),
    ],
    ids=[
        *("begins", "captured", "runs", "backward", "evaluation", "grouped", "update", "update on the host"),
        *("own code", "own code's backward", "fused rounds", "fused steps"),
    ],
)
def test_an_error_that_is_kept_keeps_no_trial_alive(changes, options, place, monkeypatch):
    weights = []
    gather(monkeypatch, lambda count: count > 1)

    def model():
        module = changes.get("model", mlp)()
        weights.extend(map(weakref.ref, module.parameters()))
        return module

    tasks = [short(**changes | {"model": model, "seed": seed}) for seed in range(2)]
    with running(**options) as pool:
        stream, errors = pool.events(), []
        jobs = [pool.submit(one, events=stream) for one in tasks]
        while len(errors) < len(jobs):
            event = stream.get(PATIENCE_SECONDS)
            if isinstance(event, Reported):
                event.job.proceed()
            else:
                errors.append(event.result.error)
        del event, jobs, stream
    for error in errors:
        files = {Path(line.filename).name for line in traceback.extract_tb(error.__traceback__)}
        frame = error.__traceback__.tb_frame  # the traceback begins at the test's own code, if it has failed there
        while (frame := frame.f_back) is not None:
            files.add(Path(frame.f_code.co_filename).name)
        del frame
        assert place in files, "it has failed somewhere else, and the lines are still to be seen"
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is Trial and found.task in tasks]
    assert weights
    assert not [weight for weight in weights if weight() is not None]


@pytest.mark.parametrize("scheduler", [None, partial(StepLR, step_size=1)], ids=["none", "step"])
@pytest.mark.parametrize("budget_kib", [70, 90, 120])
def test_a_scheduler_hides_no_optimizer_state_from_the_budget(scheduler, budget_kib):
    """The pilot steps a stand-in; a scheduler has wrapped the real optimizer's step."""
    tracker = StorageTracker()
    x, y = torch.randn(2, 64), torch.randint(4, (2,))
    described = short(
        model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)),
        train=lambda: [(x, y)] * 4,
        scheduler=scheduler,
    )
    with running(device_memory=budget_kib * 1024, instrument=tracker) as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
        if result.error is not None:
            assert "raise device_memory to at least" in str(result.error), "refused before training, with a number"
            assert result.units_run == 0
        assert max(tracker.peak_bytes, default=0) <= budget_kib * 1024


class NewStateEveryStep(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(p)) + p.grad
                p.sub_(0.01 * state["momentum"])


def test_an_optimizer_that_makes_new_state_at_each_step_does_not_pile_it_up():
    with running() as pool:
        stream = pool.events()
        job = pool.submit(short(optimizer=NewStateEveryStep, epochs=4), events=stream)
        resident = []
        while isinstance(stream.get(PATIENCE_SECONDS), Reported):
            resident.append(pool.stats().devices["cpu:0"].resident_bytes)
            job.proceed()
        assert job.state == "completed"
        assert resident[1:] == resident[1:2] * 3


def test_one_module_in_two_trials_is_refused_or_exact():
    shared = mlp()
    with running(devices="cpu:2") as pool:
        jobs = [pool.submit(task(model=lambda: shared, epochs=20, seed=seed)) for seed in range(2)]
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    errors = [result.error for result in results if result.error is not None]
    assert all(isinstance(error, HydraTuneError) for error in errors), errors


def test_nothing_comes_after_a_jobs_last_event():
    with running() as pool:
        for _ in range(4):
            stream = pool.events()
            job = pool.submit(short(), events=stream)
            while job.state not in ("waiting", "failed"):
                pass
            job.cancel()
            events = []
            while not isinstance(event := stream.get(PATIENCE_SECONDS), Finished | Failed):
                events.append(event)
            assert event.result.status == "cancelled"
            assert stream.get(0.005) is None
            assert all(isinstance(event, Reported) for event in events)


def test_submitting_while_the_pool_shuts_down_ends_every_job():
    for _ in range(20):
        pool = HydraExecutor(devices="cpu:1")
        assert pool.width == 2
        jobs, begun = [], threading.Event()

        def submit(pool=pool, jobs=jobs, begun=begun):
            try:
                while True:
                    jobs.append(pool.submit(short()))
                    begun.set()
            except HydraTuneError:
                pass

        threads = [threading.Thread(target=submit, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert begun.wait(PATIENCE_SECONDS)
        pool.shutdown()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()
        assert {job.result(PATIENCE_SECONDS).status for job in jobs} <= {"cancelled", "completed"}


def test_batches_are_the_users_own_and_stay_as_they_were():
    before = X.clone(), Y.clone()
    with running() as pool:
        assert pool.submit(task()).result(PATIENCE_SECONDS).status == "completed"
    assert torch.equal(before[0], X)
    assert torch.equal(before[1], Y)


def test_an_interrupt_while_a_driver_prunes_loses_no_job(monkeypatch):
    """Ctrl-C may come at any moment of a driver's call; what the scheduler has decided is carried out all the same."""
    close = Trial.close

    def interrupted(self, *, keep):
        monkeypatch.setattr(Trial, "close", close)
        close(self, keep=keep)
        raise KeyboardInterrupt

    with running(devices="cpu:1", max_concurrent=1) as pool:
        stream = pool.events()
        job = pool.submit(short(), events=stream)
        behind = pool.submit(short(seed=1))
        assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
        monkeypatch.setattr(Trial, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.prune()
        assert job.result(PATIENCE_SECONDS).status == "failed"
        assert behind.result(PATIENCE_SECONDS).status == "completed"


def test_ctrl_c_inside_a_scheduling_decision_breaks_nothing(monkeypatch):
    handle = Scheduler.handle

    def pressing(self, *events):
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        return handle(self, *events)

    with running(devices="cpu:1", max_concurrent=2) as pool:
        stream = pool.events()
        job = pool.submit(short(), events=stream)
        assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
        monkeypatch.setattr(Scheduler, "handle", pressing)
        with pytest.raises(KeyboardInterrupt):
            pool.submit(short(seed=1), name="behind", events=stream)
        with pytest.raises(KeyboardInterrupt):
            job.prune()
        monkeypatch.undo()
        assert job.result(PATIENCE_SECONDS).status == "pruned"
        ended = []
        while len(ended) < 2:
            event = stream.get(PATIENCE_SECONDS)
            assert event is not None
            if isinstance(event, Reported):
                event.job.proceed()
            else:
                ended.append((event.job.name.split()[0], event.result.status))
        assert ended == [("job", "pruned"), ("behind", "completed")]


def test_an_interrupted_shutdown_can_be_repeated():
    entered, leave = threading.Event(), threading.Event()

    def held():
        entered.set()
        assert leave.wait(PATIENCE_SECONDS)
        return one_batch()

    pool = HydraExecutor(devices="cpu:1")
    job = pool.submit(short(train=held))
    assert entered.wait(PATIENCE_SECONDS)

    def press():
        until(lambda: pool._pool._core.is_closed)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        pool.shutdown()
    leave.set()
    pool.shutdown()
    assert job.result(0).status == "cancelled"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hydra-")]


def test_shutdown_from_a_trials_own_code_is_refused():
    with running(devices="cpu:1") as pool:
        (result,) = pool.run([short(model=lambda: (pool.shutdown(), mlp())[1])], on_error="return")
        assert "call it from another thread" in str(result.error)


@pytest.mark.parametrize(("batch", "kib"), [(512, 1200), (640, 1200), (512, 1400), (640, 1400)])
def test_an_evaluation_cut_finer_than_the_training_fits_or_is_refused_by_layer(batch, kib):
    """Parameters are loaded in the groups that the training made, whatever part of them an evaluated shard uses."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.ReLU())]
    wide = TensorDataset(torch.randn(batch, 128), torch.randn(batch, 128))
    narrow = torch.randn(8, 128)
    job = TrainTask(
        model=lambda: nn.Sequential(*copy.deepcopy(layers)),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        loss=functional.mse_loss,
        train=lambda: [(narrow, narrow)],
        validate=DataLoader(wide, batch_size=batch),
    )
    with running(devices="cpu:1", device_memory=f"{kib}KiB") as pool:
        (result,) = pool.run([job], on_error="return")
    if result.error is not None:
        assert "layer" in str(result.error)
        assert "raise device_memory to at least" in str(result.error)
    else:
        assert result.status == "completed"
