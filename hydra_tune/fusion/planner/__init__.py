"""The compiler of μ-TWO (Purandare et al., MLSys 2023): how a device's trials are fused, and what it swaps and recomputes.

Note: words. A *sub-array* is a number of trials fused into one; its step is a forward graph FW and a backward graph
BW, which has the optimizer's update in it. Sub-arrays are planned and run in pairs: a *segment* is the backward of
one merged with the forward of the other, `[BW_0, FW_1]` and `[BW_1, FW_0]` in turn, which need nothing of each other.
A *feature map* is a storage that FW makes and BW uses. Each is kept, *swapped* (copied to the host after its last use
in FW, and back before its first in BW) or *recomputed* (deleted after its last use in FW, computed again before its
first in BW).

Note: storages. What is planned are storages, not tensors: what BW uses are views as often as not, and several of one
storage. A swapped storage is copied as bytes, and its views are made anew of the bytes that come back.

Note: passes. Each is a file of its own, which names its algorithm in the paper's appendix (A to H) and where it
departs from it; none changes what it is given. `arrays.py` has what all of them read; from there to the merged graphs
nothing needs torch.
"""
