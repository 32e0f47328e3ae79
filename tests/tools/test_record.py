"""record() notes what ran in which precision: dtypes, casts and bytes as counted by hand and by dispatch modes of the tests', places."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import hmp
from autocast_kit import needs_autocasts_lstm
from trap_kit import policy

BF16, F32 = torch.bfloat16, torch.float32
LISTS = policy(bf16={"linear", "matmul", "conv2d"}, fp32={"softmax"}, promote={"cat", "add"})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(self.blocks(x), dim=-1)  # the line of softmax


SOFTMAX_LINE = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# the line of softmax"))


def decided(report: hmp.types.Report) -> list[Any]:
    return [row for row in report.rows if row.rule != "unlisted"]


def row_of(report: hmp.types.Report, op: str) -> Any:
    (found,) = [row for row in report.grouped("op") if row.op == op]
    return found


def test_dtypes_casts_bytes_and_places_are_those_of_the_calls() -> None:
    net, x = Net(), torch.randn(3, 8)
    with hmp.convert(policy=LISTS), hmp.record() as report:
        started = time.perf_counter()
        net(x)
        torch.matmul(x, x.t())
        elapsed = time.perf_counter() - started
    first, second, last, product = decided(report)
    assert (first.op, first.rule, first.inputs, first.compute, first.output) == ("linear", "bf16", "float32", "bfloat16", "bfloat16")
    # input 3x8, weight 8x8, bias 8, of 4 bytes each
    assert (first.calls, first.casts, first.casts_saved, first.cast_bytes) == (1, 3, 0, 4 * (24 + 64 + 8))
    # the input is in bfloat16 by now
    assert (second.inputs, second.casts, second.cast_bytes) == ("bfloat16, float32", 2, 4 * (32 + 4))
    assert (last.op, last.rule, last.casts, last.cast_bytes) == ("softmax", "fp32", 1, 2 * 12)
    assert (last.inputs, last.compute, last.output) == ("bfloat16", "float32", "float32")
    assert all(row.op_seconds > 0 and row.cast_seconds > 0 for row in (first, second, last))
    assert sum(row.op_seconds + row.cast_seconds for row in report.rows) < elapsed
    assert [row.module for row in (first, second, last, product)] == ["blocks.0", "blocks.1.1", "Net", ""]
    assert (last.file, last.line, product.file) == (__file__, SOFTMAX_LINE, __file__)


def test_what_no_list_decides_is_seen_too() -> None:
    x = torch.randn(3, 8)
    with hmp.convert(policy=LISTS), hmp.record() as report:
        torch.tanh(x)
        x.exp()
        x * 2.0
        F.gelu(x)
        torch.cat([x, x.bfloat16()])
        x + x
        x.shape, x[0], x // 2  # no op, and two
    ops = {row.op: row.rule for row in report.rows}
    assert {op: ops[op] for op in ("tanh", "exp", "gelu")} == dict.fromkeys(("tanh", "exp", "gelu"), "unlisted")
    assert ops["mul"] in ("R12", "unlisted")
    assert ops["cat"] == ops["add"] == "promote"
    assert not any("shape" in op for op in ops)
    assert {row.op for row in report.unlisted} >= {"tanh", "exp", "gelu", "getitem", "floordiv"}
    assert report.never_called == ["conv2d", "linear", "matmul", "softmax"]


LOW, MASK, LEAST = torch.tensor([[0.5, -2.0]]).bfloat16(), torch.tensor([True, False]), torch.finfo(F32).min
SATURATES = {
    "a fill of float32's least number": (lambda: LOW.masked_fill(MASK, LEAST), True),
    "a fill of -inf, which stays": (lambda: LOW.masked_fill(MASK, -torch.inf), False),
    "a fill that fits": (lambda: LOW.masked_fill(MASK, -1e9), False),
    "a tensor of float32's least number": (lambda: torch.where(MASK, LOW, torch.tensor(LEAST)), True),
    "a tensor of -inf": (lambda: torch.where(MASK, LOW, torch.tensor(-torch.inf)), False),
    "integers beyond float16": (lambda: LOW.half().masked_fill(MASK, torch.tensor(70_000)), True),
    "a product beyond bfloat16 and within float32": (lambda: LOW.abs().clamp(max=1.0) * LEAST, True),
    "a product that fits": (lambda: (LOW * 1e-3) * LEAST, False),
    "a bound": (lambda: LOW.clamp(-1, 1), False),
}


@pytest.mark.parametrize("case", SATURATES)
def test_a_call_saturates_only_where_a_value_was_moved(case: str) -> None:
    call, moves = SATURATES[case]
    with hmp.casts(policy(bf16={"linear"})), hmp.record() as report:
        result = call()
    assert ("R12" in {row.rule for row in report.rows}) is moves
    # a moved value is the dtype's extreme
    assert bool((result.abs() == torch.finfo(result.dtype).max).any()) is moves


def test_ops_without_floating_inputs_are_left_out() -> None:
    ids = torch.arange(3)
    with hmp.casts(policy(bf16={"linear", "mul"})), hmp.record() as report:
        ids * 2, ids + ids, torch.ones(2), ids.float()
        F.linear(torch.ones(2, 2), torch.ones(2, 2))
    assert [row.op for row in report.rows] == ["linear"]
    assert report.never_called == []  # mul was called


def test_only_the_users_own_entries_are_said_to_match_no_call(tmp_path: Path) -> None:
    (tmp_path / "base.txt").write_text("autocast")
    (tmp_path / "fp32.txt").write_text("gelu\nexp\n")
    moved, alone = hmp.Policy.load("autocast").move("softmax", "fp32"), hmp.Policy(fp32={"exp", "*"})
    for given, never in (("autocast", []), (moved, ["softmax"]), (hmp.Policy.load(tmp_path), ["gelu"]), (alone, [])):
        with hmp.casts(given), hmp.record() as report:
            torch.exp(LOW)
        assert report.never_called == never
        assert ("Entries of your lists that no call matched: " in str(report)) is bool(never)


def test_what_a_hook_calls_in_backward_and_what_runs_where_casts_are_off_is_counted_as_left_alone() -> None:
    x, layer = torch.randn(8, 8, requires_grad=True), torch.nn.Linear(8, 8)
    x.register_hook(torch.tanh)
    with hmp.casts(policy(bf16=["matmul", "tanh"])), hmp.record() as report:
        (x @ x).float().sum().backward()
        with hmp.disable_casts():
            layer(x)  # one call, whatever is asked of its weights
    assert report.uncast_calls == 2
    assert {"tanh", "linear"}.isdisjoint(row.op for row in report.rows)


def test_an_op_that_gives_float8_is_seen() -> None:
    """No dtype promotes with float8."""
    like = torch.zeros(2).to(torch.float8_e4m3fn)
    with hmp.casts("torch-cpu"), hmp.record() as report:
        assert torch.zeros(2).view_as(like).type_as(like).dtype is like.dtype
    assert report.rows


@pytest.mark.native_kernels
def test_what_a_dispatch_mode_would_change_is_not_listened_to() -> None:
    """torch.autocast does not reach what the kernels of these call while a mode looks on."""
    square, weight = torch.linspace(-1, 1, 16).reshape(4, 4) + torch.eye(4), torch.linspace(-1, 2, 32).reshape(2, 4, 4)
    calls = (lambda: torch.linalg.pinv(square), lambda: torch.nn.functional.bilinear(square, square, weight))
    for call in calls:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            want = call()
        with hmp.casts("torch-cpu"), hmp.record():
            got = call()
        assert got.dtype is want.dtype
        assert torch.equal(got, want)


def test_torchs_python_functions_that_call_listed_ops_are_seen() -> None:
    """Their code runs with casts off, for they are one op (R8): these are calls under the policy all the same."""
    low, wide = torch.randn(2, 3).bfloat16(), torch.randn(2, 3)
    with hmp.convert(policy=policy(promote={"mse_loss", "sub", "mul"}, fp32={"norm", "div"})), hmp.record() as report:
        nn.MSELoss()(low, low)
        F.mse_loss(low, wide)
        F.normalize(low)
        torch._foreach_add([low], 1.0)
    rows = {(row.op, row.rule, row.dtypes) for row in report.grouped("op")}
    assert rows == {
        ("mse_loss", "promote", "bfloat16 → bfloat16 → bfloat16"),
        ("mse_loss", "promote", "bfloat16, float32 → float32 → float32"),
        ("normalize", "unlisted", "bfloat16 → bfloat16 → bfloat16"),
        ("_foreach_add", "unlisted", "bfloat16 → bfloat16 → bfloat16"),
    }
    assert report.uncast_calls == 0
    assert "mse_loss" not in report.never_called


def test_a_decorated_function_is_one_op_of_its_list() -> None:
    @hmp.bf16_function
    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    with hmp.casts("habana"), hmp.record() as report:
        product(torch.ones(4, 4))
    (row,) = report.rows
    assert (row.rule, row.dtypes, row.casts, report.uncast_calls) == ("bf16", "float32 → bfloat16 → bfloat16", 1, 0)


def test_what_ran_in_float32_for_want_of_a_kernel_is_told() -> None:
    x = torch.eye(3)
    with hmp.convert(policy=policy(bf16={"linalg.solve"})), hmp.record() as report:
        assert torch.linalg.solve(x, x).dtype is F32
    (row,) = report.no_kernel
    assert (row.op, row.rule, row.compute, row.no_kernel) == ("linalg.solve", "bf16", "float32", 1)
    assert "bf16: linalg.solve; in float32, as 1 of 1 calls had no kernel (R11)" in str(report)


@pytest.mark.usefixtures("no_instructions")
def test_products_that_compute_in_float32_on_rounded_inputs_are_told() -> None:
    with hmp.convert(policy=LISTS), hmp.record() as report:
        Net()(torch.randn(3, 8))
    rows = [(row.op, row.compute, row.in_float32) for row in decided(report)]
    assert rows == [("linear", "bfloat16", 1), ("linear", "bfloat16", 1), ("softmax", "float32", 0)]
    assert "bfloat16 in float32" in str(report)


def test_recordings_nest_and_each_has_its_own() -> None:
    x = torch.randn(3, 3)
    with hmp.convert(policy=LISTS), hmp.record() as outer:
        F.linear(x, x)
        with hmp.record() as inner:
            F.linear(x, x)
    assert [(row_of(each, "linear").calls, row_of(each, "linear").casts) for each in (inner, outer)] == [(1, 2), (2, 4)]


def test_an_exception_loses_nothing() -> None:
    x = torch.randn(3, 8)
    with hmp.convert(policy=LISTS):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # noqa: PT012
            with hmp.record() as report:
                torch.matmul(x, x.t())
                torch.matmul(x, x)
        assert torch.matmul(x, x.t()).dtype is BF16
    rows = [row for row in decided(report) if row.op == "matmul"]
    assert [(row.calls, row.raised) for row in rows] == [(1, 0), (1, 1)]


def test_the_profiler_shows_casts_under_a_name_of_ours() -> None:
    x = torch.randn(3, 3)
    with hmp.convert(policy=LISTS), hmp.record(), torch.profiler.profile() as profile:
        F.linear(x, x)
    assert [event.key for event in profile.key_averages() if event.key.startswith("hmp::")] == ["hmp::cast float32 to bfloat16"]


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_function_runs_uncompiled_while_it_is_recorded() -> None:
    net, x = Net(), torch.randn(3, 8)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    with hmp.convert(policy=LISTS):
        compiled(x)
        with hmp.record() as report:
            compiled(x)
        counters = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        compiled(x)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counters  # the code that was compiled before
    assert row_of(report, "softmax").calls == 1
    assert sum(row.calls for row in decided(report) if row.op == "linear") == 2


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_torch_that_was_built_for_a_device_which_is_not_there_records_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))  # as that torch says
    with hmp.record() as report:
        pass
    assert report.about["device"] == "cpu"


def test_a_row_has_the_words_of_its_own_rule_where_two_have_one_number(tmp_path: Path) -> None:
    with hmp.casts(hmp.Policy("low", bf16={"linear"})), hmp.record() as report:
        x = torch.ones(3, dtype=torch.bfloat16)
        x += torch.full((3,), torch.finfo(torch.float32).min)
        x.addmv_(torch.ones(3, 3), torch.ones(3))
    assert {row.op: (row.rule, row.rule_in_words) for row in report.rows} == {
        "iadd": ("R5", "in place, finite (R5)"),
        "addmv_": ("R5", "in place (R5)"),
    }
    page = report.to_html(tmp_path / "page.html").read_text()
    assert "in place, finite (R5)" in page


X = torch.linspace(-1, 1, 64).reshape(8, 8)
X_LOW = X.bfloat16()
HELD = (torch.mm,)  # a tuple: hmp does not find it there


class Ran(TorchDispatchMode):
    """The ATen ops that ran, each with the dtypes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, list[torch.dtype]]] = []
        self.cast_bytes = 0
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.ops.append((name, [tensor.dtype for tensor in tensors]))
        self.cast_bytes += tensors[0].nbytes if name == "_to_copy" else 0
        result = func(*args, **(kwargs or {}))
        self.made += [f"cast {tensors[0].dtype} to {result.dtype}".replace("torch.", "")] if name == "_to_copy" else []
        return result


