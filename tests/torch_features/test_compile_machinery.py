"""Patches of torch.compile: when it is there, what it leaves behind, strict export, a torch that hmp does not know; and whole models.

R17, the innermost wins, in compiled code: regions around what is compiled, inside it, and around a model's forward.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch._dynamo
from torch._dynamo.variables import torch_function
from torch.overrides import BaseTorchFunctionMode

import hmp
from compile_kit import BF16, BRIDGED, F16, F32, LOW, Graphs, dtypes
from innermost_kit import Head, X, assert_by_the_lists, autocast, closing_over, write_lists
from process_kit import alone
from trap_kit import same

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@BRIDGED
@pytest.mark.slow
def test_where_nobody_but_the_program_imports_hmp_the_casts_are_in_the_graph_and_follow_the_policy(tmp_path):
    """The fixtures of these tests import modules of hmp that a program does not. hmp itself does not import Dynamo."""
    alone(
        tmp_path,
        """
        import sys
        import torch, hmp

        hmp.convert()
        assert "torch._dynamo" not in sys.modules
        finders = len(sys.meta_path)
        hmp.convert(policy=hmp.Policy("none"))
        graphs, x = [], torch.ones(3, 3)

        def backend(graph, inputs):
            graphs.append(graph.code)
            return graph

        compiled = torch.compile(lambda x: x @ x, backend=backend, fullgraph=True)
        low, wide = hmp.Policy("low", bf16={"matmul"}), hmp.Policy("wide", fp32={"matmul"})
        for policy, dtype in ((low, torch.bfloat16), (wide, torch.float32), (low, torch.bfloat16)):
            with hmp.casts(policy):
                assert compiled(x).dtype is dtype
            assert compiled(x).dtype is torch.float32
        assert "bfloat16()" in graphs[0] and "bfloat16()" not in "".join(graphs[1:]), graphs
        model = hmp.apply(torch.nn.Linear(3, 3), low.replace(bf16={"linear"}))
        assert torch.compile(model, backend=backend)(x).dtype is torch.bfloat16 and "bfloat16()" in graphs[-1], graphs[-1]
        hmp.revert()
        assert len(sys.meta_path) == finders - 1
        # Dynamo's tables were filled while hmp stood in torch's places: what they hold then, test_r19_protocols asks
        assert compiled(x).dtype is torch.float32
        """,
    )


@BRIDGED
@pytest.mark.filterwarnings("error:.* was patched by another library")
def test_nothing_stays_in_dynamo_after_revert(torch_differences):
    """A search for names in tables once found hmp's own records there, changed them, and took them for another library's patch."""
    compiled = torch.compile(lambda x: x @ x, backend="eager", fullgraph=True)
    for policy in (LOW, "habana"):
        with hmp.convert(policy=policy):
            assert compiled(X).dtype is BF16
        hmp.remove(hmp.apply(torch.nn.Linear(3, 3), policy))
        hmp.revert()
    assert not any(type(each).__module__.startswith("hmp") for each in torch._dynamo.trace_rules.get_torch_obj_rule_map())
    assert compiled(X).dtype is F32
    assert torch_differences() == []


class Model(torch.nn.Module):
    """Has islands and composites."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with hmp.disable_casts():
            wide = self.linear(x)
        return wide, torch.softmax(self.linear(x), -1), x.mul(x) + 1


@pytest.mark.slow
def test_a_torch_that_hmp_does_not_know_runs_uncompiled_with_a_warning_and_compiles_again_after_revert(monkeypatch):
    graphs = Graphs()
    compiled = torch.compile(lambda x: (x @ x, torch.softmax(x @ x, -1)), backend=graphs, fullgraph=True)
    with monkeypatch.context() as patch:
        patch.delattr(torch_function, "TorchFunctionModeVariable")
        # torch's stances end in the order of their beginnings: the recording's end took back what the conversion had asked for
        with pytest.warns(RuntimeWarning, match=r"torch\.compile of torch .* missing"), hmp.record():
            hmp.convert(policy=LOW)
        for _ in range(2):
            assert dtypes(compiled(X)) == [BF16, F32]
            with hmp.disable_casts():
                assert dtypes(compiled(X)) == [F32, F32]
        for around in (contextlib.nullcontext(), hmp.disable_casts()):
            with around, pytest.raises(hmp.HmpError, match="strict=False"):
                torch.export.export(Model(), (X,), strict=True)
        assert dtypes(torch.export.export(Model(), (X,), strict=False).module()(X)) == [F32, F32, BF16]
    assert not graphs
    hmp.revert()
    assert dtypes(compiled(X)) == [F32, F32] and len(graphs) == 1


def test_compiled_code_may_enter_modes_of_its_own():
    def step(x, weight):
        y = torch.nn.functional.linear(x, weight)
        with BaseTorchFunctionMode():  # a mode of the program's own
            y = torch.nn.functional.linear(y, weight) + 1
        torch._dynamo.graph_break()
        return torch.nn.functional.linear(y, weight)

    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    with hmp.casts(hmp.Policy("p", bf16={"linear"})):
        got = torch.compile(step, backend="eager")(x, weight)
        same(got, step(x, weight))
    assert got.dtype is BF16


# --- the innermost wins


@pytest.fixture
def lists(tmp_path):
    return write_lists(tmp_path)


@pytest.mark.slow
@BRIDGED
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


@BRIDGED
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
@BRIDGED
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
@BRIDGED
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
@BRIDGED
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


# --- whole models: dtypes and values of eager hmp, forward and backward


def bert() -> torch.nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, **quiet))


def run(model: torch.nn.Module, call) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and every gradient in a row."""
    model.zero_grad()
    out = call(input_ids=torch.arange(16).reshape(2, 8)).logits
    out.float().pow(2).mean().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "policy"), [("aot_eager", "torch-cpu"), ("eager", "habana-o2")])
def test_every_compiled_model_computes_what_eager_does(backend, policy):
    model = bert()
    hmp.convert(policy=policy)
    expected, gradient = run(model, model)
    found, found_gradient = run(model, torch.compile(model, backend=backend, fullgraph=True))
    assert found.dtype is expected.dtype
    assert (found.float() - expected.float()).norm() <= 1e-2 * expected.float().norm()
    assert (found_gradient - gradient).norm() <= 1e-2 * gradient.norm()
