import pytest

from hydra_tune.observe.live.snapshot import DeviceView, SweepView, TrialView


@pytest.fixture
def view():
    """A sweep in mid-run, with a trial in each state."""
    params = {"lr": 0.00123456, "width": 128, "act": "relu"}
    return SweepView(
        name="vit",
        metric="val_acc",
        goal="maximize",
        status="running",
        num_planned=20,
        elapsed_seconds=92.0,
        units_run=900,
        units_saved=100,
        scheduler_seconds=0.2,
        study="vit",
        trials=(
            TrialView(number=0, state="completed", params=params, value=0.9, epoch=8, epochs=8, step=80, num_steps=80),
            TrialView(
                number=1, state="completed", params=params, value=0.97, epoch=8, epochs=8, step=80, num_steps=80,
                num_shards=4,
            ),
            TrialView(number=2, state="pruned", params=params, value=0.98, epoch=2, epochs=8, step=20, num_steps=80),
            TrialView(number=3, state="failed", params=params, epochs=8, error="RuntimeError: boom (train.py:6)"),
            TrialView(
                number=4, state="running", params=params, value=0.5, epoch=3, epochs=8, step=36, num_steps=80,
                remaining_seconds=75.0,
            ),
            TrialView(number=5, state="waiting", params=params, value=0.6, epoch=4, epochs=8, step=40, num_steps=80),
            TrialView(number=6, state="queued", params=params, epoch=0, epochs=8),
            TrialView(number=7, state="preparing"),
        ),
        devices=(
            DeviceView(
                name="cpu:0", busy_share=0.93, resident_bytes=3 << 20, peak_bytes=5 << 20, budget_bytes=5 << 20,
                bytes_in_by_kind={"parameters": 1 << 29, "activations": 1 << 29},
                bytes_out_by_kind={"parameters": 1 << 20}, bytes_across_by_kind={"activations": 1 << 21}, units=500,
            ),
            DeviceView(name="cpu:1", busy_share=0.5, resident_bytes=0, peak_bytes=4 << 20, budget_bytes=5 << 20),
        ),
    )  # fmt: skip
