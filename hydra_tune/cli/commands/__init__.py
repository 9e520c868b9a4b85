"""The commands of `hydra-tune`, one file each: arguments and help texts.

They must do no work of their own, and `simulate`, `trace` and `devices` must not import torch before they need it. Read
`sweep` first, the largest; what happens then is in `hydra_tune.cli.run` and `hydra_tune.cli.dry_run`.
"""
