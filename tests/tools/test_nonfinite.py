"""hmp.detect_nonfinite(): the op that made NaN or Inf, found at its line, in forward and in backward; and no finding in what is healthy."""

from __future__ import annotations

import contextlib
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


INF = float("inf")
MIN = torch.finfo(torch.float32).min


def causal_mask_of_infinities() -> None:
    mask = torch.full((4, 4), -INF).triu(1)
    (torch.randn(4, 4) + mask).softmax(-1)


def fills_of_sampling() -> None:
    logits = torch.randn(2, 9)
    logits = logits.masked_fill(logits < logits.topk(3)[0][..., -1:], -INF)
    logits[0, 0] = -INF
    logits.log_softmax(-1).sum()
    torch.multinomial(logits.softmax(-1), 1)


def masks_of_extremes_added() -> None:
    """Two masks of the smallest number make -inf, as in many models."""
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, MIN)
    padding = torch.tensor([0.0, 0.0, 0.0, MIN])
    (torch.randn(4, 4) + (mask + padding)).softmax(-1)


def a_float16_mask_of_extremes() -> None:
    scores = torch.randn(4, 4).half() * 20 - 60
    low = torch.finfo(torch.float16).min
    (scores + torch.zeros(4, 4).half().masked_fill(torch.ones(4, 4).triu(1) > 0, low)).softmax(-1)


def a_mask_from_integers() -> None:
    mask = torch.tensor([[1, 1, 0]])
    ((1 - mask.half()) * -1e9 + torch.randn(2, 3).half()).softmax(-1)


def relative_positions() -> None:
    """T5's buckets: the logarithm of position 0 is never used."""
    positions = torch.arange(4)
    torch.where(positions < 2, positions, (torch.log(positions.float() / 2) * 3).to(torch.long))


def unwritten_memory() -> None:
    for make in (torch.empty_like, lambda x: torch.empty(x.shape), lambda x: x.new_empty(64, 64)):
        memory = make(torch.randn(64, 64))
        memory.copy_(torch.full((64, 64), float("nan")))  # whatever was there before
        memory = make(torch.randn(64, 64))
        memory.fill_(1.0).sum()


def data_that_is_masked() -> None:
    torch.baddbmm(torch.full((1, 2, 2), float("nan")), torch.ones(1, 2, 2), torch.ones(1, 2, 2), beta=0).sum()
    data = torch.tensor([1.0, float("nan")]).to(torch.float64)
    torch.nan_to_num(data).sum()
    torch.where(torch.isnan(data), 0.0, data).log_softmax(-1)
    torch.minimum(torch.tensor([0.0, -INF]) * 2, torch.zeros(2)).softmax(-1)


def gradients_at_zero() -> None:
    """torch's own backward divides by the norm, and masks what comes of it."""
    for spread in (lambda x: x.norm(), lambda x: x.std(), lambda x: torch.nn.functional.normalize(x, dim=-1)):
        zeros = torch.zeros(2, 3, requires_grad=True)
        spread(zeros).sum().backward()
        assert zeros.grad is not None
        assert torch.isfinite(zeros.grad).all()


def losses_that_mask_inside() -> None:
    """A target that is longer than the input has no likelihood, and the factorial of 0 no Stirling approximation."""
    logits = torch.zeros(2, 1, 5).log_softmax(-1)
    lengths = torch.tensor([2]), torch.tensor([3])
    impossible = torch.nn.functional.ctc_loss(logits, torch.tensor([[1, 2, 3]]), *lengths, zero_infinity=True)
    counted = torch.nn.functional.poisson_nll_loss(torch.ones(2), torch.tensor([0.0, 3.0]), full=True)
    assert torch.isfinite(impossible + counted)


HEALTHY = [
    causal_mask_of_infinities, fills_of_sampling, masks_of_extremes_added, a_float16_mask_of_extremes, a_mask_from_integers,
    relative_positions, unwritten_memory, data_that_is_masked, gradients_at_zero, losses_that_mask_inside,
]  # fmt: skip


@pytest.mark.parametrize("lists", [None, policy(bf16={"bmm", "linear"}, fp32={"softmax", "log_softmax"})], ids=["plain", "casts"])
def test_what_is_healthy_is_no_finding(lists: hmp.Policy | None):
    with hmp.casts(lists) if lists else contextlib.nullcontext():
        for run in HEALTHY:
            with hmp.detect_nonfinite() as findings:
                run()
            assert findings == [], run


def test_an_inf_of_integers_is_the_finding_once_a_nan_comes_of_it():
    finding = found(lambda: torch.log(torch.arange(4).float()).unsqueeze(0) * 0.0)
    assert (finding.op, finding.made) == ("log", "Inf")


