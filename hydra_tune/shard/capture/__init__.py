"""From a model and its step to one flat graph of aten operators, captured by `torch.export`.

The package must not know budgets or cuts. Read `step_module` and `step_capture` first, then `batch` (the signature for
which a capture is valid), `guards` and `value_replay` (questions of a step's Python about values), and `precision`.
`capture_lock` keeps computations out during a capture, and `fingerprint` decides whether two trials have the same
architecture. `own_functions` and `opaque_call` keep the user's own autograd Functions, `gpu_code` and `graph_device`
stand for GPUs, `meta_models` makes copies without bytes, and `export_output` silences `torch.export`.
"""
