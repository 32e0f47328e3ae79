"""The statistics of the benchmark are right, and it refuses to compare what is not the same. How fast anything is, no test says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from autocast_kit import needs_autocasts_lstm
from benchmarks.__main__ import PARTS
from benchmarks.harness import sides, stats, verify
from benchmarks.workloads import known, models
from command_kit import ROOT, python


@pytest.mark.slow
def test_the_smallest_run_measures_every_part_and_writes_its_report(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    needs_autocasts_lstm()
    done = python("-m", "benchmarks", "--smallest", "--threads", "1", "--only", ",".join(PARTS), "--write", tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert written["failures"] == [] and len(written["rows"]) > 40
    assert (tmp_path / "RESULTS.md").read_text(encoding="utf-8").startswith("# Results")


@pytest.mark.native_kernels
def test_a_side_that_runs_an_op_in_another_dtype_is_refused() -> None:
    needs_autocasts_lstm()
    case = models.build("lstm", "tiny")
    with pytest.raises(verify.Mismatch, match="lstm tiny, training: mkldnn_rnn_layer"):
        verify.same_in_each(case, sides.autocast("cpu"), sides.under_hmp("habana"), known.TOLERANCE, {})


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
