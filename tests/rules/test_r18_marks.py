"""R18: which memory a copy may be kept of, what a write to it does, and that no op of torch minds the mark that is set on it.

What every writer and every holder does, and in what order, P3 draws (tests/properties).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import hmp
from memory_writers import COLLECTIVES, WRITERS, OneProcess

SIDE = 512  # 1 MiB of float32, of which a copy is kept whatever it is
POLICY = hmp.Policy("low", bf16={"linear", "mm"})
ONES = torch.ones(1, SIDE)


def fresh() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(4, SIDE, generator=torch.Generator().manual_seed(0)))


def entries(weight: torch.Tensor) -> int:
    """How many copies are kept after two products."""
    with torch.no_grad():
        F.linear(ONES, weight)
        F.linear(ONES, weight)
    return hmp.cache_info().entries


def test_r18_a_write_to_memory_of_which_a_copy_is_kept_moves_nothing() -> None:
    moved, unkept = [], []
    with hmp.casts(POLICY), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # typed storages
        for name, write in (WRITERS | COLLECTIVES).items():
            weight = fresh()
            address = weight.data_ptr()
            hmp.clear_cache()
            unkept += [name] * (entries(weight) != 1)
            with suppress(RuntimeError):  # geometry, of what is no square
                write(weight, 2.0)
            if weight.data_ptr() != address and name not in ("data =", "share_memory_"):  # which give it other memory
                moved.append(name)
    assert not moved
    assert not unkept


def in_a_file(folder: Path) -> torch.Tensor:
    path = folder / "weights"
    path.write_bytes(bytes(4 * SIDE * 4))
    return torch.from_file(str(path), shared=True, size=4 * SIDE, dtype=torch.float32).view(4, SIDE)


def test_r18_memory_that_others_may_write_is_refused_and_counted(tmp_path: Path) -> None:
    def refused(weight: torch.Tensor) -> dict[str, int]:
        hmp.revert()
        with hmp.casts(POLICY), torch.no_grad():
            F.linear(ONES, weight)
            return hmp.cache_info().refused

    weight, viewed = fresh(), fresh()
    assert refused(weight) == {}
    array = np.ones((4, SIDE), dtype=np.float32)
    for foreign in (lambda: torch.from_numpy(array), lambda: in_a_file(tmp_path), lambda: fresh().detach().share_memory_()):
        found = refused(torch.nn.Parameter(foreign()))
        assert found == {"foreign memory": 1}
    views = viewed.detach()[2:], viewed.detach()[:2]
    assert refused(viewed) == {"held elsewhere": 1} and len(views) == 2
    with OneProcess():
        assert refused(weight) == {"process group": 1}
    hmp.set_cache_limit(10)
    try:
        assert refused(weight) == {"limit": 1}
    finally:
        hmp.set_cache_limit(None)


def test_r18_what_holds_nothing_of_a_weight_hinders_no_copy() -> None:
    """A graph that is alive and saved nothing of it; Dynamo's evaluator, which holds what functions are given for as long as they run."""
    weight = fresh()
    value = weight.bfloat16().sum()
    eval_frame = torch._C._dynamo.eval_frame
    with hmp.casts(POLICY):
        assert entries(weight) == 1
        before = eval_frame.set_eval_frame(False)
        try:
            other = fresh()
            assert entries(other) == 2
        finally:
            eval_frame.set_eval_frame(before)
    value.backward()


def test_r18_a_forked_process_keeps_and_drops_copies() -> None:
    weight = torch.nn.Parameter(torch.randn(SIDE, SIDE))
    with hmp.casts(POLICY), torch.no_grad():
        F.linear(ONES, weight)
        child = os.fork()
        if child == 0:
            code = 1
            with suppress(BaseException):
                weight.data.fill_(3.0)
                first, second = F.linear(ONES, weight), F.linear(ONES, weight)
                right = torch.full((1, SIDE), 3.0 * SIDE, dtype=torch.bfloat16)
                code = 0 if torch.equal(first, right) and torch.equal(second, right) and hmp.cache_info().hits >= 1 else 2
                hmp.clear_cache()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        found = F.linear(ONES, weight)
    assert torch.equal(found, ONES.bfloat16() @ weight.detach().clone().bfloat16().t())


@pytest.mark.parametrize("weight_first", [True, False])
def test_r18_a_mark_is_of_whoever_set_it_last(weight_first: bool) -> None:
    """A weight's copy and the copy of a view of it rely on one mark: who sets it anew takes it from the other."""
    weight, x = torch.nn.Parameter(torch.randn(128, 128)), torch.randn(4, 128)
    reads = [lambda: F.linear(x, weight), lambda: torch.mm(x, weight.t())]
    if not weight_first:
        reads.reverse()
    with hmp.casts("torch-cpu"), torch.no_grad():
        for _ in range(3):
            reads[0]()
            weight.data.add_(1)
            reads[1]()
            got = reads[0]()
            with hmp.disable_casts():
                assert torch.equal(got, torch.mm(x.bfloat16(), weight.detach().bfloat16().t()))


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
