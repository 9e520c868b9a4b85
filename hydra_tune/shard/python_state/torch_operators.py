"""Operators of torch among the values that a step names.

A graph calls an operator and never looks inside, so what torch keeps in an operator's object is no value of the step. The
Python functions of an operator of `torch.library.custom_op` are the user's, and may read values.

`reachable_values.py` follows those functions, and `shard/capture/fingerprint.py` makes keys of operators. The module must not
run an operator.
"""

from typing import Any

from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

OPERATORS = (OpOverload, OpOverloadPacket, HigherOrderOperator, CustomOpDef)
"""Classes of operators."""
_Operator = OpOverload[..., Any] | OpOverloadPacket[..., Any] | HigherOrderOperator | CustomOpDef


def definition_of(operator: _Operator) -> CustomOpDef | None:
    """Return the Python functions behind an operator of `torch.library.custom_op`; None for other operators."""
    if isinstance(operator, CustomOpDef):
        return operator
    return OPDEFS.get(str(operator).replace(".", "::", 1).partition(".")[0])
