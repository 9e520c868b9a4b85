"""Files that outlive a process: written whole or not at all, tensors as safetensors, nothing ever pickled.

The package must not know models, the pool or a tuner: content comes as tensors and plain values. Read `files` first
(atomic writes), then `tensors` and `values` (the formats), `saved` (a checkpoint in memory) and `folder` (a trial's
generations of checkpoints). `best` keeps the weights of the best trials; `sweep_folder`, `lock` and `alive` tell
processes apart; `every` says how often to save, `naming` names folders, and `direct` writes past the page cache.
"""
