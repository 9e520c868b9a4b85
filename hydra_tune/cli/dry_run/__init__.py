"""`hydra-tune plan`: configurations of a sweep file planned one after the other, as if alone in the pool.

The package must train nothing. Read `planning` first, then `sampling` (which configurations), `plan_table` and
`plan_figures`.
"""
