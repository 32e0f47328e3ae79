"""What a Report is good for afterwards: text, JSON, checks in tests, sums over runs and ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hmp
from command_kit import python
from page_kit import of_report
from trap_kit import policy

GOLDEN = Path(__file__).parents[1] / "support" / "golden"
LISTS = policy(bf16={"linear"}, fp32={"softmax"})

# A report by hand: nothing in it is measured.
LINEAR = ("linear", "bf16", "linear (lists/bf16.txt:3)", "float32", "bfloat16", "bfloat16")
SOFTMAX = ("softmax", "fp32", "softmax (lists/fp32.txt:1)", "bfloat16", "float32", "float32")
SOLVE = ("linalg.solve", "bf16", "linalg.solve", "float32", "float32", "float32")
ROWS = tuple(
    of_report("rows", *values)
    for values in (
        (*LINEAR, "encoder.0", "model.py", 12, 10, 30, 0, 122880, 2e-3, 5e-4),
        (*LINEAR, "encoder.1", "model.py", 12, 10, 20, 10, 81920, 2e-3, 3e-4),
        (*SOFTMAX, "head", "model.py", 30, 10, 10, 0, 2048, 1e-4, 2e-5),
        (*SOLVE, "head", "model.py", 31, 1, 2, 0, 512, 1e-3, 1e-6, 1),
        ("matmul", "R7", "", "float32, bfloat16", "float32", "float32", "head", "model.py", 33, 2, 2, 0, 64, 1e-5, 1e-6, 0, 1),
        ("tanh", "unlisted", "", "bfloat16", "bfloat16", "bfloat16", "head", "model.py", 40, 10, 0, 0, 0, 3e-4),
    )
)
REGION, NO_KERNEL = "torch.autocast, enabled at train.py:7", "there is no bfloat16 kernel for it (R11)"
VIOLATIONS = (
    of_report("violations", SOFTMAX[0], SOFTMAX[2], "float32", "bfloat16", "region", REGION, "head", "model.py", 30, 4),
    of_report("violations", SOLVE[0], SOLVE[2], "bfloat16", "float32", "no_kernel", NO_KERNEL, "head", "model.py", 31, 1),
)
MODELS = (
    of_report("models", "Net", {"float32": 1234, "bfloat16": 16}, 1234, 4968, {"encoder.0": 2048, "encoder.1": 2048, "head": 512}, 1, 512),
    of_report("models", "Teacher", {"float32": 10}, 0, 40, None, 2),
)
POLICY = {"name": "mine", "dtype": "bfloat16", "bf16": ["linalg.solve", "linear"], "fp32": ["gelu", "softmax"], "promote": []}
ABOUT = {
    "policies": [{**POLICY, "fingerprint": "0123456789ab"}],
    "never_called": ["gelu"],
    "uncast_calls": 7,
    "seconds": 0.25,
    "torch": "2.13.0",
}


def by_hand() -> hmp.types.Report:
    return hmp.types.Report(ROWS, VIOLATIONS, MODELS, **ABOUT)


def test_the_json_is_that_of_releases_before(tmp_path: Path) -> None:
    kept = GOLDEN / "report.json"
    made = json.loads(by_hand().to_json(tmp_path / "report.json").read_text(encoding="utf-8"))
    assert made == json.loads(kept.read_text(encoding="utf-8")), f"look at the difference; when it is meant, write it to {kept.name}"


def test_tables_add_up_by_what_is_asked_for() -> None:
    modules = by_hand().grouped("module")
    assert [(row.module, row.calls, row.casts, row.cast_bytes) for row in modules] == [
        ("encoder.0", 10, 30, 122880),
        ("encoder.1", 10, 20, 81920),
        ("head", 23, 14, 2624),
    ]
    by_calls = by_hand().grouped("op", "calls")
    assert [(row.op, row.calls) for row in by_calls][:2] == [("linear", 20), ("softmax", 10)]
    _, _, head, first, second = (line.split() for line in by_hand().table("module", "calls").splitlines())
    assert head[:2] == ["head", "13"]  # tanh, on no list, is left out
    assert first[:6] == ["encoder.0", "10", "30", "0", "120.0", "KiB"] and second[:6] == ["encoder.1", "10", "20", "10", "80.0", "KiB"]
    for wrong in (("colour",), ("op", "colour")):
        with pytest.raises(hmp.HmpError, match=r"invalid .*'colour'"):
            by_hand().table(*wrong)


def test_an_op_has_one_row_with_its_dtypes_and_rules_below_it() -> None:
    low = of_report("rows", *LINEAR[:3], "bfloat16", *LINEAR[4:], "head", "model.py", 50, 5, 0, 0, 0, 1e-3)
    lines = hmp.types.Report((*ROWS, low)).table("op").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("linear "))
    assert lines[at].split()[1:4] == ["25", "50", "10"]  # 10 + 10 + 5 calls, 30 + 20 casts, 10 more avoided
    assert lines[at + 1 : at + 3] == [
        "  float32 → bfloat16 → bfloat16  20 calls  bf16: linear (lists/bf16.txt:3)",
        "  bfloat16 → bfloat16 → bfloat16  5 calls  bf16: linear (lists/bf16.txt:3)",
    ]
    assert [line.split()[0] for line in lines if line[:1].isalpha()] == ["op", "linear", "softmax", "linalg.solve", "matmul"]


ROW = '{"op": "linear", "rule": "bf16"}'
NO_REPORTS = [
    "{", "[]", '{"hmp_report": 99, "rows": []}', '{"hmp_report": 1}', '{"hmp_report": 1, "rows": [{}]}',
    '{"hmp_report": 1, "rows": [3]}', f'{{"hmp_report": 1, "rows": [{ROW}], "models": 3}}',
]  # fmt: skip


@pytest.mark.parametrize("text", [None, *NO_REPORTS])
def test_what_is_no_report_is_refused_by_its_name(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "r.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(hmp.HmpError) as caught:
        hmp.types.Report.load(file)
    assert str(file) in str(caught.value)
    for call in (lambda: hmp.types.Report.from_dict(3), lambda: hmp.types.Report.load(3)):
        with pytest.raises(hmp.HmpError):
            call()


def test_assert_dtype_says_where_it_was_otherwise() -> None:
    report = by_hand()
    report.assert_dtype("softmax", torch.float32)
    report.assert_dtype("linear", torch.bfloat16)
    with pytest.raises(AssertionError, match=r"(?s)linear .* 20 calls:.*10 in bfloat16 .* in encoder.0 at model"):
        report.assert_dtype("linear", torch.float32)
    with pytest.raises(AssertionError, match="expected a call of gelu"):
        report.assert_dtype("gelu", torch.float32)


def test_reports_of_several_runs_are_added_up() -> None:
    other = hmp.types.Report(ROWS[:1], **{**ABOUT, "never_called": ["gelu", "softmax"], "seconds": 1.0})
    both = by_hand().merge(other)
    assert both.rows[0].calls == 20
    assert both.rows[0].cast_bytes == 2 * 122880
    assert len(both.rows) == len(ROWS)
    assert both.never_called == ["gelu"]
    assert both.uncast_calls == 14
    assert len(both.policies) == 1
    assert both.about["seconds"] == ABOUT["seconds"] + 1.0


@pytest.mark.slow
def test_rank_0_gathers_the_reports_of_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import torch, torch.distributed as dist, torch.nn.functional as F, hmp\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.randn(3, 3)\n"
        "with hmp.casts('habana'), hmp.record() as report:\n"
        "    for _ in range(dist.get_rank() + 1):\n"
        "        F.linear(x, x)\n"
        "took = [None] * 2\n"
        "dist.all_gather_object(took, report.about['seconds'])\n"
        "merged = report.gather()\n"
        "assert dist.get_rank() or merged.about['seconds'] == max(took)\n"
        "found = sum(r.calls for r in merged.rows if r.op == 'linear'), merged.to_dict()['ranks']\n"
        "open(f'rank{dist.get_rank()}', 'w').write(str(found))\n"
        "dist.destroy_process_group()\n"
    )
    ran = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["(3, 2)", "(2, 1)"]
