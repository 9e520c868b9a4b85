"""The hardware: finds the machine's GPUs and cores, asks for their memory, and measures their copies.

The package must not hold memory for trials. Read `discovery` first, which opens the devices, then `survey` (for
`hydra-tune devices`), `nvml` and `caps`. `link` measures copies and the host's memory, `libraries` measures the memory that
a GPU's libraries take, and `heap` concerns the host's free memory.
"""
