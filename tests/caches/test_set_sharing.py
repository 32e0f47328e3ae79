"""hmp.set_sharing(): from which size on products share the cast of a tensor that needs a gradient."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import hmp
from hmp.caches import activation_cache

Tensor = torch.Tensor
ROWS, WIDTH = 256, 128  # 128 KiB in float32


@pytest.fixture(autouse=True)
def default_sharing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(activation_cache, "WORTH_A_SLOW_MARK", 0)  # whoever runs the tests may have threads
    yield
    hmp.set_sharing(None)


def kept_and_gradients(rows: int = ROWS) -> tuple[int, list[Tensor]]:
    """The bytes of low-precision copies of the activation that three products of it keep for backward, and all gradients."""
    torch.manual_seed(0)
    x = torch.randn(rows, WIDTH, requires_grad=True)
    weights = [torch.nn.Parameter(torch.randn(8, WIDTH)) for _ in range(3)]
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype is torch.bfloat16 and rows in tensor.shape and tensor.numel() == rows * WIDTH:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with hmp.casts("torch-cpu"):
        activation = x * 1
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results = [F.linear(activation, weight) for weight in weights]
        sum(result.float().pow(2).sum() for result in results).backward()
    return sum(kept.values()), [x.grad, *(weight.grad for weight in weights)]


def by_hand(rows: int = ROWS) -> list[Tensor]:
    """The same gradients in plain torch, each product with casts of its own."""
    torch.manual_seed(0)
    x = torch.randn(rows, WIDTH, requires_grad=True)
    weights = [torch.nn.Parameter(torch.randn(8, WIDTH)) for _ in range(3)]
    activation = x * 1
    results = [F.linear(activation.bfloat16(), weight.bfloat16()) for weight in weights]
    sum(result.float().pow(2).sum() for result in results).backward()
    return [x.grad, *(weight.grad for weight in weights)]


@pytest.mark.parametrize(
    ("least", "rows", "copies"),
    [
        (None, ROWS // 8, 3),  # 16 KiB: below the default, which is 32 KiB
        (None, ROWS // 4, 1),
        (0, ROWS, 1),
        (4 * ROWS * WIDTH, ROWS, 1),  # exactly as many bytes
        (4 * ROWS * WIDTH + 1, ROWS, 3),
    ],
)
def test_the_size_decides_whether_three_products_keep_one_copy(least: int | None, rows: int, copies: int) -> None:
    hmp.set_sharing(least)
    kept, gradients = kept_and_gradients(rows)
    assert kept == copies * 2 * rows * WIDTH
    for got, wanted in zip(gradients, by_hand(rows), strict=True):
        assert torch.equal(got, wanted)


def test_weights_of_accumulated_gradients_follow_it_too() -> None:
    def hits() -> int:
        weight, x = torch.nn.Parameter(torch.randn(WIDTH, ROWS)), torch.randn(4, ROWS)
        before = hmp.cache_info().hits
        for _ in range(4):
            F.linear(x, weight).sum().backward()
        return hmp.cache_info().hits - before

    with hmp.convert(policy="torch-cpu"):
        assert hits() > 0
        hmp.set_sharing(4 * WIDTH * ROWS + 1)
        assert hits() == 0


@pytest.mark.parametrize(("rows", "hits"), [(2**20 // (4 * WIDTH), 2), (2**20 // (4 * WIDTH) - 1, 0)])
def test_without_a_gradient_nothing_changes(rows: int, hits: int) -> None:
    """There a use costs no node, and copies are kept from 1 MiB on, where that takes less time than another cast."""
    hmp.set_sharing(2**30)
    weights = [torch.randn(8, WIDTH) for _ in range(3)]
    with hmp.convert(policy="torch-cpu"), torch.no_grad():
        x = torch.randn(rows, WIDTH) * 1
        before = hmp.cache_info().hits
        for weight in weights:
            F.linear(x, weight)
        assert hmp.cache_info().hits == before + hits


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "1MiB"])
def test_what_is_no_number_of_bytes_is_an_error(wrong: object) -> None:
    with pytest.raises(hmp.HmpError) as caught:
        hmp.set_sharing(wrong)  # type: ignore[arg-type]
    assert str(caught.value) == f"set_sharing() takes a number of bytes, 0 or more, or None for the default; got {wrong!r}"
