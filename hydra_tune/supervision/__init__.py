"""A process that runs a pool under one that watches it, and begins it again after a crash. Knows neither torch nor trials."""
