"""Sub-arrays made by hand, with times and sizes that can be counted on fingers."""

from hydra_tune.planner.ir.step_profile import OperatorProfile, SubArrayProfile


def op(name, *, reads=(), makes=None, writes=(), seconds=1.0, workspace=0, is_random=False, repeated=()):
    """An operator that makes a storage of its own name, unless told otherwise."""
    return OperatorProfile(
        name=name,
        seconds=seconds,
        reads=tuple(reads),
        makes=(name,) if makes is None else tuple(makes),
        writes=tuple(writes),
        repeated_writes=tuple(repeated),
        workspace_bytes=workspace,
        is_random=is_random,
    )


def array(forward, backward, sizes, *, copy=None, name="hand", static=0, results=()):
    """A sub-array; `copy` has the seconds of each map's copy back, those to the host take none."""
    made = {storage for one in (*forward, *backward) for storage in one.makes}
    return SubArrayProfile(
        name=name,
        forward=tuple(forward),
        backward=tuple(backward),
        sizes={storage: sizes.get(storage, 0) for storage in made},
        static_bytes=static,
        out_seconds=dict.fromkeys(copy or {}, 0.0),
        in_seconds=dict(copy or {}),
        results=frozenset(results),
    )


def chain(length, *, num_bytes=4, copy=1.0, workspace=0, static=0):
    """z0 -> z1 -> ... -> loss, and a backward that uses them in reverse order."""
    forward = [op("z0")] + [op(f"z{i}", reads=[f"z{i - 1}"]) for i in range(1, length)]
    forward.append(op("loss", reads=[f"z{length - 1}"], workspace=workspace))
    backward = [op("g", reads=[f"z{length - 1}"])]
    backward += [
        op(f"g{i}", reads=[f"z{i}", "g" if i == length - 2 else f"g{i + 1}"]) for i in reversed(range(length - 1))
    ]
    sizes = {f"z{i}": num_bytes for i in range(length)}
    return array(forward, backward, sizes, copy=dict.fromkeys(sizes, copy), results=("loss",), static=static)


def paper():
    """The example of §4.2.2 and Figure 6: two sub-arrays, of which the first's Z1 to Z4 are to be swapped."""
    forward = [op("z1"), *(op(f"z{i}", reads=[f"z{i - 1}"]) for i in (2, 3, 4))]
    forward += [op("z5", reads=["z4"]), op("loss", reads=["z5"], workspace=7)]
    backward = [
        op("dw5", reads=["z4"], workspace=3),
        op("dz4"),
        op("dw4", reads=["z3"], workspace=5),
        op("dz3"),
        op("dw3", reads=["z2"], workspace=3),
        op("dz2"),
        op("dw2", reads=["z1"]),
    ]
    first = array(
        forward, backward, dict.fromkeys(["z1", "z2", "z3", "z4"], 4), copy=dict.fromkeys(["z1", "z2", "z3", "z4"], 2.0)
    )
    names = [f"y{i}" for i in range(1, 7)]
    other = [op(name, is_random=True) for name in names]
    second = array(other, [op("d", reads=names)], {"y1": 2, "y2": 2}, name="second")
    return first, second
