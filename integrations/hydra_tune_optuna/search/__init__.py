"""The loop between a study and a pool, and the parts that resume the loop after a crash.

`pool_study.py` and `sweep.py` import the package. Read `driver` first (ask, build, submit, report, tell), then
`resume_study` and `resume_sweep`; `values` converts reports, `shutdown` ends a search early, `sampler_state` notes where a
sampler is, `checkpoint_gc` removes checkpoints, `heartbeat` keeps trials alive, and `pruner_checks` chooses the order of
trials and warns beforehand.
"""
