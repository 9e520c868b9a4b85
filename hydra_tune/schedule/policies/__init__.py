"""The policies: which job an idle device works on next.

A policy must not know devices' memory or blocks: it compares views of eligible jobs. Read `policy` first, the protocol,
then `lrtf`, the default, and `heap`, the base of most other policies; `registry` has the policies by name, `early`
binds a device's next job before the present unit ends, and `lrtf_paper` is Sharded-LRTF as printed.
"""
