"""The Python values that a step may read besides its batch and its model's tensors, and what has become of them.

The package must not import captures, plans or trials; of a trial, `state_guard` knows the task and the model. Read
`state_guard` first, which says what is guarded and why. Then `reachable_values` (the walk from the user's functions),
`code_walk` (the part of the walk that follows code and attributes), `value_holder` (a place, its values, and how they are
put back), `model_snapshot` (a quick look at all modules), `tensor_contents` (the same for tensors and arrays),
`cached_results` (results that functions keep), `opened_files` (files that a step reads), `number_inputs` (numbers that a
graph takes as inputs), `copied_functions` (functions that a copy of a model holds), `torch_operators` (operators of torch)
and `code_names` (names in code, and which code is installed).
"""
