"""The benchmark runs, its statistics are right, and it refuses to compare what is not the same. How fast anything is, no test says."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hmp
from autocast_kit import needs_autocasts_lstm
from benchmarks.__main__ import PARTS, chosen_scale, is_whole, parser, said
from benchmarks.cost import best, calls, depth, floor, in_fp8, interleaved, memory, saved, step_rows, steps
from benchmarks.harness import alive, opening, results, sides, stats, verify
from benchmarks.workloads import by_op, known, models
from hmp import torch_private
from hmp.ops import op_facts, sites

ROOT = Path(__file__).parents[2]


def smallest(folder: Path, *more: str) -> tuple[str, str, dict[str, Any]]:
    """What the smallest run prints, and the report and the samples that it writes."""
    command = [sys.executable, "-m", "benchmarks", "--smallest", "--threads", "1", "--write", str(folder), *more]
    # this processor's own kernels: torch.autocast itself has no LSTM with those of SSE4.1
    environment = {name: value for name, value in os.environ.items() if name not in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    written = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert written["machine"]["torch"] == torch.__version__
    assert written["failures"] == []
    return run.stdout, (folder / "RESULTS.md").read_text(encoding="utf-8"), written["samples"]


# How the rows of a run at the tiny size begin, and their targets
TARGETS = {
    "training step, same lists, hmp / torch.autocast: geometric mean of 8": "≤ 0.95",
    "training step, same lists, hmp / torch.autocast: none above": "≤ 1.00",
    "training step, same lists, hmp / pure bfloat16: geometric mean of 8": "≤ 1.10",
    "training step, best lists, hmp / torch.autocast: geometric mean of 8": "≤ 0.92",
    "training, best lists: mean loss of the first steps, from float32's": "≤ 2 %",
    "inference, no_grad, hmp / torch.autocast: geometric mean of 8": "≤ 0.70",
    "inference, no_grad, hmp / torch.autocast: none above": "≤ 1.00",
    "inference, inference_mode, hmp / torch.autocast: geometric mean of 8": "≤ 0.70",
    "inference, inference_mode, hmp / torch.autocast: none above": "≤ 1.00",
    "inference on one example, no_grad, hmp / torch.autocast: geometric mean of 8": "≤ 0.60",
    "inference on one example, inference_mode, hmp / torch.autocast: geometric mean of 8": "≤ 0.60",
    "inference, no_grad, tiny, hmp / pure bfloat16: geometric mean of 8": "≤ 1.08",
    "inference, inference_mode, tiny, hmp / pure bfloat16: geometric mean of 8": "≤ 1.08",
    "bytes saved for backward, hmp / torch.autocast: attention models from d = 128 on": "≤ 0.94",
    "bytes saved for backward, hmp / torch.autocast: none above": "≤ 1.00",
    "optimizer step, hmp inside disable_casts() / plain torch": "≤ 1.05",
    "optimizer step, hmp / plain torch": "≤ 1.05",
    "zero_grad, hmp inside disable_casts() / plain torch": "≤ 1.05",
    "zero_grad, hmp / plain torch": "≤ 1.05",
    "call with nothing to cast, hmp / floor: linear": "≤ 1.30",
    "call inside disable_casts(), time added": "≤ 80 ns",
    "compiled training step, hmp / torch.autocast": "≤ 1.02",
    "compiled inference step, hmp / torch.autocast": "≤ 1.02",
    "warm compile time of both, hmp / torch.autocast": "≤ 1.05",
    "call under a saved list, time added": "0 for an op on no list",
    "bytes kept for backward, saved8 / torch.autocast, width 32: geometric mean of 7": "≤ 0.55",
    "training step, saved8 / torch.autocast, width 32: geometric mean of 7": "≤ 1.15",
    "step of bert 32: saved8's time / that of checkpoints that keep as many bytes": "≤ 1",
}


def opens_with_six_sentences_and_the_picture(report: str) -> bool:
    """Whether these stand first, in this order, and nothing between them."""
    lines = [line for line in report.splitlines() if line]
    titles = [f"- **{title}**: " for title in opening.TOPICS.values()]
    sentences = [line for line, title in zip(lines[1:], titles, strict=False) if line.startswith(title) and line.endswith(".")]
    drawn = importlib.util.find_spec("matplotlib") is None or lines[7] == "![steps](steps.png)"
    return len(titles) == 6 and lines[0] == "# Results" and sentences == lines[1:7] and drawn


@pytest.mark.nightly
@pytest.mark.slow
def test_the_smallest_run_prints_and_writes_every_row(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    output, report, samples = smallest(tmp_path)
    for beginning in (
        *(f"call with nothing to cast, hmp / floor: {name}" for name in calls.loops()),
        "call inside disable_casts()",
        "a weight's copy used again, time added to linear",
        "call under hmp.record(), time added",
        "after revert()",
        *TARGETS,
        "gradients' error",
        "import hmp",
        "convert(), the first",
        "convert(), after a revert()",
        "memory held by caches",
        "added per op with nothing to cast, over layers",
        "added per op with nothing to cast, over parameters",
    ):
        assert f"\n| {beginning}" in report, beginning
        assert f"\n{beginning}" in output, beginning
    targets = {row["what"]: row["target"] for row in json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["rows"]}
    for beginning, target in TARGETS.items():
        assert {said for what, said in targets.items() if what.startswith(beginning)} == {target}, beginning
    assert opens_with_six_sentences_and_the_picture(report)
    # A machine without FP8 arithmetic measures no step in FP8
    unmeasured = [line for line in report.splitlines() if "not measured" in line]
    assert all(line.startswith("| training step, linear in FP8") for line in unmeasured), unmeasured
    assert list(samples["steps"]) == [f"{name} tiny" for name in models.MODELS]
    assert all(len(of["hmp"]) == 1 for model in samples["steps"].values() for of in model["seconds a step"].values())
    assert all(set(model["seconds a step"]["training"]) == set(steps.SIDES) for model in samples["steps"].values())


def test_parts_models_and_sizes_can_be_chosen() -> None:
    options = parser().parse_args(["--only", "memory,depth", "--models", "mlp", "--sizes", "tiny,small", "--rounds", "2"])
    assert (options.only, options.models) == (["memory", "depth"], ["mlp"])
    much = chosen_scale(options)
    assert (much.sizes, much.gradient_sizes, much.call_rounds, much.rounds["small"]) == (("tiny", "small"), ("tiny", "small"), 2, 2)
    assert said(options) == " --only memory,depth --models mlp --sizes tiny,small --rounds 2"
    assert parser().parse_args([]).only == list(PARTS)


def test_only_the_whole_takes_the_place_of_the_committed_results() -> None:
    for line, whole in (("", True), ("--full --threads 2", True), ("--smallest", False), ("--only calls", False), ("--rounds 2", False)):
        assert is_whole(parser().parse_args(line.split())) is whole, line
    # where they were written is nobody's business
    assert said(parser().parse_args(["--full", "--write", "somewhere"])) == " --full"


@pytest.mark.skipif(torch_private.packed is None, reason="this torch (2.9 and older) does not tell what its nodes saved")
def test_what_is_alive_is_the_graphs_and_pythons_each_memory_once() -> None:
    """gelu keeps its input of 8 rows once for both calls: 4 bytes a number or, from the next call on, one and eight for each 128."""
    weight, x = torch.randn(1024, 128, requires_grad=True), torch.randn(8, 128)

    def sums() -> torch.Tensor:
        hidden = torch.nn.functional.linear(x, weight)
        return torch.nn.functional.gelu(hidden).sum() + torch.nn.functional.gelu(hidden).sum()

    def forward() -> torch.Tensor:
        return torch.nn.functional.gelu(sums())

    with hmp.casts("saved8"):
        forward()  # which makes memory that packing uses again
    numbers, loss = 8 * 1024, 4 + 4  # and the sum that gelu keeps
    assert alive.bytes_alive(forward, [weight, x]) == 4 * numbers + loss
    with hmp.casts(hmp.Policy("packed", saved={"gelu"}, saved_recipe="int8")):
        assert alive.bytes_alive(forward, [weight, x]) == numbers + 8 * numbers // 128 + loss
    assert saved._between([(1.0, 1.0), (0.6, 1.1), (0.2, 1.5)], 0.4) == pytest.approx(1.3)


@pytest.mark.native_kernels
def test_a_side_that_runs_an_op_in_another_dtype_is_refused() -> None:
    needs_autocasts_lstm()
    case = models.build("lstm", "tiny")
    with pytest.raises(verify.Mismatch, match="lstm tiny, training: mkldnn_rnn_layer"):
        verify.same_in_each(case, sides.autocast("cpu"), sides.under_hmp("habana"), known.TOLERANCE, {})


def measured(of_hmp: list[float], pure: list[float] | None = None, apart: float = 0.001) -> step_rows.Measured:
    """A model whose step takes torch.autocast one second in every round."""
    seconds = {"autocast": [1.0] * len(of_hmp), "hmp": of_hmp, "best": [0.9] * len(of_hmp), "float32": [2.0] * len(of_hmp)}
    samples = {task: seconds | {"pure": pure or [1.0] * len(of_hmp)} for task in interleaved.TASKS}
    return step_rows.Measured("tiny", samples, "habana", {"best": apart, "autocast": 0.002})


def test_a_result_within_noise_is_not_claimed() -> None:
    found = results.Found("steps")
    noisy = [0.9, 0.97, 1.05, 0.93, 1.0]
    step_rows.training(found, {"mlp tiny": measured(noisy)})
    step_rows.inference(found, {"mlp tiny": measured(noisy)}, list(interleaved.TASKS), ["tiny"])
    rows = {row.what: row for row in found.rows}
    assert rows["training step, same lists, hmp / torch.autocast: geometric mean of 1"].verdict == "missed, within noise"
    assert rows["training step, same lists, hmp / torch.autocast: none above"].verdict == "met"
    assert rows["training step, best lists, hmp / torch.autocast: geometric mean of 1"].verdict == "met"
    assert rows["inference on one example, no_grad, hmp / torch.autocast: geometric mean of 1"].verdict == "missed"
    assert found.opening["same lists"].startswith("it takes torch.autocast's time within noise (0.970 ± ")
    assert found.opening["best lists"].startswith("it takes 10.0 % less time than torch.autocast (0.900 ± 0.000)")
    assert "Plain float32 takes 100.0 % more time than torch.autocast (2.000 ± 0.000)" in found.opening["same lists"]
    assert "the bfloat16 model's time within noise" in found.opening["pure"]


def test_none_above_means_by_more_than_noise() -> None:
    def verdict(*seconds: list[float]) -> str:
        found = results.Found("steps")
        step_rows.training(found, {f"m{at} tiny": measured(each) for at, each in enumerate(seconds)})
        return found.rows[1].verdict

    assert verdict([0.9] * 5) == "met"
    assert verdict([0.9] * 5, [0.95, 1.01, 1.1, 0.97, 1.05]) == "met, within noise"
    assert verdict([0.9] * 5, [1.1] * 5) == "missed"
    assert verdict([1.1]) == "-"


def test_pure_bfloat16_is_compared_at_each_size() -> None:
    found = results.Found("steps")
    small = step_rows.Measured("small", measured([1.2] * 5, pure=[1.0] * 5).samples)
    step_rows.inference(found, {"mlp tiny": measured([1.0] * 5), "mlp small": small}, ["no_grad"], ["tiny", "small"])
    rows = {row.what.partition(" hmp / pure")[0]: row.verdict for row in found.rows if "pure" in row.what}
    assert rows == {"inference, no_grad, tiny,": "met", "inference, no_grad, small,": "missed"}


@pytest.mark.parametrize(
    ("last", "verdict"),
    [((105.0, 10.0), "met, within noise"), ((60.0, 10.0), "met"), ((444.0, 1526.0), "missed, within noise"), ((444.0, 20.0), "missed")],
)
def test_growth_that_the_noise_hides_is_called_so(last: tuple[float, float], verdict: str) -> None:
    """What is added to an op is small beside what the C library's heap does to it: such a row was called met."""
    row = depth._row("parameters", [(8896, stats.Estimate(100.0, 5.0, 7)), (2108416, stats.Estimate(*last, 7))])
    assert (row.target, row.verdict) == ("flat", verdict)


