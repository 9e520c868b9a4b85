"""Devices that run shard units: a protocol, two real implementations, and the discovery of this machine's devices."""
