"""A machine that runs instructions on names: each value is told by what it was computed from. Shares nothing with the planner
but the instructions, so that it finds what `verify.py` and the memory simulator would both miss."""

from dataclasses import dataclass, field

from hydra_tune.planner.ir.lowering import lowered
from hydra_tune.planner.ir.plan_state import ScheduleSegment, SubArraySchedule
from hydra_tune.planner.ir.step_profile import SubArrayProfile


@dataclass
class Machine:
    """Both sub-arrays' storages, on the device and on the host; parameters are there all the time."""

    schedule: SubArraySchedule
    device: dict = field(default_factory=dict)
    host: dict = field(default_factory=dict)
    parameters: dict = field(default_factory=dict)
    draws: dict = field(default_factory=dict)
    seen: dict = field(default_factory=dict)  # side -> what each operator has computed, in order
    peaks: dict = field(default_factory=dict)

    def run(self, segment: ScheduleSegment) -> None:
        """One segment, and the most bytes that were there."""
        peak = self._bytes()
        for one in lowered(self.schedule, segment):
            side = one.side
            array = self.schedule.arrays[side]
            for name in one.makes:
                assert (side, name) not in self.device
                self.device[side, name] = None
            peak = max(peak, self._bytes() + one.workspace_bytes)
            if one.kind == "run":
                self._compute(side, (array.backward if one.is_backward else array.forward)[one.rank])
            elif one.kind == "recompute":
                self._compute_again(side, array.forward[one.rank], one.storage)
            elif one.kind == "offload":
                self.host[side, one.storage] = self.device[side, one.storage]
            elif one.kind == "arrive":
                self.device[side, one.storage] = self.host[side, one.storage]
            for name in one.frees:
                del self.device[side, name]
        self.host = {key: value for key, value in self.host.items() if key[0] != segment.backward}
        self.peaks[segment] = max(peak, self.peaks.get(segment, 0))

    def _bytes(self) -> int:
        sizes = [array.sizes for array in self.schedule.arrays]
        return self.schedule.static_bytes + sum(sizes[s][name.partition("@")[0]] for s, name in self.device)

    def _value(self, side, name):
        if name.partition("@")[0] not in self.schedule.arrays[side].sizes:
            return self.parameters.setdefault((side, name), (side, name))
        value = self.device[side, name]
        assert value is not None, f"{name} is not there yet"
        return value

    def _compute(self, side, op):
        made = self._made(side, op, lambda name: self._value(side, name))
        for name in (*op.makes, *op.writes):
            if name in op.makes or name in self.schedule.arrays[side].sizes:
                self.device[side, name] = hash((made, name))
            else:
                self.parameters[side, name] = hash((made, name, self._value(side, name)))
        self.seen.setdefault(side, []).append((op.name, made))

    def _compute_again(self, side, op, target):
        assert not op.is_random

        def place(name):
            return f"{name}@{target}" if (side, f"{name}@{target}") in self.device else name

        made = self._made(side, op, lambda name: self._value(side, place(name)))
        for name in (*op.makes, *op.writes):
            if name in op.makes or name not in op.repeated_writes:
                assert name == target or place(name) != name, f"{name}, which others see, is overwritten again"
                self.device[side, place(name) if name != target else name] = hash((made, name))

    def _made(self, side, op, value):
        """What an operator makes; running statistics that it updates are not in it."""
        reads = [name for name in op.reads if name not in op.makes and name not in op.repeated_writes]
        drawn = None
        if op.is_random:
            drawn = self.draws[side] = self.draws.get(side, 0) + 1
        return hash((op.name, drawn, tuple(map(value, reads))))


def alone(array: SubArrayProfile, side: int, steps: int) -> tuple[list, dict]:
    """What the operators of a sub-array compute where nothing is moved: in order, and the parameters afterwards."""
    found, parameters, draws = [], {}, 0
    for _ in range(steps):
        values: dict = {}
        for op in (*array.forward, *array.backward):
            reads = [name for name in op.reads if name not in op.makes and name not in op.repeated_writes]
            draws += op.is_random
            given = [values[n] if n in array.sizes else parameters.setdefault((side, n), (side, n)) for n in reads]
            made = hash((op.name, draws if op.is_random else None, tuple(given)))
            for name in (*op.makes, *op.writes):
                if name in array.sizes:
                    values[name] = hash((made, name))
                else:
                    parameters[side, name] = hash((made, name, parameters.setdefault((side, name), (side, name))))
            found.append((op.name, made))
    return found, parameters
