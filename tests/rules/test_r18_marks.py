"""R18: what torch does to a marked tensor's memory, and what is not marked: the facts about torch that the caches stand on."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import hmp
from hmp.caches import activation_cache, shared_cast, write_marks
from hmp.casting.tensor_casts import each_tensor
from memory_writers import COLLECTIVES, WRITERS, OneProcess

READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "bfloat16": lambda t: t.bfloat16(),
    "float64": lambda t: t.double(),
    "matmul": lambda t: t @ t,
    "linear": lambda t: F.linear(t, t),
    "conv2d": lambda t: F.conv2d(t[None, None], t[None, None, :3, :3]),
    "attention": lambda t: F.scaled_dot_product_attention(t[None], t[None], t[None]),
    "layer_norm": lambda t: F.layer_norm(t, t.shape[-1:]),
    "batch_norm": lambda t: F.batch_norm(t, None, None, training=True),
    "embedding": lambda t: F.embedding(torch.tensor([1, 2]), t),
    "sum": lambda t: t.sum(),
    "max": lambda t: t.max(dim=0),
    "sort": lambda t: t.sort(),
    "fft": lambda t: torch.fft.fft(t),
    "svd": lambda t: torch.linalg.svd(t),
    "clone": lambda t: t.clone(),
    "contiguous": lambda t: t.t().contiguous(),
    "view": lambda t: t.view(-1)[3:].t(),
    "source of copy_": lambda t: torch.empty_like(t).copy_(t),
    "cat": lambda t: torch.cat([t, t]),
    "item": lambda t: t[0, 0].item(),
    "tolist": lambda t: t.tolist(),
    "repr": repr,
    "untyped_storage": lambda t: t.untyped_storage().nbytes(),
    "backward": lambda t: F.linear(torch.ones(2, 96, requires_grad=True), t).sum().backward(),
}


def marked(tensor: torch.Tensor) -> torch.Tensor:
    assert write_marks.mark(tensor) == ""
    assert write_marks.is_marked(tensor)
    return tensor


def fresh() -> torch.Tensor:
    return torch.randn(96, 96, generator=torch.Generator().manual_seed(0))


def test_r18_readers_leave_the_mark() -> None:
    lost = []
    for name, read in READERS.items():
        tensor = marked(fresh())
        read(tensor)
        if not write_marks.is_marked(tensor):
            lost.append(name)
    assert not lost


def test_r18_writers_clear_the_mark_and_move_nothing() -> None:
    standing, moved = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # typed storages
        for name, write in (WRITERS | COLLECTIVES).items():
            tensor = fresh()
            address = tensor.data_ptr()
            write(marked(tensor), 2.0)
            if write_marks.is_marked(tensor):
                standing.append(name)
            if tensor.data_ptr() != address and name not in ("data =", "share_memory_"):  # which give it other memory
                moved.append(name)
    assert not standing
    assert not moved


def test_r18_a_mark_is_the_memorys() -> None:
    """Views, aliases and other Parameters over it see one mark; a deep copy and a pickle have none, and no attribute of the storage's."""
    tensor = marked(fresh())
    aliases = [tensor.detach(), tensor.view(-1), tensor[3:], torch.nn.Parameter(tensor), torch.empty(0).set_(tensor)]
    assert all(map(write_marks.is_marked, aliases))
    aliases[2].zero_()
    assert not any(map(write_marks.is_marked, [tensor, *aliases]))


def _in_a_file(folder: Path) -> torch.Tensor:
    path = folder / "weights"
    path.write_bytes(bytes(96 * 96 * 4))
    return torch.from_file(str(path), shared=True, size=96 * 96, dtype=torch.float32).view(96, 96)