def test_losses_far_from_float32_s_miss() -> None:
    for apart, met in ((0.0199, True), (0.021, False), (math.inf, False)):
        row = step_rows.losses_row({"mlp tiny": measured([1.0]), "vit tiny": measured([1.0], apart=apart)})
        assert (row.target, row.met) == ("≤ 2 %", met)
    # a loss that is not a number is infinitely far
    assert best.Run(1.0, math.nan).apart(best.Run(1.0, 2.0)) == math.inf
    assert best.Run(1.0, 1.9).apart(best.Run(1.0, 2.0)) == pytest.approx(0.05)


def test_the_fastest_lists_are_chosen_of_those_that_keep_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    # by the step's seconds and the loss under each of the lists; float32's loss is 2
    runs = {"habana": best.Run(0.5, 2.5), "habana-o2": best.Run(0.7, 2.01), "torch-cpu": best.Run(0.9, 2.0)}
    monkeypatch.setattr(best, "candidates", lambda name, device: {lists: lists for lists in runs})
    monkeypatch.setattr(best, "under_hmp", lambda policy: sides.Side(policy))
    monkeypatch.setattr(best, "_trained", lambda case, side, steps: runs.get(side.name, best.Run(1.0, 2.0)))
    # each computes another way, in bfloat16
    computed = iter([{("addmm", ("bfloat16",)): count} for count in range(1, 7)])
    monkeypatch.setattr(verify, "recorded", lambda side, function: next(computed))
    assert best.choose("mlp", "tiny", "cpu", 2).lists == "habana-o2"
    runs.update({name: best.Run(0.5, math.nan) for name in runs})
    choice = best.choose("mlp", "tiny", "cpu", 2)
    assert (choice.lists, list(choice.tried)) == ("torch-cpu", list(runs))