def recorded(call: Callable[[], Any], policy: Any = "torch-cpu") -> tuple[hmp.types.Report, Ran]:
    """The call recorded, and again under the tests' mode."""
    with torch.no_grad(), hmp.casts(policy):
        with hmp.record() as report:
            call()
        with Ran() as ran:
            call()
    return report, ran


INSIDE = {
    "einsum": (lambda: torch.einsum("ij,jk->ik", X, X), "bfloat16"),
    "lstm": (lambda: nn.LSTM(8, 4, num_layers=2)(X[None]), "bfloat16"),
    "cov": (lambda: torch.cov(X), None),
    "pad": (lambda: F.pad(X_LOW[None], (1, 1), mode="reflect"), "float32"),
}


@pytest.mark.native_kernels
@pytest.mark.parametrize("watch", [hmp.record, hmp.detect_nonfinite])
@pytest.mark.parametrize(("make", "lists"), [(lambda: nn.LSTM(8, 16, num_layers=2, bidirectional=True), "torch-cpu"), (Net, LISTS)])
def test_gradients_are_those_of_an_unwatched_run_and_nothing_is_noted_after_it(
    make: Callable[[], nn.Module], lists: Any, watch: Callable[[], Any]
) -> None:
    model, x = make(), torch.randn(9, 4, 8)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        with hmp.casts(lists):
            loss = model(x)[0].float().square().sum()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    unwatched = gradients()
    with watch() as found:
        watched = gradients()
    noted = str(found)
    assert all(map(torch.equal, watched, unwatched)) and all(map(torch.equal, gradients(), unwatched)) and str(found) == noted
    assert torch.nn.modules.module._global_forward_hooks == torch.nn.modules.module._global_forward_pre_hooks == {}


