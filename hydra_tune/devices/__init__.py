"""Devices: where shard units run. One protocol, two real kinds, and what is found on this machine."""
