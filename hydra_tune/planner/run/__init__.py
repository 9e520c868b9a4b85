"""Algorithm H: runs planned graphs on a device, with their copies beside the computing.

`DeviceStepRunner` (`fusion/runtime/planned_executor.py`) runs planned steps here, in the thread of a device's worker.
The package must not decide anything: all decisions are nodes of the graphs. Read `runner` first (prologue, steps in
turn, epilogue), then `interpreter`, which runs a graph node by node, and `copy_engine`, a thread on a CPU and a stream
in each direction on a GPU; `filling` puts values into a node's arguments, and `step_timer` times a step where it runs.
"""