def test_a_row_that_is_masked_whole_is_a_warning_and_no_finding(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="hmp"), hmp.detect_nonfinite() as findings:
        for _ in range(2):
            torch.randn(2, 2).masked_fill(torch.ones(2, 2) > 0, -INF).softmax(-1).sum()
    assert findings == []
    (record,) = caplog.records
    assert record.getMessage().startswith("`softmax` made NaN out of infinities in its inputs")


def test_a_nan_that_a_product_makes_of_an_inf_is_said_with_what_made_the_inf(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="hmp"), hmp.detect_nonfinite("log") as findings:
        nan = torch.full((1, 1), 200.0).exp() @ torch.zeros(1, 1)
    assert nan.isnan().all() and [(each.op, each.made) for each in findings] == [("exp", "Inf")]
    assert [each.getMessage().partition(": ")[0] for each in caplog.records][1:] == ["`matmul` made NaN out of the Inf that `exp` made"]


class Scaled:
    """Training in float16 with a GradScaler: backward overflows when scale * 100 / 8 is beyond 65504."""

    def __init__(self, scale: float, factor: float = 100.0) -> None:
        self.layer = torch.nn.Linear(4, 4)
        self.factor = factor
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        loss = (self.layer(torch.ones(2, 4)).half() * self.factor).float().mean()
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        self.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_an_overflow_that_the_scaler_skips_is_no_finding():
    run = Scaled(2.0**18)
    before = run.layer.weight.detach().clone()
    with hmp.detect_nonfinite() as findings:
        run.step()
        assert torch.equal(run.layer.weight, before) and run.scaler.get_scale() == 2.0**17
        for _ in range(6):
            run.step()
    assert findings == []
    assert not torch.equal(run.layer.weight, before)


class Hidden(torch.autograd.Function):
    """Its backward overflows, and hides that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return (gradient.half() * 60000).clamp(max=1).float()


def test_an_overflow_that_is_not_of_the_scale_or_that_nobody_skips_is_a_finding():
    assert found(Scaled(2.0**18).backward).node == "MulBackward0"  # no step, which would skip it

    def step(run: Scaled, loss: Callable[[Scaled], torch.Tensor]) -> Any:
        run.scaler.scale(loss(run)).backward()
        run.scaler.step(run.optimizer)
        run.scaler.update()

    x = torch.ones(2, 4)
    # at scale 1 it is not the scale that overflows: the scaler would skip every step
    assert found(lambda: step(Scaled(1.0), lambda run: (run.layer(x).half() * 100).float().sum() * 2000)).node == "MulBackward0"
    hidden = found(lambda: step(Scaled(1024.0), lambda run: Hidden.apply(run.layer(x)).sum()))  # a step is taken after it
    assert (hidden.aten, hidden.direction) == ("mul", "backward")


@pytest.mark.parametrize("masked", [MIN, -1e9])
def test_hmps_own_saturation_is_no_finding(masked: float):
    """R12: scores that a mask pushes beyond float16 are cast to its finite extreme."""
    with hmp.casts(policy(bf16={"softmax", "add", "matmul"}, dtype=torch.float16)), hmp.detect_nonfinite() as findings:
        scores = torch.randn(4, 4) + torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, masked)
        scores.softmax(-1)
    assert findings == []


class _Masked(torch.nn.Module):
    """Makes an Inf that is meant, in a module of its own, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.block = torch.nn.ModuleDict({"mask": _Mask()})
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        scores = self.layer(x) + self.block["mask"](x)
        return (torch.softmax(scores, -1) * scale).exp()


class _Mask(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = torch.tensor([1.0, 1.0, 0.0]).expand_as(x)
        return torch.log(keep + x.detach() * 0)  # -Inf where nothing is kept


@pytest.mark.parametrize("ignore", [["*.mask"], ["log"], {"exp", "block.ma?k"}], ids=["pattern", "op", "set"])
def test_infs_that_are_meant_are_ignored_and_no_others(ignore: Any) -> None:
    model, x = _Masked(), torch.randn(2, 3)
    finding = found(lambda: model(x))
    assert (finding.op, finding.module) == ("log", "block.mask")
    with hmp.detect_nonfinite(ignore=ignore) as findings:
        model(x).sum().backward()
    assert findings == []
    with pytest.raises(hmp.NonFiniteError) as beside, hmp.detect_nonfinite(ignore=["*.mask"]):
        model(x, scale=1000.0)
    assert beside.value.finding.op == "exp"
    with pytest.raises(hmp.NonFiniteError), hmp.detect_nonfinite(ignore=["sqrt"]):
        torch.sqrt(-torch.ones(2))  # NaN
    for wrong in ("*.mask", [3], 3):
        with pytest.raises(hmp.HmpError, match=r"^ignore="):
            hmp.detect_nonfinite(ignore=wrong)
