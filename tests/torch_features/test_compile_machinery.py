"""Patches of torch.compile: when it is there, what it leaves behind, strict export, and a torch that hmp does not know."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch._dynamo
from torch._dynamo.variables import torch_function
from torch.overrides import TorchFunctionMode

import hmp
from compile_kit import BF16, BRIDGED, F32, LOW, Graphs, dtypes, same_results
from process_kit import alone

pytestmark = pytest.mark.usefixtures("fresh_compiler")
X = torch.ones(3, 3)


@BRIDGED
def test_where_nobody_but_the_program_imports_hmp_the_casts_are_in_the_graph_and_follow_the_policy(tmp_path):
    """The fixtures of these tests import modules of hmp that a program does not."""
    alone(
        tmp_path,
        """
        import torch, hmp

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
        """,
    )


@pytest.mark.slow
@BRIDGED
def test_dynamo_is_not_imported_for_hmp_and_is_patched_when_it_is_imported(tmp_path):
    alone(
        tmp_path,
        """
        import sys
        import torch, hmp

        hmp.convert()
        assert "torch._dynamo" not in sys.modules
        finders = len(sys.meta_path)

        def ops(x):
            return x.matmul(x), 1 / x, torch.nn.functional.softmax(x, -1), x.unflatten(0, (1, 3))

        x = torch.ones(3, 3)
        low, wide = torch.bfloat16, torch.float32
        compiled = torch.compile(ops, backend="aot_eager", fullgraph=True)
        assert [t.dtype for t in compiled(x)] == [low, wide, wide, wide]
        hmp.revert()
        assert len(sys.meta_path) == finders - 1
        # Dynamo's tables were filled while hmp stood in torch's places
        assert [t.dtype for t in compiled(x)] == [wide] * 4
        tables = [torch._dynamo.trace_rules.get_torch_obj_rule_map(), torch._dynamo.variables.tensor.all_tensor_attrs]
        tables += [torch._dynamo.variables.builtin.BUILTIN_TO_TENSOR_FN_MAP]
        for table in tables:
            for each in (*table, *table.values()):
                assert not getattr(getattr(each, "__code__", None), "co_filename", "").startswith("<hmp"), each
        """,
    )


@pytest.mark.filterwarnings("error:.* was patched by another library")
def test_revert_takes_nothing_for_another_librarys_patch_after_torch_compile():
    """A search for names in tables once found hmp's own records there, and changed them."""
    compiled = torch.compile(lambda x: x @ x, backend="eager")
    for policy in (LOW, "habana"):
        with hmp.convert(policy=policy):
            assert compiled(X).dtype is BF16
        hmp.remove(hmp.apply(torch.nn.Linear(3, 3), policy))
        hmp.revert()


@BRIDGED
def test_nothing_stays_in_dynamo_after_revert(torch_differences):
    compiled = torch.compile(lambda x: x @ x, backend="eager", fullgraph=True)
    with hmp.convert(policy=LOW):
        assert compiled(X).dtype is BF16
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


@BRIDGED
@pytest.mark.filterwarnings("ignore")
class Passing(TorchFunctionMode):
    """A mode of the program's own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_compiled_code_may_enter_modes_of_its_own():
    def step(x, weight):
        y = torch.nn.functional.linear(x, weight)
        with Passing():
            y = torch.nn.functional.linear(y, weight) + 1
        torch._dynamo.graph_break()
        return torch.nn.functional.linear(y, weight)

    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    with hmp.casts(hmp.Policy("p", bf16={"linear"})):
        got = torch.compile(step, backend="eager")(x, weight)
        same_results(got, step(x, weight))
    assert got.dtype is BF16
