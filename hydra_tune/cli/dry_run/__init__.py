"""`hydra-tune check` and `hydra-tune plan`: a sweep file tried without training.

`plan` plans configurations one after the other, as if alone in the pool; `check` says whether the sweep would begin.
The package must train nothing, and create no study and no folder of the sweep. Read `planning` first, then `sampling`
(which configurations), `plan_table` and `plan_figures`; `checking` stands for itself.
"""
