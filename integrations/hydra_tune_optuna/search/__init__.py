"""The loop between a study and a pool, and the parts that resume the loop after a crash.

The package must not be imported by name from outside: `PoolStudy` and `run_sweep` are its users. Read `driver` first
(ask, build, submit, report, tell), then `resume_study` and `resume_sweep`; `shutdown` ends a search early,
`sampler_state` notes where a sampler is, `checkpoint_gc` removes checkpoints, `heartbeat` keeps trials alive, and
`pruner_checks` warns beforehand.
"""
