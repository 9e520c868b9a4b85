"""`DeviceStepRunner`: run a planned step on the device of the current unit, which may change from unit to unit.

`GroupStepRunner` (`planned_unit.py`) and `PairStepRunner` (`paired_unit.py`) are the runners for the planned steps of a
group and of a pair; `PlannedRound` (`planned_unit.py`) and `PairRound` (`paired_unit.py`) run the steps, and
`StepPlanAutotuner` (`plan_autotuner.py`) keeps a runner for each way, and closes each runner. The runner must not decide on
swaps: the schedule of the `PlannedStep` does.

Note: only the thread of the running unit may call `on` and `segment`, inside the unit's lease. Others may call `close` only
while no unit runs.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from hydra_tune.devices.copying import SimulatedLink
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.device import Device
from hydra_tune.errors import OutOfMemoryError
from hydra_tune.fusion.runtime.step_planner import PlannedStep
from hydra_tune.planner.ir.plan_state import ScheduleSegment
from hydra_tune.planner.passes.graph_rewrite import rewritten
from hydra_tune.planner.run.runner import MergedGraphRunner


class DeviceStepRunner:
    """Runs a planned step.

    Host memory and streams for swapping belong to the device of the last unit. Between two units nothing of a step
    stays on the device, so the next unit may run elsewhere.

    Args:
        arguments: for every group's graph, returns the present arguments.
        draw: takes a group's side and a noise number; returns random numbers.
    """

    def __init__(
        self,
        planned: PlannedStep,
        arguments: Sequence[Callable[[], Mapping[str, Tensor]]],
        draw: Callable[[int, int], Tensor],
    ) -> None:
        self.planned = planned
        # Bound as a default, because a closure would see only the last `give`.
        self._arguments = [lambda _number, give=give: give() for give in arguments]
        self._draw = draw
        # Merged graphs belong to no device, so all devices share them.
        self._merged = rewritten(planned.part.schedule, planned.graphs)
        self._place: torch.device | None = None
        self._link: SimulatedLink | None = None
        self._run: MergedGraphRunner | None = None
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Total seconds that the steps have taken."""
        return self._seconds + (0.0 if self._run is None else self._run.seconds)

    def on(self, device: Device) -> None:
        """Run the steps on the given device from now on.

        Args:
            device: the unit's device; the unit's lease covers everything that the step needs.

        Raises:
            OutOfMemoryError: the step was planned for another kind of device.
        """
        # CPU devices are a single device to torch, and each has its own link.
        link = device.link if isinstance(device, CpuDevice) else None
        if self._place != device.torch_device or self._link is not link:
            self._check(device)
            self.close()
            self._place, self._link = device.torch_device, link

    @property
    def place(self) -> torch.device:
        """The torch device of the steps."""
        assert self._place is not None, "a unit runs on a device"
        return self._place

    def segment(self, segment: ScheduleSegment) -> list[float]:
        """Run a merged graph; return the losses of the forward's members, for which the call waits on a GPU."""
        if self._run is None:
            graphs, schedule = self.planned.graphs, self.planned.part.schedule
            self._run = MergedGraphRunner(
                schedule, graphs, self.place, self._arguments, self._draw, self._merged, self._link
            )
        loss_tensors: list[Tensor] = []
        self._run.segment(segment, lambda _side, _number, losses: loss_tensors.append(losses))
        losses: list[float] = loss_tensors[0].tolist() if loss_tensors else []
        return losses

    def close(self) -> None:
        """Stop copying, and release host memory."""
        run, self._run = self._run, None
        if run is None:
            return
        with suppress(RuntimeError):  # a lost device answers nothing, not even its event times
            self._seconds += run.seconds
        run.close()

    def _check(self, device: Device) -> None:
        planned = next(iter(self.planned.graphs[0].geometry.values())).device.type
        if device.torch_device.type != planned:
            raise OutOfMemoryError(
                f"a group's steps were planned for devices of the kind {planned!r}, and {device.name} is of another kind; its "
                "trials continue in smaller groups",
                enough_bytes=None,
            )
