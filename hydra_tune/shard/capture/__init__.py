"""From a model and its step to one flat graph of aten operators, captured by `torch.export`.

The package must not know budgets or cuts. Read `step_module` and `step_capture` first, then `batch` (the signature that
a capture is valid for), `guards` and `value_replay` (what a step's Python asks of values), and `precision`;
`capture_lock` keeps captures alone, and `fingerprint` says whether two trials have one architecture.
"""
