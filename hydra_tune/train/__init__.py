"""What one trial does over time: drawing batches, epochs, evaluation, schedulers, reports."""