@pytest.mark.native_kernels
@pytest.mark.parametrize("op", INSIDE)
def test_what_autocast_does_inside_an_op_is_told(op: str) -> None:
    if op == "lstm":
        needs_autocasts_lstm()
    call, computes = INSIDE[op]
    report, ran = recorded(call)
    (row,) = [row for row in report.rows if row.op == op]
    assert (row.rule, row.casts, row.cast_bytes) == ("autocast", len(ran.made), ran.cast_bytes)
    assert row.source.startswith(f"{op}.autocast (")
    kernels = {dtype for name, dtypes in ran.ops if name != "_to_copy" for dtype in dtypes[:1] if dtype in (BF16, F32)}
    assert set(row.compute.split(", ")) <= {str(dtype).removeprefix("torch.") for dtype in kernels}
    assert computes is None or computes in row.compute.split(", ")
    products = {dtypes[0] for name, dtypes in ran.ops if name in ("mm", "bmm", "addmm", "mkldnn_rnn_layer")}
    if products == {BF16}:
        with pytest.raises(AssertionError, match="did not compute in float32"):
            report.assert_dtype(op, F32)


def test_a_second_call_of_the_same_kind_counts_as_the_first() -> None:
    with hmp.casts("torch-cpu"), hmp.record() as report:
        for _ in range(3):
            torch.einsum("ij,jk->ik", X, X)
        torch.einsum("ij,jk->ik", X, X.bfloat16())
    rows = {row.inputs: (row.calls, row.casts, row.cast_bytes) for row in report.rows if row.op == "einsum"}
    assert rows == {"float32": (3, 6, 6 * 256), "float32, bfloat16": (1, 1, 256)}


