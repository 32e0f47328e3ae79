"""Kernels that write by address clear the mark before they do. The pretend device has one (tests/device), and CUDA all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hmp.caches import writes_by_address


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors that were asked about while the kernels are watched: the CPU's ask for write access themselves."""
    found: list[torch.Tensor] = []
    monkeypatch.setattr(writes_by_address, "_is_marked", lambda tensor: bool(found.append(tensor)))
    return found


def _scaled(x: torch.Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_([x], torch.zeros(1), torch.ones(1))


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "foreach": lambda x: torch._foreach_mul_([x], [x]),
    "foreach, by the op": lambda x: torch.ops.aten._foreach_add_.Scalar([x], 1.0),
    "foreach, into out": lambda x: torch.ops.aten._foreach_exp.out([x], out=[x]),
    "unscaling": _scaled,
    "SGD, fused": lambda x: torch.optim.SGD([x], lr=1.0, fused=True).step(),
    "from C++": lambda x: torch._C._get_operation_overload("aten::_foreach_zero_", "")[0]([x]),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_asked_about_while_watched_and_not_after(name: str, seen: list[torch.Tensor]) -> None:
    weight, twin = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    weight.grad, twin.grad = torch.ones(3), torch.ones(3)
    with torch.no_grad():
        WRITES[name](twin)
        assert not seen
        with writes_by_address.watched():
            WRITES[name](weight)
        assert any(each.data_ptr() == weight.data_ptr() for each in seen)
        assert torch.equal(weight, twin)
        seen.clear()
        WRITES[name](weight)
    assert not seen
