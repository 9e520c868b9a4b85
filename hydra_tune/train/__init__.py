"""The course of one trial over time: drawing batches, epochs, evaluation, schedulers, reports."""
