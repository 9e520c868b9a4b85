"""Where every byte of every trial is: blocks, the ledger of each device, and the pager that loads and spills.

Knows devices; knows nothing of models, units or trials.
"""