WIDENED = {
    "softmax": (lambda: F.softmax(X_LOW, -1, dtype=F32), F32),
    "log_softmax": (lambda: X_LOW.log_softmax(-1, dtype=torch.float64), torch.float64),
    "sum": (lambda: X_LOW.sum(dtype=F32), F32),
    "float_power": (lambda: torch.float_power(X, 2), torch.float64),
    "lt": (lambda: X > X_LOW, F32),
    "mul": (lambda: X_LOW * X_LOW, BF16),
    "gt": (lambda: X_LOW > X_LOW, BF16),
}


@pytest.mark.parametrize("policy", [hmp.Policy("nothing", bf16={"conv1d"}), "torch-cpu"], ids=str)
def test_what_torch_itself_widens_computes_in_the_wide_dtype(policy: Any) -> None:
    with torch.no_grad(), hmp.casts(policy):
        for op, (call, dtype) in WIDENED.items():
            with hmp.record() as report:
                call()
            (row,) = report.rows
            assert row.compute == str(dtype).removeprefix("torch."), row
            assert row.op in (op, "gt")  # `X > X_LOW` may be told as either


def test_statistics_of_a_norm_that_are_cast_are_counted() -> None:
    norm = nn.BatchNorm1d(8).bfloat16()
    report, ran = recorded(lambda: norm(X))
    (row,) = [row for row in report.rows if row.op == "batch_norm"]
    assert (row.casts, row.cast_bytes) == (len(ran.made), ran.cast_bytes) == (4, 64)


