"""Devices that run shard units: a protocol, two real implementations, and the discovery of this machine's devices.

The package must not know blocks, models or trials: a device copies tensors and runs functions. Read `device` (the protocol)
first, then `copying` (the copy threads, each a `single_thread`), `cpu` and `cuda`; `own_generator` and `positions` belong
to random numbers, `stopwatch` measures work, `cuda_graphs` records GPU work, and `weightless` stands in for a device in a
forecast. `hardware` finds and measures the machine's devices.
"""
