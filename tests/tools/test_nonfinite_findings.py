"""hmp.detect_nonfinite(): the op that made NaN or Inf, found at its line, in forward and in backward, beside other ranks too."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hmp
from trap_kit import policy

HERE = Path(__file__)


def line_of(mark: str) -> int:
    """The line of this file that ends with the comment `# mark`."""
    found = [number for number, text in enumerate(HERE.read_text().splitlines(), 1) if text.endswith(f"# {mark}")]
    assert len(found) == 1, found
    return found[0]


class Attention(torch.nn.Module):
    """Scores that overflow float16, and the softmax that makes NaN of them."""

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        scores = torch.bmm(query, key.transpose(1, 2))  # scores
        return scores.softmax(-1)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x * 10)


class Root(torch.nn.Module):
    """A layer whose backward divides by zero where the root's argument is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(self.layer(x) * 0)  # root


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        nothing = gradient - gradient
        return nothing / nothing  # custom


def found(run: Callable[[], Any], **options: Any) -> Any:
    with pytest.raises(hmp.NonFiniteError) as caught, hmp.detect_nonfinite(**options):
        run()
    assert str(caught.value) == str(caught.value.finding)
    return caught.value.finding


OVERFLOWS = torch.full((1, 2, 2), 300.0)
LISTS = policy(bf16={"bmm"}, fp32={"softmax"}, dtype=torch.float16, name="half")


def attend() -> None:
    with hmp.casts(LISTS):
        Block()(OVERFLOWS)


def hooked() -> None:
    y = torch.ones(2, requires_grad=True) * 2
    y.register_hook(lambda gradient: gradient / 0)  # hook
    y.sum().backward()


ZEROS = torch.zeros(2, requires_grad=True)
LOW = torch.full((4,), 60000.0, dtype=torch.float16)
NANS = torch.full((1, 2, 2), float("nan"), dtype=torch.float16)  # of which torch reads nothing where beta is 0
# What finds it at the line with this mark: the ATen op, the direction and what it made. In backward that is the forward's line, or the
# user's own; what normalize() returns is finite, and 0 where it should be 0.5; and an op in place is looked at before it writes.
MARKS = {
    "root": (lambda: Root()(torch.ones(1, 2)).sum().backward(), "div", "backward", "Inf"),
    "custom": (lambda: Custom.apply(torch.ones(2, requires_grad=True)).sum().backward(), "div", "backward", "NaN"),
    "hook": (hooked, "div", "backward", "Inf"),
    "normalize": (lambda: torch.nn.functional.normalize(LOW, dim=0), "linalg_vector_norm", "forward", "Inf"),  # normalize
    "unread": (lambda: torch.autograd.grad(torch.sqrt(ZEROS).sum(), ZEROS), "div", "backward", "Inf"),  # unread
    "beta": (lambda: torch.baddbmm(NANS, LOW.view(1, 2, 2), LOW.view(1, 2, 2), beta=0), "baddbmm", "forward", "Inf"),  # beta
    "in place": (lambda: LOW.clone().mul_(300), "mul_", "forward", "Inf"),  # in place
}


def test_it_is_found_at_its_line() -> None:
    for mark, (run, aten, direction, made) in MARKS.items():
        finding = found(run)
        assert (finding.kind, finding.aten, finding.direction, finding.made) == ("op", aten, direction, made)
        assert (finding.file, finding.line) == (str(HERE), line_of(mark))


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # torch's, of hooks that are called twice
def test_a_compiled_model_runs_uncompiled_and_is_seen(fresh_compiler: None) -> None:
    model = torch.compile(Root(), backend="eager")
    model(torch.ones(1, 2))
    finding = found(lambda: model(torch.ones(1, 2)).sum().backward())
    assert (finding.op, finding.direction) == ("sqrt", "backward")
    rows = hmp.compare(model, torch.ones(1, 2), loss=lambda out: out.sum()).rows
    assert {row.op for row in rows} == {"linear", "mul", "ones_like", "sqrt", "sum"}


