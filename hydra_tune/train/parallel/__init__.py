"""One trial on several devices: batches of one optimizer step side by side.

The scheduler chooses the devices of a step; the package must use no others. Read `parallel_step` first, then `parallel_batch`
(a batch drawn before earlier batches have run), and the ways: `grouped_data_parallel`, `pipeline_parallel` with
`ordered_queues`, and `batch_grouping` on one device. `cost_model` compares the ways, and `step_strategy` chooses a way for each
step.
"""
