"""The policies: which job an idle device works on next.

A policy must not know devices' memory or blocks: it compares views of eligible jobs. Read `policy` first, the protocol,
then `lrtf`, the default, and `heap`, which most of the others are made of; `registry` has them by name, `early` binds a
choice before the unit ahead ends, and `lrtf_paper` is Sharded-LRTF as printed.
"""
