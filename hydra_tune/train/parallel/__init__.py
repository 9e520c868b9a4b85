"""One trial on several devices: batches of one optimizer step side by side.

The package must not choose devices: the scheduler does. Read `parallel_step` first, then `parallel_batch` (a batch that
is drawn before those ahead of it have run), and the ways: `grouped_data_parallel`, `pipeline_parallel` with
`ordered_queues`, and `batch_grouping` on one device; `cost_model` compares them and `step_strategy` chooses for each
step.
"""