def test_two_policies_that_differ_in_one_op_are_told_apart() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    x = torch.randn(2, 8)
    with pytest.raises(verify.Mismatch) as raised:
        verify.verify("block", lambda: block(x), sides.under_hmp("torch-cpu"), sides.under_hmp("habana-o2"), 1.0, {})
    assert "native_layer_norm(float32" in str(raised.value)
    assert "addmm" not in str(raised.value)
    excused = verify.verify(
        "block", lambda: block(x), sides.under_hmp("torch-cpu"), sides.under_hmp("habana-o2"), 1.0, {"native_layer_norm": "reason"}
    )
    assert excused.allowed == ("reason",)


def test_results_that_are_apart_are_refused() -> None:
    noisy = iter([torch.ones(2)] * 5 + [torch.full((2,), 1.5)])
    with pytest.raises(verify.Mismatch, match=r"results 5\.0e-01 apart"):
        verify.verify("noise", lambda: next(noisy), sides.plain(), sides.plain(), 0.4, {})


def test_medians_and_noise() -> None:
    assert stats.mad([1, 2, 3, 4, 100]) == 1
    found = stats.estimate([1, 2, 3, 4, 100])
    assert found.value == 3
    # Student's 2.8475 for four degrees of freedom, 5 / 4.2 for a deviation of five, and 1.2533 x 1.4826 x 1 / sqrt(5)
    assert found.noise == pytest.approx(2.8475 * 5 / 4.2 * 1.858143 / 5**0.5, rel=1e-4)
    assert stats.estimate([1.0, 2.0]).noise == math.inf


