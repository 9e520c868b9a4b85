"""Devices that run shard units: a protocol, two real implementations, and the discovery of this machine's devices.

The package must not know blocks, models or trials: a device copies tensors and runs functions. Read `device` (the protocol)
first, then `copying` (the copy threads), `cpu` and `cuda`; `own_generator` and `positions` belong to random numbers,
`cuda_graphs` and `stopwatch` to GPU work, and `weightless` stands in for a device in a forecast. `hardware` finds and
measures the machine's devices.
"""
