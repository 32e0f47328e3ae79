"""The name by which a call's function was loaded, on Python 3.10, whose instructions have no position in the source."""

from __future__ import annotations

import dis
import types

# what lies over a call's function on the stack, besides its arguments
_ABOVE_FUNCTION = {"CALL_FUNCTION": 0, "CALL_METHOD": 0, "CALL_FUNCTION_KW": 1}
# Instructions that go on to the next one and put at most one value on the stack: what was below it before is below it afterwards.
# LOAD_METHOD puts two there, which nothing but CALL_METHOD takes: counted here as one, the function, under which the other lies.
_ONE_VALUE = (
    "LOAD_", "CALL_", "BUILD_", "BINARY_", "UNARY_", "COMPARE_OP", "IS_OP", "CONTAINS_OP", "LIST_", "SET_", "DICT_", "FORMAT_VALUE",
    "GET_ITER", "MAKE_FUNCTION", "EXTENDED_ARG",
)  # fmt: skip


def called_name(code: types.CodeType, at: int) -> str | None:
    """Return `recv` where the instruction at `at` is the call of `a.b.recv(c.d)` or of `recv()`; None where that is not plain."""
    before = [i for i in dis.get_instructions(code) if i.offset <= at]
    call = before.pop() if before else None  # before a function's first instruction `at` is -1
    if call is None or call.arg is None:
        return None
    if call.opname == "CALL_FUNCTION_EX":
        depth = 2 + (call.arg & 1)
    elif call.opname in _ABOVE_FUNCTION:
        depth = 1 + call.arg + _ABOVE_FUNCTION[call.opname]
    else:
        return None
    # backwards to the instruction behind which the function is on top of the stack
    after = call
    for instruction in reversed(before):
        if after.is_jump_target or not instruction.opname.startswith(_ONE_VALUE):
            return None
        if depth == 1:
            return str(instruction.argval) if instruction.opname.startswith("LOAD_") else None
        depth -= dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        after = instruction
    return None
