"""What Python 3.10 calls is found in its instructions: asked by the called function itself, of the frame that is just calling it."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from hmp.caches.call_instructions import called_name

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 11), reason="an instruction says where in the source it stands")


def recv(*args: Any, **kwargs: Any) -> str | None:
    frame = sys._getframe(1)
    return called_name(frame.f_code, frame.f_lasti)


def test_called_name_is_that_of_the_function_that_is_called() -> None:
    a, key, x = types.SimpleNamespace(recv=recv, fill=recv, get=lambda name: recv), {"a": 1}, [1, 2]
    by_name = (
        recv(), recv(1, x[0], a.fill), recv(x[0] + 1, -x[0], x is a, 1 in x, x < [1], key=f"{x}"), recv(*x), recv(*x, **key),
        recv(len(x), *x, k=2), a.recv(a.get("fill")(len(x)), {1: [x, *x]}, {2}), a.recv(lambda: x, key=x[0:1]), a.recv(*x, **key),
        a.recv([-i for i in x]),
    )  # fmt: skip
    assert by_name == ("recv",) * len(by_name)
    assert (a.fill(a.recv), a.fill(*x, key=a.recv)) == ("fill", "fill")
    # found by what is no name, or by a way that depends on a value
    others = (a.get("recv")(1), [a.recv][0](x), (x and a.recv)(1), (a.recv if x else a.fill)(), a.recv(1 if x else 2), (lambda: recv)()(1))
    assert others == (None,) * len(others)


def test_called_name_of_what_calls_nothing() -> None:
    code = (lambda: recv).__code__
    assert [called_name(code, at) for at in (-1, 0, 2)] == [None] * 3
