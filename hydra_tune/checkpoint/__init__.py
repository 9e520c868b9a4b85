"""Files that outlive a process: written whole or not at all, tensors as safetensors, nothing ever pickled."""
