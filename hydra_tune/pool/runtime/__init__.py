"""The threads of a pool: the dispatcher's state, one worker a device, and the preparer.

The package must not know how groups form: only `settings` sets fusion up. Read `dispatcher` first (events in, commands
out), then `job_state` and `worker`; `preparer` builds admitted jobs, `settings` checks the options of an executor
(`option_checks`, `cut_budget`), and `recorder` keeps the decisions and units.
"""