def test_r18_memory_that_others_may_write_is_not_marked(tmp_path: Path) -> None:
    exported, viewed, taken = fresh(), fresh(), fresh()
    array = exported.numpy()
    views, storage = [viewed[2:], viewed[:2]], taken.untyped_storage()
    capsule_of = fresh()
    capsule = capsule_of.__dlpack__()
    trained = torch.nn.Parameter(fresh())
    scaled = torch.nn.Parameter(fresh())
    graph = F.linear(fresh(), trained) * F.linear(fresh().requires_grad_(), trained) * scaled
    found = {
        "numpy's": write_marks.mark(torch.from_numpy(np.zeros((4, 4), dtype=np.float32))),
        "exported to numpy": write_marks.mark(exported),
        "a file's": write_marks.mark(_in_a_file(tmp_path)),
        "shared": write_marks.mark(fresh().share_memory_()),
        "viewed": write_marks.mark(viewed),
        "a view beside another": write_marks.mark(views[0]),
        "a storage in somebody's hands": write_marks.mark(taken),
        "in a capsule": write_marks.mark(capsule_of),
        "a view of it saved by a graph": write_marks.mark(trained),
        "saved by a graph": write_marks.mark(scaled),
        "on no CPU": write_marks.mark(torch.empty(4, 4, device="meta")),
    }
    assert found == {
        "numpy's": "foreign memory", "exported to numpy": "foreign memory", "a file's": "foreign memory", "shared": "foreign memory",
        "viewed": "held elsewhere", "a view beside another": "held elsewhere", "a storage in somebody's hands": "held elsewhere",
        "in a capsule": "held elsewhere", "a view of it saved by a graph": "held elsewhere", "saved by a graph": "held elsewhere",
        "on no CPU": "device",
    }  # fmt: skip
    del array, views, storage, capsule, graph


def test_r18_memory_that_nobody_holds_any_more_is_marked_again() -> None:
    tensor = torch.nn.Parameter(fresh())
    held = [tensor.detach().view(-1), tensor.untyped_storage(), tensor.detach().__dlpack__(), F.linear(fresh().requires_grad_(), tensor)]
    while held:
        assert write_marks.mark(tensor) == "held elsewhere"
        held.pop()
    gc.collect()
    marked(tensor)


def test_r18_a_graph_that_is_alive_and_saved_nothing_of_a_weight_does_not_hold_it() -> None:
    tensor = torch.nn.Parameter(fresh())
    value = tensor.bfloat16().sum()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            marked(tensor)
        tensor.data_ptr()
    value.backward()


def test_r18_nothing_is_marked_while_there_is_a_process_group() -> None:
    tensor = fresh()
    with OneProcess():
        assert write_marks.mark(tensor) == "process group"
    marked(tensor)


def test_r18_the_info_counts_what_was_refused() -> None:
    def refused(weight: torch.nn.Parameter) -> dict[str, int]:
        hmp.revert()
        with hmp.convert(policy=hmp.Policy("low", bf16={"linear"})), torch.no_grad():
            F.linear(torch.ones(1, 96), weight)
            return hmp.cache_info().refused

    weight = torch.nn.Parameter(fresh())
    assert refused(weight) == {}
    numpys = torch.nn.Parameter(torch.from_numpy(np.ones((8, 96), dtype=np.float32)))
    assert refused(numpys) == {"foreign memory": 1}
    alias = weight.detach()
    assert refused(weight) == {"held elsewhere": 1}
    del alias
    with OneProcess():
        assert refused(weight) == {"process group": 1}
    hmp.set_cache_limit(10)
    try:
        assert refused(weight) == {"limit": 1}
    finally:
        hmp.set_cache_limit(None)


def test_r18_a_forked_process_keeps_and_drops_copies() -> None:
    weight, x = torch.nn.Parameter(fresh()), torch.ones(1, 96)
    with hmp.convert(policy=hmp.Policy("low", bf16={"linear"})), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        F.linear(x, weight)
        child = os.fork()
        if child == 0:
            code = 1
            with suppress(BaseException):
                weight.data.fill_(3.0)
                first, second = F.linear(x, weight), F.linear(x, weight)
                right = torch.full((1, 96), 288.0, dtype=torch.bfloat16)
                code = 0 if torch.equal(first, right) and torch.equal(second, right) and hmp.cache_info().hits >= 1 else 2
                hmp.clear_cache()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(F.linear(x, weight), (x.bfloat16() @ weight.detach().clone().bfloat16().t())), folder


