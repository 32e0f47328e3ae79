"""R17, the innermost wins, in compiled code: regions around what is compiled, inside it, and around a model's forward."""

from __future__ import annotations

import functools

import pytest
import torch

import hmp
from compile_kit import BF16, BRIDGED, F16, F32
from innermost_kit import Head, X, assert_by_the_lists, autocast, closing_over, write_lists

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), BRIDGED]


@pytest.fixture
def lists(tmp_path):
    return write_lists(tmp_path)


@pytest.mark.slow
def test_r17_compiled_code_has_the_numbers_of_eager(lists):
    compiled = functools.partial(torch.compile, backend="eager", fullgraph=True)
    model = hmp.apply(Head(), lists)
    around, inside = compiled(model), compiled(lambda x: model(x) * 1)
    for _ in range(2):  # the region belongs to what compiled code is guarded on
        assert_by_the_lists(model, around)
        with autocast():
            assert_by_the_lists(model, around, enabled=True)
            assert_by_the_lists(model, inside, enabled=True)
    assert_by_the_lists(model, compiled(closing_over(model)))
    model.forward = autocast()(model.forward)
    assert_by_the_lists(model, compiled(model))
    bare = Head()

    def with_casts(x):
        with autocast(), hmp.casts(lists, model=bare):
            return bare(x)

    assert_by_the_lists(bare, compiled(with_casts))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.saved_tensors[0].t() @ grad.float()


def test_r17_the_backward_of_what_is_compiled_in_the_programs_own_region_is_torchs():
    x, w = torch.linspace(-1, 1, 16).reshape(4, 4), torch.linspace(1, 2, 16).reshape(4, 4).requires_grad_()

    def gradient():
        with autocast():
            out = torch.compile(lambda: Product.apply(x, w) * 1, backend="aot_eager")()
        return torch.autograd.grad(out.float().sum(), w)[0]

    of_torch = gradient()
    torch._dynamo.reset()
    with hmp.convert(policy=hmp.Policy("others", bf16={"relu"})):
        assert torch.equal(gradient(), of_torch)


@pytest.mark.slow
def test_r17_compiled_code_after_a_graph_break_knows_whose_region_it_is(lists):
    class Own(Head):
        def forward(self, x):
            with autocast():
                hidden = self.body(x)
                torch._dynamo.graph_break()
                return self.lm_head(hidden)

    class Breaking(Head):
        def forward(self, x):
            hidden = self.body(x)
            torch._dynamo.graph_break()
            return self.lm_head(hidden)

    assert torch.compile(hmp.apply(Own(), lists), backend="eager")(X).dtype is BF16
    model = hmp.apply(Breaking(), lists)
    model.forward = autocast()(model.forward)
    assert_by_the_lists(model, torch.compile(model, backend="eager"))


@pytest.mark.slow
@pytest.mark.parametrize("applied", ["before", "behind"])
def test_what_is_compiled_again_follows_the_lists(lists, applied):
    """torch.compile calls a model that is compiled already past its own call."""
    compiled = functools.partial(torch.compile, backend="eager")
    model = Head()
    if applied == "before":
        hmp.apply(model, lists)
    once = compiled(model)
    if applied == "behind":
        assert hmp.apply(once, lists) is once
    for call in (once, compiled(torch.nn.Sequential(once)), compiled(once)):
        assert_by_the_lists(model, call)
    assert hmp.remove(once)(X).dtype is F32


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.up(x)


@pytest.mark.slow
def test_modules_of_one_class_share_compiled_code_where_their_lists_are_the_same():
    """Blocks compiled one by one, one function for several models, a child that is replaced: the code is guarded on the module's mark."""
    blocks = torch.nn.ModuleList(Block() for _ in range(3))
    model = torch.nn.Sequential(*blocks)
    for block in blocks:
        block.compile(backend="eager")
    hmp.apply(model, hmp.Policy(bf16={"linear"}, fp32={"linear @ 2.*"}))
    seen = []
    for block in blocks:
        block.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    for _ in range(2):
        model(X)
    assert seen == [BF16, BF16, F32] * 2
    low, half, plain = (torch.nn.Linear(3, 3) for _ in range(3))
    hmp.apply(low, hmp.Policy(bf16={"linear"}))
    hmp.apply(half, hmp.Policy(bf16={"linear"}, dtype="float16"))
    call = torch.compile(lambda model, x: model(x), backend="eager")
    for _ in range(2):
        assert [call(each, X).dtype for each in (low, plain, half)] == [BF16, F32, F16]
    holder = torch.nn.Sequential(low)
    compiled = torch.compile(holder, backend="eager")
    assert compiled(X).dtype is BF16
    holder[0] = plain  # a child that is replaced
    assert compiled(X).dtype is F32
