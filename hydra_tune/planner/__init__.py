"""Compiler of μ-TWO (Purandare et al., MLSys 2023): how a device's trials are fused, swapped and recomputed.

Note: words. A *sub-array* is a number of trials fused into a single model. Its step consists of a forward graph FW and
a backward graph BW, and BW includes the optimizer's update. A sub-array runs alone, or two run as a pair. A *segment*
merges the backward of one sub-array with the forward of the other: `[BW_0, FW_1]` and `[BW_1, FW_0]` alternate, and the
two halves of a segment are independent of each other. A *feature map* is a storage that FW makes and BW uses. A plan
keeps, *swaps* or *recomputes* each feature map. A swap copies the map to the host after its last use in FW, and back
before its first use in BW. A recomputation deletes the map after its last use in FW, and computes the map again before
its first use in BW.

Note: storages. The planner plans storages, not tensors, because BW often uses views, and several views may share a
storage. A swap copies the raw bytes of a storage, and the views are rebuilt on the bytes that come back.

Note: passes. Each pass is a file of its own. The file names its algorithm in the paper's appendix (A to H), or says
that the paper has no such pass, and lists every departure from the paper. A pass leaves its inputs as they are; only
the updates of Algorithms E and F change a search's own copies in place. `planner/ir/step_profile.py` holds the data
that all passes read. The passes from there to the merged graphs compute on plain Python data, not on tensors.

`StepPlanner` (`fusion/runtime/step_planner.py`) traces, profiles and plans the steps of fused groups here, and
`DeviceStepRunner` (`fusion/runtime/planned_executor.py`) runs the planned steps. `pool/dry_run/step_profiles.py` asks
for the figures of `hydra-tune plan --profile`. The package must not know groups, jobs or the pool. Read `ir` first, the
data of all passes, then `trace` and `profile` (from a step to the data), `passes` and `cost` (decisions and
predictions), `search` (the fastest plan), and `run`.
"""