def _outcome(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    try:
        return [t.detach() for t in each_tensor((function(*args, **kwargs),))]
    except Exception as error:
        return type(error), str(error)


@pytest.mark.slow
def test_r18_no_op_of_torch_minds_a_marked_input() -> None:
    """Each op of torch's table gives the same of marked inputs, in two threads too: a kernel may not clear a mark from inside a loop."""
    from torch.testing._internal.common_methods_invocations import op_db

    differing, seen = [], 0
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for op in op_db:
            if torch.float32 not in op.supported_dtypes("cpu") or "empty" in op.name:
                continue
            for sample in itertools.islice(op.sample_inputs_func(op, "cpu", torch.float32, False), 6):
                args = [sample.input, *sample.args]
                if any(t.layout is not torch.strided or t.is_nested for t in each_tensor((args, sample.kwargs))):
                    continue  # they have no storage, or parts
                plain, with_marks = (copy.deepcopy((args, sample.kwargs)) for _ in range(2))
                seen += sum(not write_marks.mark(t) for t in each_tensor(with_marks))
                if not same(_outcome(op.op, *plain), _outcome(op.op, *with_marks)):
                    differing.append(op.name)
    finally:
        torch.set_num_threads(threads)
    assert seen > 2000
    assert not differing


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) or isinstance(other, tuple):
        return bool(one == other)
    try:
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)  # lstsq differs from one run to the next
    except AssertionError:
        return False
    return True


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


OTHERWISE = {
    "another part": lambda t: t.as_strided((128, 64), (128, 1), 64),
    "another sign": torch._neg_view,
    "another dtype": lambda t: t.view(-1).view(torch.float16)[: 128 * 128].view(128, 128),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_r18_tensors_that_show_one_memory_otherwise_share_no_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cast, "WORTH_KEEPING", 1024)
    monkeypatch.setattr(shared_cast, "least", 1024)
    monkeypatch.setattr(activation_cache, "WORTH_A_SLOW_MARK", 1024)
    ones = torch.ones(1, 128)
    first = torch.ones(128, 128) if name == "another dtype" else torch.randn(128, 128)
    with hmp.casts("torch-cpu"), torch.no_grad():
        torch.mm(ones, first)
        assert write_marks.is_marked(first)
        other = OTHERWISE[name](first)
        got = torch.mm(ones.to(other.dtype), other)
    assert torch.equal(got, torch.mm(ones.bfloat16(), other.clone().bfloat16()))


def test_r18_the_quick_question_says_yes_to_what_looks_the_same_alone() -> None:
    base = torch.randn(8, 8)
    weight = torch.nn.Parameter(base[:4, :4])
    asks = write_marks.same_view_check(weight)
    assert asks(weight), "nothing of this torch answers: every use asks the long question"
    alike = torch.nn.Parameter(base[:4, :4])
    others = {
        "shape": base[:2, :4], "stride": base[:4, :4].t(), "dtype": base.view(torch.int32)[:4, :4].view(torch.float32).half(),
        "sign": torch._neg_view(base)[:4, :4],
    }  # fmt: skip
    assert asks(alike)
    for what, other in others.items():
        assert not asks(torch.nn.Parameter(other)), what
    with torch.inference_mode():
        again = write_marks.same_view_check(weight)
        assert again(weight)
        assert not again(torch.nn.Parameter(base[:4, :4].t()))


def test_r18_memory_is_marked_where_dynamos_evaluator_runs_the_code() -> None:
    """It holds what functions are given for as long as they run, and stays when something was compiled."""
    eval_frame = torch._C._dynamo.eval_frame
    before = eval_frame.set_eval_frame(False)
    try:
        said = write_marks.mark(torch.randn(4, 4)), write_marks.mark(torch.nn.Parameter(torch.randn(4, 4)))
    finally:
        eval_frame.set_eval_frame(before)
    assert said == ("", "")
