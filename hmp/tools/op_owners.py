"""Whose an ATen op is: the op of the lists that is in progress, its rule, the module and the user's line.

In backward those of the forward op that the autograd node belongs to.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any, Literal, NamedTuple

import torch

from ..core.active.state import current_state
from ..core.log import PACKAGES, caller
from ..core.observe import Call, Listener, here, modules
from ..core.policy.policy import Policy
from ..core.rules.op import OpUnderRule
from ..core.torch_private import RUN_BACKWARD
from ..core.torch_private import current_node as _node
from ..core.torch_private import sequence_number as _sequence_number

# It is between the line that calls backward() and the user's Python code that backward calls.
_ENGINE = RUN_BACKWARD[1]
# How many forward ops are remembered for their backward; beyond that the oldest are forgotten.
REMEMBERED = 500_000


Direction = Literal["forward", "backward"]  # the pass that an op belongs to


class Place(NamedTuple):
    """A place in the user's program.

    The path of the running nn.Module ("" outside of all), and file and line of the nearest code that is neither torch's nor hmp's.
    """

    module: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.module or '(no module)'} at {self.file}:{self.line}"


def place_here() -> Place:
    """Return the place of the calling code."""
    return Place(modules.path, *caller())


class Owner(NamedTuple):
    """What an ATen op belongs to.

    The op as lists spell it (the ATen op's name where no torch function was called), hmp's rule for it or None, the active policy, the
    place, and the devices that torch.autocast was enabled for, with its dtypes.
    """

    op: str
    ruled: OpUnderRule | None
    policy: Policy | None
    place: Place
    autocast: tuple[tuple[str, torch.dtype], ...] = ()


class AtenCall(NamedTuple):
    """One ATen op as it runs.

    Its owner, the direction, and in backward the autograd node, and whether it is the user's Python code that runs there.
    """

    owner: Owner
    direction: Direction
    node: Any
    by_user: bool = False


class OpOwners(Listener):
    """Knows the owner of the ATen op that is running.

    A forward op and its backward have the same sequence number of autograd's: the first ATen op after a node was made is that node's.
    """

    unlisted = inside = True

    def __init__(self) -> None:
        self._by_sequence: OrderedDict[int, Owner] = OrderedDict()
        self._owners: dict[Owner, Owner] = {}  # one object for each: most calls come from the same places

    def end(self, call: Call) -> None:
        """Nothing is done: that this is here has the calls noted."""

    def owned(self, aten: str) -> AtenCall:
        """Return the call of the ATen op of that name that is being dispatched in this thread."""
        node = _node()
        # a checkpoint's recomputation runs modules inside backward
        if node is None or (torch.is_grad_enabled() and modules.path):
            owner = self._owner(aten)
            number = _sequence_number() - 1
            # an op that makes no node finds the number of the last one, which has its owner
            if number not in self._by_sequence:
                self._by_sequence[number] = owner
                if len(self._by_sequence) > REMEMBERED:
                    self._by_sequence.popitem(last=False)
            return AtenCall(owner, "forward", None)
        owner = self._by_sequence.get(node._sequence_nr()) or Owner(aten, None, None, Place("", *caller()))
        users = _users_line_in_backward()
        if users is not None:
            # an op of theirs, and no part of the forward op whose backward runs it
            owner = self._owner(aten)._replace(place=Place(owner.place.module, *users))
        return AtenCall(owner, "backward", node, users is not None)

    def _owner(self, aten: str) -> Owner:
        # in a dispatch mode casts are off: the policy is that of the call
        call = here.call or here.function
        if call is None:
            owner = Owner(aten, None, current_state().policy, place_here())
        else:
            owner = Owner(call.op, call.ruled, call.here.policy, place_here(), tuple(call.autocast.items()))
        return self._owners.setdefault(owner, owner)


def _users_line_in_backward() -> tuple[str, int] | None:
    """Return the line of the user's Python code that backward is running (hooks, autograd.Function), None for torch's own nodes."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if frame.f_code.co_name == _ENGINE:
            return None
        if not file.startswith((*PACKAGES, "<")):
            return file, frame.f_lineno
        frame = frame.f_back
    return None
