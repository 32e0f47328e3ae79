"""What listeners hear of calls.

No public call makes a tool raise where another one listens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hmp
from hmp.core.observe import Call, Listener, listen


def test_a_listener_that_raises_leaves_the_call_to_those_after_it() -> None:
    heard: list[str] = []

    class Raises(Listener):
        unlisted = True

        def end(self, call: Call) -> None:
            raise ValueError("no more")

    class Hears(Listener):
        unlisted = True

        def end(self, call: Call) -> None:
            heard.append(call.op)

    x = torch.randn(2, 4)
    with hmp.casts("habana"), listen(Raises(), Hears()):
        for op in (torch.nn.functional.linear, torch.special.ndtr):
            with pytest.raises(ValueError, match="no more"):
                op(*([x, x] if op is torch.nn.functional.linear else [x]))
    assert heard[0] == "linear" and len(heard) == 2


@pytest.mark.parametrize("order", [1, -1])
def test_what_a_listener_of_aten_computes_itself_reaches_no_other_one(order: int) -> None:
    heard: list[str] = []

    class Hears(Listener):
        def aten(self, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            heard.append(func._schema.name)
            return run(*args, **kwargs)

    class Computes(Listener):
        def aten(self, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            torch.neg(args[0])
            return run(*args, **kwargs)

    first, second = (Hears(), Computes())[::order]
    x = torch.ones(2)
    with listen(first), listen(second):
        torch.exp(x)
    assert heard == ["aten::exp"]
