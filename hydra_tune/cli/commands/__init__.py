"""The commands of `hydra-tune`: arguments, help texts and exit codes.

`cli/root.py` adds every command to the group. No module may import torch at its top, since `cli/root.py` imports all of
them, and help must not wait. Read `sweep` first. The work itself is in `hydra_tune.cli.run`, `hydra_tune.cli.dry_run`,
`hydra_tune.cli.inspect` and `hydra_tune.cli.starter`, and for `simulate`, `trace`, `devices` and `plot` outside of
`hydra_tune.cli`.
"""
