"""What is shown of a running pool and a sweep; it reads plain snapshots and holds no part of the engine."""
