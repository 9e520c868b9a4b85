"""A pool in a process under a supervisor, which restarts the pool after a crash. Knows neither torch nor trials."""
