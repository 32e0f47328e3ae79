"""R18: memory of a weight whose copy is kept may be resized from Python, as offloaders do; torch's own mark would not survive it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

import hmp

SIZE = 64


def free_and_fill(weight: torch.Tensor) -> None:
    nbytes = weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(nbytes)


def typed(weight: torch.Tensor) -> None:
    weight._typed_storage()._resize_(0)
    weight._typed_storage()._resize_(SIZE * SIZE)


WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "storage": free_and_fill,
    "typed storage": typed,
    "resize_": lambda weight: weight.resize_(SIZE + 1, SIZE),
    "resize_as_": lambda weight: weight.resize_as_(torch.empty(SIZE + 1, SIZE)),
    "through a view": lambda weight: weight.detach().view(-1).resize_(2 * SIZE * SIZE),
}


@torch.no_grad()
def test_r18_memory_that_is_resized_takes_writes_and_gives_no_old_copy():
    for name, resize in WAYS.items():
        weight, x = torch.nn.Parameter(torch.randn(SIZE, SIZE), requires_grad=False), torch.randn(2, SIZE).bfloat16()
        with hmp.casts(hmp.Policy(bf16={"linear"})):
            hmp.clear_cache()
            for _ in range(3):
                F.linear(x, weight)
            assert hmp.cache_info().entries == 1
            resize(weight)
            values = torch.randn(weight.shape)
            weight.copy_(values)
            assert torch.equal(F.linear(x, weight), F.linear(x, values.bfloat16())), name


def test_r19_the_methods_that_resize_equal_torchs_own():
    own = torch.Tensor.resize_, torch.Tensor.resize_as_
    with hmp.casts(hmp.Policy(bf16={"linear"})):
        assert (torch.Tensor.resize_, torch.Tensor.resize_as_) == own
        assert torch.overrides.is_tensor_method_or_property(torch.Tensor.resize_)
        assert torch.ones(2).as_subclass(torch.nn.Buffer).resize_(3).shape == (3,)
        assert torch.empty(2, device="meta").resize_(3).shape == (3,)
        torch.eye(2).to_sparse().clone().resize_as_(torch.eye(3).to_sparse())
