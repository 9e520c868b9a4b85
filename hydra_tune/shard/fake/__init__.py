"""Tensors that have sizes and no bytes, for rehearsals.

The package must not compute numbers. Read `fake_world` first, where code that reads values can run as well, then
`fake_memo`, which remembers what a unit makes because steps of a rehearsal repeat.
"""
