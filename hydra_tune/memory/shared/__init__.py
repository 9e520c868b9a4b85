"""Tensors that many trials read: one copy of the bytes on the host, and one on each device.

The package must not know models: a shared tensor is bytes in a file, and a trial is an owner of handles. Read `shared_file`
first (the file without a name, and who has written to a mapping), then `shared_block` (the copies on devices, and the
handles that lead to them).
"""
