"""Display of a running pool and a sweep; the package reads plain snapshots and holds no part of the engine."""
