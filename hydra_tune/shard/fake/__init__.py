"""Tensors that have sizes and no bytes, for rehearsals and pilots.

The package must not compute numbers. Read `fake_world` first (a mode in which code that reads values can run as well),
then `fake_memo`, which runs each unit once and repeats the geometry of its results, then `geometry_memo`, which does the
same for single operators.
"""
