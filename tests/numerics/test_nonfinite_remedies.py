"""What a finding says to try: for a preset a line of Python that can be pasted, and that mends it."""

from __future__ import annotations

import pytest
import torch

import hmp

HUGE = torch.full((1, 2, 2), 300.0), torch.full((1, 2, 2), 3000.0)  # whose products float16 does not hold


def remedy(policy: hmp.Policy | str) -> str:
    with hmp.casts(policy), pytest.raises(hmp.NonFiniteError) as caught, hmp.detect_nonfinite():
        torch.bmm(*HUGE)
    return caught.value.finding.remedy


def pasted(line: str, **around: object) -> hmp.Policy:
    names = {"hmp": hmp, **around}
    exec(line, names)
    policy = names["policy"]
    assert isinstance(policy, hmp.Policy)
    return policy


@pytest.mark.parametrize("preset", ["torch-cuda", "habana", "autocast", "gaudi", "habana-o2"])
def test_a_presets_remedy_is_a_line_to_paste_that_mends_it(preset: str) -> None:
    before = hmp.Policy.load(preset).replace(dtype="float16")
    line = remedy(before)
    assert "op_lists" not in line
    policy = pasted(line)
    assert policy.dtype is before.dtype is torch.float16
    assert policy.fp32 == before.fp32 | {"bmm"}
    assert policy.bf16 == before.bf16 - {"bmm"}
    with hmp.casts(policy), hmp.detect_nonfinite():
        assert torch.equal(torch.bmm(*HUGE), torch.full((1, 2, 2), 1_800_000.0))
    assert line.endswith("  # bfloat16 in place of float16 has float32's range")


def test_names_that_stand_for_the_same_op_leave_the_list_together() -> None:
    before = hmp.Policy(dtype="float16", bf16={"mul", "multiply"})
    with hmp.casts(before), pytest.raises(hmp.NonFiniteError) as caught, hmp.detect_nonfinite():
        torch.mul(*HUGE)
    policy = pasted(caught.value.finding.remedy, policy=before)
    assert not policy.bf16
    with hmp.casts(policy), hmp.detect_nonfinite():
        torch.mul(*HUGE)


def test_a_product_in_fp8_leaves_the_fp8_list_too() -> None:
    """A name on the FP8 list and on the FP32 list is an error: the line that is pasted takes it off the one and puts it on the other."""
    before = hmp.Policy(dtype="float16", bf16={"mm", "linear"}, fp8={"linear"})
    x = torch.full((16, 16), 300.0)
    with hmp.casts(before), pytest.raises(hmp.NonFiniteError) as caught, hmp.detect_nonfinite():
        torch.nn.functional.linear(x, x)
    finding = caught.value.finding
    assert (
        "`linear`" in str(finding) and finding.rule.startswith("on the fp8 list of policy") and finding.rule.endswith("low dtype float16")
    )
    policy = pasted(finding.remedy, policy=before)
    assert (policy.fp8, policy.bf16, policy.fp32) == (frozenset(), {"mm"}, before.fp32 | {"linear"})
    with hmp.casts(policy), hmp.detect_nonfinite():
        assert torch.equal(torch.nn.functional.linear(x, x), torch.full((16, 16), 1_440_000.0))