def test_ratios_are_taken_round_by_round() -> None:
    # the second round was ten times as slow for both
    ratio = stats.paired_ratio([1, 10, 1], [2, 20, 2])
    assert (ratio.value, ratio.noise) == (0.5, 0)
    assert stats.paired_difference([5, 7, 9], [1, 1, 1]).value == 6
    assert stats.geometric_mean([2, 0.5]) == pytest.approx(1)
    assert math.isnan(stats.geometric_mean([]))
    # 10 % and 10 %, independent, over two
    mean = stats.mean_ratio([stats.Estimate(2, 0.2, 5), stats.Estimate(0.5, 0.05, 5)])
    assert (mean.value, mean.noise) == (pytest.approx(1), pytest.approx(0.1 * math.sqrt(2) / 2))


def test_above_means_by_more_than_noise() -> None:
    assert stats.Estimate(1.05, 0.02, 5).above(1.0)
    assert not stats.Estimate(1.05, 0.06, 5).above(1.0)
    assert not stats.Estimate(0.9, 0.0, 5).above(1.0)
    assert stats.Estimate(1.05, math.inf, 1).above(1.0)
    rows = [
        results.at_most("x", 1.3, stats.Estimate(value, noise, 5), "") for value, noise in ((1.1, 0.1), (1.2, 0.3), (1.4, 0), (2, math.inf))
    ]
    assert [(row.target, row.verdict) for row in rows] == [
        ("≤ 1.30", "met"),
        ("≤ 1.30", "met, within noise"),
        ("≤ 1.30", "missed"),
        ("≤ 1.30", "-"),
    ]
    assert stats.Estimate(1.05, math.inf, 1).text(2) == "1.05"
    assert stats.Estimate(1.05, 0.06, 5).text(2) == "1.05 ± 0.06"