@pytest.mark.native_kernels  # computed in float32, the product overflows where it is rounded
def test_the_message_says_where_what_under_which_rule_and_what_to_try(tmp_path: Path):
    (tmp_path / "bf16.txt").write_text("# products\nbmm\n")
    (tmp_path / "fp32.txt").write_text("softmax\n")
    (tmp_path / "dtype.txt").write_text("float16\n")
    with hmp.casts(tmp_path):
        listed = str(found(lambda: Block()(OVERFLOWS)))
    for told in ("`bmm` made Inf", f"in attention, {HERE}:{line_of('scores')}", f"{tmp_path / 'bf16.txt'}:2", "fp32.txt"):
        assert told in listed
    for told in ("float16[1, 2, 2] in [300, 300]; float16[1, 2, 2] in [3000, 3000]", "all 4 values are Inf", "low-precision dtype float16"):
        assert told in listed
    plain = str(found(lambda: Root()(torch.ones(1, 2)).sum().backward()))
    for told in ("`sqrt` (div) made Inf", "SqrtBackward0", f"in Root, {HERE}:{line_of('root')}", "no policy was active", "op lists don't"):
        assert told in plain
    alone, divided = (found(run) for run in (lambda: torch.tensor([1.0, -1.0]).log_(), lambda: torch.ones(2).div_(torch.zeros(2))))
    assert (len(alone.inputs), len(divided.inputs)) == (0, 1) and "inputs: none, or only the tensor that it wrote to" in str(alone)


def test_data_and_weights_that_are_not_finite_are_told_as_such():
    finding = found(lambda: Root()(torch.tensor([[1.0, float("nan")]])))
    assert (finding.kind, finding.source, finding.module) == ("data", "a tensor from outside, such as the batch", "layer")
    assert f"{HERE}:{line_of('root')}" in str(finding)
    bad = Root()
    bad.layer.weight.data[0, 0] = float("nan")
    finding = found(lambda: bad(torch.ones(1, 2)))
    assert (finding.kind, finding.source) == ("parameter", "parameter `layer.weight` of Root")


def test_log_goes_on_and_says_each_finding_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.ERROR, logger="hmp"), hmp.detect_nonfinite(on_find="log") as findings:
        for _ in range(2):
            Root()(torch.ones(1, 2)).sum().backward()
            attend()
    assert [finding.op for finding in findings] == ["sqrt", "bmm"]
    assert [record.getMessage() for record in caplog.records] == [str(finding) for finding in findings]


def test_it_is_a_decorator_nests_and_leaves_nothing_behind():
    @hmp.detect_nonfinite()
    def step() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        step()
    with pytest.raises(hmp.NonFiniteError), hmp.detect_nonfinite() as outer, hmp.detect_nonfinite() as inner:
        attend()
    assert (len(outer), len(inner)) == (1, 1)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.nn.modules.module._global_forward_pre_hooks and not torch.nn.modules.module._global_forward_hooks
    with pytest.raises(hmp.HmpError, match="'stop'"):
        hmp.detect_nonfinite(on_find="stop")


def test_the_message_ends_at_the_users_line_and_says_how_many_values_there_are() -> None:
    with pytest.raises(hmp.NonFiniteError) as caught, hmp.casts(LISTS), hmp.detect_nonfinite():
        Block()(OVERFLOWS)
    frames = traceback.extract_tb(caught.value.__traceback__)
    if sys.version_info >= (3, 11):  # before, torch's own re-raise shows hmp's lines below the user's
        assert frames[-1].lineno == line_of("scores") and frames[-1].filename == str(HERE)
        assert not [frame for frame in frames if Path(frame.filename).is_relative_to(Path(hmp.__file__).parent)]
    assert "float16[1, 2, 2], all 4 values are Inf" in str(caught.value)
    mixed = str(found(lambda: torch.tensor([0.0, 1.0, 2.0]) / torch.zeros(3)))
    assert "float32[3], no value is finite, 1 NaN, 2 Inf" in mixed
    assert "\n  no policy was active here\n" in mixed and "none" not in mixed
