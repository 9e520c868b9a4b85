"""The running pool: carries out the scheduler's commands on real devices, one worker thread each.

`HydraExecutor` (`executor.py`) opens a pool. The package must not decide which unit runs when: `hydra_tune.schedule`
does. Read `pool` first, the interface for drivers, then `job`, which a driver holds, and `runtime/dispatcher`, where
events and commands meet. The packages: `runtime`, `devices`, `faults`, `checkpointing`, `fusion` (groups), `dry_run`
(forecasts without training), `views`; `stats` has the figures of a run.
"""