def test_noise_of_a_quotient() -> None:
    # 3/4 and, relative to each, 10 % and 10 %: 14 % of 0.75
    found = stats.ratio_of(stats.Estimate(3, 0.3, 5), stats.Estimate(4, 0.4, 5))
    assert found.value == 0.75
    assert found.noise == pytest.approx(0.75 * 0.1 * math.sqrt(2))


def test_the_floor_stands_in_torch_s_places_and_goes_again() -> None:
    before = calls._places()
    with floor.in_place():
        assert not any(a is b for a, b in zip(before[:3], calls._places()[:3], strict=True))
        for loop in calls.loops().values():
            loop(range(1))
        with pytest.raises(AssertionError, match="something to cast"):
            torch.nn.functional.linear(torch.randn(2, 2), torch.randn(2, 2))
    assert all(a is b for a, b in zip(before, calls._places(), strict=True))
    assert calls.untouched()


def test_saved_bytes_count_a_storage_once_and_no_parameter() -> None:
    # of a linear layer the input is saved, 4 x 32 floats, and the weight, which is the model's; of the loss the 4 x 10 of log_softmax,
    # the labels, and one number
    case = models.Case("one", "tiny", torch.nn.Linear(32, 10), {"x": torch.randn(4, 32), "target": torch.arange(4)}, computes_loss=False)
    assert memory.saved_bytes(case, sides.plain()) == 4 * 32 * 4 + 4 * 10 * 4 + 4 * 8 + 4


def test_the_table_says_met_missed_or_nothing() -> None:
    rows = [results.Row("a | b", "≤ 1", "0.5", True), results.Row("c", "≤ 1", "2", False), results.Row("d", "-", "?", None)]
    assert results.table(rows).splitlines()[2].split() == ["a", "|", "b", "≤", "1", "0.5", "met"]
    assert results.table(rows, markdown=True).splitlines()[2:] == [
        "| a \\| b | ≤ 1 | 0.5 | met |",
        "| c | ≤ 1 | 2 | missed |",
        "| d | - | ? | - |",
    ]


def test_fp8_is_timed_where_the_device_has_it_and_else_says_why_not() -> None:
    found = in_fp8.run(3, "cpu")
    assert [row.met for row in found.rows] == [None, None]
    assert all(row.result.startswith("not measured: torch has no such kernel for cpu") for row in found.rows)
    timed = results.Found("fp8")
    in_fp8.measure(timed, ["tensorwise"], rounds=1, device="cpu", width=64, sequences=1, tokens=16)
    assert list(timed.samples) == ["autocast", "hmp", "tensorwise"] and len(timed.rows) == 1
    assert not hmp.is_converted()


def test_the_table_of_low_precision_kernels_has_every_op_on_a_presets_low_list() -> None:
    measured = {call.op for call in by_op.calls()}
    assert by_op.listed() - by_op.LEFT_OUT <= measured
    assert measured.isdisjoint(by_op.LEFT_OUT)
    slow = {op for op in measured if not op_facts.SLOW_WITHOUT_INSTRUCTIONS.isdisjoint(sites.ancestry(op))}
    assert {"linear", "conv2d", "lstm", "gru_cell", "scaled_dot_product_attention"} <= slow
