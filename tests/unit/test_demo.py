"""The demo: that its check is real, and how it looks.

No public call makes an op of the demo run elsewhere than its policy says, or a table of given numbers.
"""

from __future__ import annotations

import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import hmp

pytest.importorskip("rich")
pytest.importorskip("sklearn")

from hmp.cli.demo import check, show
from hmp.cli.demo.models import MODELS, DemoModel
from hmp.cli.demo.show import print_ops, print_results
from hmp.cli.demo.step_report import StepObserver, StepReport
from hmp.cli.demo.training import AUTOCAST, FLOAT32, HMP, Outcome

BF16, FP32 = torch.bfloat16, torch.float32


# -- its check


def report_of(*ran: tuple[str, torch.dtype]) -> StepReport:
    return StepReport(dict.fromkeys(ran, 1), casts=0, saved_bytes=0)


@pytest.mark.parametrize(
    ("ran", "where"),
    [
        ([("addmm", FP32)], "float32"),
        ([("addmm", FP32), ("addmm", BF16)], "bfloat16 and float32"),
        ([("mm", BF16)], "no dtype: it did not run"),
    ],
)
def test_check_names_the_op_that_ran_elsewhere(ran: list[tuple[str, torch.dtype]], where: str) -> None:
    assert check.op_failures("m", {"linear": BF16}, report_of(*ran)) == [
        f"m: the policy names linear for bfloat16, but aten.addmm ran in {where}"
    ]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_check_covers_every_listed_op_that_a_model_calls(make: type[DemoModel]) -> None:
    policy = hmp.Policy.load("habana")
    wanted = check.named(policy, make.calls)
    assert set(wanted) == make.calls, "each op that a model says it calls is on one of the lists"
    # float32 has each of these ops; so a name without its ATen op in the table, or under a wrong one, shows here
    batch = torch.rand(8, 1, 8, 8)
    model = make()
    observer = StepObserver(model)
    with observer.dispatched(), observer.forward(), FLOAT32.around_forward():
        F.cross_entropy(model(batch), torch.zeros(8, dtype=torch.int64))
    assert check.op_failures("m", dict.fromkeys(wanted, FP32), observer.report()) == []


# -- how it looks


@pytest.mark.parametrize("width", [60, 200])
def test_results_fit_into_the_terminal_and_nothing_of_them_is_lost(width: int) -> None:
    ops = ["native_layer_norm", "nll_loss_forward", "max_pool2d_with_indices", "_log_softmax", "convolution", "native_batch_norm"]
    outcomes = [
        Outcome(model, precision, 98.2, 0.01234, StepReport(dict.fromkeys(itertools.product(ops, (BF16, FP32)), 1), 70, 104_550_596))
        for model in MODELS
        for precision in (FLOAT32.name, AUTOCAST.name, HMP.name)
    ]
    page = io.StringIO()
    print_results(Console(file=page, width=width), outcomes, show.slower(12.34))
    print_ops(Console(file=page, width=width), outcomes)
    lines = page.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in page.getvalue()
    rows = [line.split() for line in lines if "ms" in line]
    assert [row[-7:] for row in rows] == [["98.2", "%", "12.3", "ms", "104,550,596", "B", "70"]] * 6
    words = page.getvalue().replace(",", " ").split()
    assert {op: words.count(op) for op in ops} == dict.fromkeys(ops, 12)
