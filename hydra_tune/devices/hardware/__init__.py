"""The hardware: GPUs and hosts found, asked and measured, before any device is made.

The package must not hold memory for trials. Read `discovery` first, which makes the devices, then `survey` (for
`hydra-tune devices`), `nvml` and `caps`; `link` measures copies, `dram` and `heap` are the host's, and `libraries` says
what a GPU's libraries take.
"""