def test_ops_have_the_names_that_lists_spell() -> None:
    with hmp.convert(policy=hmp.Policy("few", bf16={"mm"}, promote={"block_diag"})), hmp.record() as report:
        torch.block_diag(X_LOW, X)
        torch.atleast_2d(X)
        X.size()
        HELD[0](X_LOW, X_LOW)
    assert [(row.op, row.rule) for row in report.rows] == [("block_diag", "promote"), ("atleast_2d", "unlisted"), ("mm", "bypassed")]
    assert "block_diag" not in report.never_called
    assert "bypassed: mm" in str(report)


def test_reports_of_two_policies_together_say_what_was_called_in_neither() -> None:
    def report(idle: str, call: Callable[[torch.Tensor], Any] = torch.exp) -> hmp.types.Report:
        with hmp.casts(hmp.Policy(fp32={idle})), hmp.record() as found:
            call(X)
        return found

    assert report("tanh").merge(report("log")).never_called == ["log", "tanh"]
    assert report("tanh").merge(report("tanh", torch.tanh)).never_called == []


@pytest.mark.native_kernels
def test_a_recomputation_that_ends_early_is_no_exception() -> None:
    linear = nn.Linear(8, 8)
    with hmp.casts("torch-cpu"), hmp.record() as report:
        checkpoint(lambda x: linear(linear(x)), X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert report.notes == []
    assert all(row.raised == 0 for row in report.rows)


def test_assert_dtype_of_an_op_in_one_module() -> None:
    net, lists = Net(), policy(bf16={"linear"}).move("linear @ blocks.0", "fp32")
    with hmp.casts(lists, model=net), hmp.record() as report:
        net(torch.ones(2, 8))
    report.assert_dtype("linear @ blocks.0", F32)
    report.assert_dtype("linear @ blocks.1.*", BF16)
    with pytest.raises(AssertionError, match="did not compute in float32 in 1 calls"):
        report.assert_dtype("linear @ blocks.*", F32)
    with pytest.raises(AssertionError, match="expected a call of linear @ head"):
        report.assert_dtype("linear @ head", F32)
