"""`StepsOnDevice`: a planned step on the device of the unit that runs it, which may be another one for each unit."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from hydra_tune.devices.device import Device
from hydra_tune.errors import OutOfMemoryError
from hydra_tune.fusion.planned import PlannedStep
from hydra_tune.fusion.planner.rewrite import rewritten
from hydra_tune.fusion.planner.run import PlannedRun


class StepsOnDevice:
    """Runs a planned step.

    What is swapped has its host memory, and its streams, with the device on which it ran last. Between two units nothing of a
    step is left there, so that the next may run on another one.

    Args:
        planned: the step.
        arguments: gives the present arguments of each group's graph.
        draw: a group's side and the number of its noise -> random numbers.
    """

    def __init__(
        self,
        planned: PlannedStep,
        arguments: Sequence[Callable[[], Mapping[str, Tensor]]],
        draw: Callable[[int, int], Tensor],
    ) -> None:
        self.planned = planned
        self._arguments = [lambda _number, give=give: give() for give in arguments]
        self._draw = draw
        self._merged = rewritten(planned.part.schedule, planned.graphs)
        self._place: torch.device | None = None
        self._run: PlannedRun | None = None
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """That its steps have taken so far."""
        return self._seconds + (0.0 if self._run is None else self._run.seconds)

    def on(self, device: Device) -> None:
        """From now on it runs there.

        Args:
            device: of the unit, which has the lease of all that the step needs.

        Raises:
            OutOfMemoryError: the device is of another kind than the step was planned for.
        """
        if self._place != device.torch_device:
            self._check(device)
            self.close()
            self._place = device.torch_device

    @property
    def place(self) -> torch.device:
        """Where it runs."""
        assert self._place is not None, "a unit runs on a device"
        return self._place

    @property
    def run(self) -> PlannedRun:
        """What runs it there."""
        if self._run is None:
            graphs, schedule = self.planned.graphs, self.planned.part.schedule
            self._run = PlannedRun(schedule, graphs, self.place, self._arguments, self._draw, self._merged)
        return self._run

    def close(self) -> None:
        """End the copying, and give up its host memory."""
        run, self._run = self._run, None
        if run is None:
            return
        with suppress(RuntimeError):  # of a device that is lost nothing can be had, not even what it has taken
            self._seconds += run.seconds
        run.close()

    def _check(self, device: Device) -> None:
        planned = next(iter(self.planned.graphs[0].geometry.values())).device.type
        if device.torch_device.type != planned:
            raise OutOfMemoryError(
                f"steps of a group were planned for devices of the kind {planned!r}, and {device.name} is none; its trials go "
                "on in smaller groups",
                enough_bytes=None,
            )
