"""The benchmark runs, its statistics are right, and it refuses to compare what is not the same. How fast anything is, no test says."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import hmp
from benchmarks.__main__ import PARTS, chosen_scale, is_whole, parser, said
from benchmarks.cost import caches, calls, floor, memory
from benchmarks.harness import results, sides, stats, verify
from benchmarks.workloads import known, models

ROOT = Path(__file__).parents[2]


def smallest(folder: Path, *more: str) -> tuple[str, str, dict[str, Any]]:
    """What the smallest run prints, and the report and the samples that it writes."""
    command = [sys.executable, "-m", "benchmarks", "--smallest", "--threads", "1", "--write", str(folder), *more]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    written = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert written["machine"]["torch"] == torch.__version__
    assert written["failures"] == []
    return run.stdout, (folder / "RESULTS.md").read_text(encoding="utf-8"), written["samples"]


@pytest.mark.slow
def test_the_smallest_run_prints_and_writes_every_row(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    output, report, samples = smallest(tmp_path)
    for beginning in (
        *(f"call with nothing to cast, hmp / floor: {name}" for name in calls.loops()),
        "call inside disable_casts()",
        "a weight's copy used again, time added to linear",
        "after revert()",
        "training step, hmp / autocast: geometric mean of 8",
        "training step, hmp / autocast: none above",
        "inference, no_grad",
        "inference, inference_mode",
        "bytes saved for backward, hmp / autocast: attention models",
        "bytes saved for backward, hmp / autocast: none above",
        "gradients' error",
        "training step, habana / pure bf16 model",
        "import hmp",
        "convert(), the first",
        "convert(), after a revert()",
        "memory held by caches",
        "added per op with nothing to cast, over layers",
        "added per op with nothing to cast, over parameters",
    ):
        assert f"\n| {beginning}" in report, beginning
        assert f"\n{beginning}" in output, beginning
    assert list(samples["steps"]) == [f"{name} tiny" for name in models.MODELS]
    assert all(len(of["hmp"]) == 1 for model in samples["steps"].values() for of in model["seconds a step"].values())


def test_parts_of_it_run_alone(tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    row = {"what": "after revert()", "result": "other objects"}
    before.write_text(json.dumps({"command": "python -m benchmarks", "machine": {"load before": 0.5}, "rows": [row]}))
    chosen = ("--only", "calls,training,memory", "--models", "mlp,lstm", "--before", "the commit before", str(before))
    output, report, samples = smallest(tmp_path, *chosen)
    assert "## Beside the commit before\n" in report
    assert "\n| after revert() | other objects | the same objects |\n" in report
    assert list(samples) == ["calls", "steps", "memory"]
    assert list(samples["steps"]) == ["mlp tiny", "lstm tiny"]
    assert list(samples["steps"]["mlp tiny"]["seconds a step"]) == ["training"]
    for beginning in ("after revert()", "training step, hmp / autocast: geometric mean of 2", "bytes saved for backward"):
        assert f"\n| {beginning}" in report
        assert f"\n{beginning}" in output


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


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--only", "speed"])


def test_a_side_that_runs_an_op_in_another_dtype_is_refused() -> None:
    case = models.build("lstm", "tiny")
    with pytest.raises(verify.Mismatch, match="lstm tiny, training: mkldnn_rnn_layer"):
        verify.same_in_each(case, sides.autocast("cpu"), sides.under_hmp("habana"), known.TOLERANCE, {})


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


def test_equal_sides_have_the_same_ops_and_the_same_bits() -> None:
    checked = verify.same_in_each(models.build("mlp", "tiny"), sides.autocast("cpu"), sides.under_hmp("torch-cpu"), known.TOLERANCE, {})
    assert {task: (of.ops, of.apart) for task, of in checked.items()} == {"training": (7, 0), "no_grad": (5, 0), "inference_mode": (5, 0)}


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


def test_sides_take_turns_at_being_first() -> None:
    assert [sides.rotated([1, 2, 3], number) for number in range(4)] == [[1, 2, 3], [2, 3, 1], [3, 1, 2], [1, 2, 3]]


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


def test_caches_that_grow_are_told_from_those_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"bytes": 0, "grow": 0}

    def info() -> types.SimpleNamespace:
        held["bytes"] += held["grow"]
        return types.SimpleNamespace(entries=1, bytes=held["bytes"], limit=1000, hits=2, misses=1)

    monkeypatch.setattr(hmp, "cache_info", info, raising=False)
    monkeypatch.setattr(hmp, "clear_cache", lambda: held.update(bytes=0, grow=0), raising=False)
    for grow, met in ((0, True), (8, False), (400, False)):
        held.update(bytes=0, grow=grow)
        (row,) = caches.run(20, "cpu").rows
        assert row.met is met
    monkeypatch.delattr(hmp, "cache_info")
    (row,) = caches.run(20, "cpu").rows
    assert (row.result, row.met) == ("this hmp has no cache", None)
