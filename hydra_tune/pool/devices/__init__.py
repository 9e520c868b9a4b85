"""Care for a pool's devices beside running units: lending, reservations, failures and memory.

The package must not choose units or advance a trial. Read `idle_devices` and `device_reservation` first (devices lent,
and taken for a while), then `oom_retry` and `device_failure`; `next_units` predicts the blocks to send ahead,
`host_admission` grants host memory, `library_memory` measures the memory that a GPU's libraries take, and `utilization`
how busy devices are.
"""
