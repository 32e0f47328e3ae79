"""violations(): each call that ran otherwise than the line of its list says, and who had the last word; none where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.masked import masked_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hmp
from innermost_kit import Head, OwnRegion, autocast, write_lists
from trap_kit import policy

LISTS = policy(bf16={"linear", "mm", "mul", "linalg.inv", "gru.autocast", "add"}, fp32={"softmax", "bmm", "embedding", "layer_norm"})
X = torch.randn(4, 4)
LINEAR = nn.Linear(4, 4)
HELD = (torch.mm,)  # a tuple: hmp does not find it there


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return torch.mm(grad.float(), torch.eye(grad.shape[1]))


def violations(call: Callable[[], Any], lists: hmp.Policy = LISTS) -> list[Any]:
    with hmp.record() as report, hmp.casts(lists):
        call()
    return report.violations()


def line_of(function: Callable[..., Any], offset: int) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno + offset}"


def in_region() -> None:
    with autocast():
        torch.bmm(X[None], X[None])
        torch.softmax(X, 0)  # on torch's float32 list too
        LINEAR(X)


def in_island() -> None:
    with torch.autocast("cpu", enabled=False):
        LINEAR(X)
        torch.softmax(X, 0)


def disabled() -> None:
    with hmp.disable_casts():
        LINEAR(X)


def without_a_kernel() -> None:
    torch.linalg.inv(X)


def past() -> None:
    HELD[0](X, X)


def left_to_torch() -> None:
    masked = masked_tensor(X, X > 0)  # a class that knows no bfloat16
    torch.add(masked, masked)


KINDS = {
    in_region: ("bmm", "float32", "bfloat16", "region", f"torch.autocast, enabled at {line_of(in_region, 1)}", line_of(in_region, 2)),
    in_island: ("linear", "bfloat16", "float32", "island", f"(enabled=False) at {line_of(in_island, 1)}", line_of(in_island, 2)),
    disabled: ("linear", "bfloat16", "float32", "disable_casts", "disable_casts()", line_of(disabled, 2)),
    without_a_kernel: ("linalg.inv", "bfloat16", "float32", "no_kernel", "no bfloat16 kernel", line_of(without_a_kernel, 1)),
    past: ("mm", "bfloat16", "float32", "bypassed", "a reference taken before", line_of(past, 1)),
    left_to_torch: ("add", "bfloat16", "float32", "torch", "left the call to torch", line_of(left_to_torch, 2)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_each_kind_says_what_ran_where_and_who_had_the_last_word():
    for call, (op, wanted, got, kind, by, place) in KINDS.items():
        (found,) = violations(call)
        assert (found.op, found.wanted, found.got, found.kind, found.calls, found.source) == (op, wanted, got, kind, 1, op)
        assert by in found.by and f"{found.file}:{found.line}" == place


def test_the_line_has_its_file_and_number_and_the_module_its_path(tmp_path):
    with hmp.record() as report:
        hmp.apply(OwnRegion(), write_lists(tmp_path))(torch.randn(2, 3))
    (found,) = report.violations()
    assert found.source == f"linear @ lm_head ({tmp_path / 'fp32.txt'}:1)"
    assert (found.module, found.wanted, found.got) == ("lm_head", "float32", "bfloat16")
    assert "lm_head" in str(report) and "fp32.txt" in str(report)
    again = hmp.types.Report.load(report.to_json(tmp_path / "report.json"))
    assert again.violations() == report.violations()
    assert [each.calls for each in again.merge(report).violations()] == [2]


def test_backward_inside_a_region_is_told():
    with hmp.record() as report, autocast():
        with hmp.casts(LISTS):
            loss = LINEAR(X).sum()
        loss.backward()
    assert [(each.op, each.kind) for each in report.violations()] == [("backward()", "region")]


def test_none_is_reported_where_there_is_none():
    def step() -> None:
        hidden = LINEAR(X) * 2
        hidden.mul_(2)  # in place: the first input's dtype (R5)
        torch.mm(X.double(), X.double())  # left to torch
        torch.softmax(hidden, 0, dtype=torch.bfloat16)  # asked for
        torch.mm(X, X, out=torch.empty(4, 4))
        F.embedding(torch.tensor([1]), LINEAR.weight.bfloat16())  # the result is cast, not the table
        (X + X) * 1e39  # saturates (R12)
        nn.GRU(4, 4)(X[None])
        torch.ones(3, dtype=torch.int64) * 2
        F.cosine_similarity(X, X)
        checkpoint(LINEAR, X, use_reentrant=False).sum().backward()
        optimizer = torch.optim.Adam(LINEAR.parameters())
        optimizer.step()
        with hmp.disable_casts():
            optimizer.step()
        nn.utils.clip_grad_norm_(LINEAR.parameters(), 1.0)
        nn.init.xavier_uniform_(nn.Linear(4, 4).weight)
        Doubles.apply(X.clone().requires_grad_()).sum().backward()  # lists don't apply there (R13)

    assert violations(step) == []
    with autocast():
        assert violations(lambda: (LINEAR(X), torch.bmm(X[None], X[None]))) == []


@pytest.mark.parametrize("name", ["torch-cpu", pytest.param("habana", marks=pytest.mark.slow)])
def test_the_presets_have_none_in_a_model(name):
    model = nn.Sequential(nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.LayerNorm(8), nn.Linear(8, 9))
    tokens = torch.randint(0, 9, (2, 5))
    report = hmp.verify(model, [tokens], name, loss=lambda out: F.cross_entropy(out.flatten(0, 1), tokens.flatten()))
    assert report.violations() == []
    assert report.never_called == []  # a preset has ops of many models


# --- verify()


def test_verify_raises_with_the_table_and_names_lines_without_a_call():
    class Disables(Head):
        def forward(self, x):
            with hmp.disable_casts():
                return super().forward(x)

    lists = policy(bf16={"linear", "gelu"})
    with pytest.raises(hmp.errors.ViolationError) as raised:
        hmp.verify(Disables(), torch.randn(2, 3), lists)
    said = str(raised.value)
    for told in ("2 calls", "in body", "in lm_head", "wanted bfloat16, got float32", "disable_casts()", "gelu"):
        assert told in said
    assert len(raised.value.report.violations()) == 2
    assert isinstance(raised.value, AssertionError)
    hmp.verify(Disables(), torch.randn(2, 3), policy(bf16={"linear", "sum"}), allow=["disable_casts"])


def test_verify_refuses_what_shows_nothing_and_leaves_nothing_where_it_fails():
    with pytest.raises(hmp.HmpError, match="nothing was verified"):
        hmp.verify(Head(), torch.randn(2, 3))
    for wrong in ("island", ["nonsense"], 3):
        with pytest.raises(hmp.HmpError, match="'region', 'island'"):
            hmp.verify(Head(), X, LISTS, allow=wrong)
    with pytest.raises(ZeroDivisionError):
        hmp.verify(nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3), LISTS, loss=lambda out: 1 / 0)
    assert torch._C._len_torch_function_stack() == 0


def test_a_float32_line_whose_weight_was_rounded_before_is_told() -> None:
    lists = policy(fp32={"linear", "softmax"})
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half())
    (found,) = violations(lambda: torch.softmax(model(X), -1), lists)
    assert (found.op, found.kind, found.module, found.wanted) == ("linear", "rounded_before", "1", "float32") and "float16" in found.by
    with pytest.raises(hmp.errors.ViolationError, match="keep weight and input in float32"):
        hmp.verify(model, X, lists)
    assert hmp.verify(model, X, lists, allow=["rounded_before"]).rows
    model[1].float()
    assert violations(lambda: torch.softmax(model(X), -1), lists) == []


FIRST = policy(bf16={"linear"}, fp32={"softmax", "layer_norm"})


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(LINEAR(x).float().to(torch.bfloat16), -1)  # as models do that keep their input's dtype


def sharded(module: nn.Module) -> nn.Module:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)), mp_policy=half)


@pytest.mark.parametrize(
    ("build", "given", "says"),
    [
        (lambda: nn.Softmax(-1), X.half(), "an input in float16"),
        (lambda: nn.Sequential(nn.Dropout(0.0), nn.Softmax(-1)), X.bfloat16(), "an input in bfloat16"),
        (lambda: nn.Sequential(LINEAR, sharded(nn.LayerNorm(4))), X, "a weight stored in bfloat16"),
    ],
    ids=["input", "through an unlisted op", "FSDP2"],
)
@pytest.mark.usefixtures("process_group")
def test_a_float32_line_whose_input_was_rounded_before_is_told(build: Callable[[], nn.Module], given: torch.Tensor, says: str) -> None:
    model = build()
    (found,) = violations(lambda: model(given), FIRST)
    assert found.op in ("softmax", "layer_norm") and says in found.by
    assert (found.kind, found.wanted, found.calls) == ("rounded_before", "float32", 1)


def test_what_hmp_rounded_itself_and_what_a_model_casts_by_itself_is_no_violation() -> None:
    assert violations(lambda: torch.softmax(LINEAR(X), -1), FIRST) == []
    assert violations(lambda: torch.softmax(LINEAR(X).detach()[:, 1:], -1), FIRST) == []  # a generator's output before the discriminator
    assert violations(lambda: Own()(X), FIRST) == []
    assert violations(lambda: (LINEAR(X.bfloat16()), LINEAR(X)), FIRST) == []


class Coder(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x)


def coder() -> Coder:
    return Coder(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)))


def test_ops_of_a_models_part_outside_of_its_calls_are_told_with_the_remedy() -> None:
    model, alone = hmp.apply(coder(), LISTS), coder()
    with hmp.record() as report:
        model(X)
        alone.encode(X)  # no policy is applied to it
    assert not report.violations()
    with hmp.record() as report:
        model.encode(X)
    (found,) = report.violations()  # softmax computes in float32 either way
    assert (found.op, found.wanted, found.got, found.kind, found.module) == ("linear", "bfloat16", "float32", "outside", "0")
    assert "a part of Coder" in found.by and found.place.endswith(line_of(Coder.encode, 1))
    assert "methods=('forward', 'encode')" in str(report)
    with hmp.record() as report, hmp.disable_casts():
        model(X)
    assert {each.kind for each in report.violations()} == {"disable_casts"}
    wrapped = hmp.apply(nn.DataParallel(coder()), LISTS)
    with hmp.record() as report:
        wrapped.module.encode(X)
    assert report.violations()[0].by == found.by
    hmp.apply(model, LISTS, methods=("forward", "encode"))
    with hmp.record() as report:
        model.encode(X)
        with hmp.casts(LISTS):
            model[0](X)
    assert not report.violations()
