"""What a finding says to try: for a preset a line of Python that can be pasted, and that mends it."""

from __future__ import annotations

import pytest
import torch

import hmp
from trap_kit import pasted

HUGE = torch.full((1, 2, 2), 300.0), torch.full((1, 2, 2), 3000.0)  # whose products float16 does not hold


def remedy(policy: hmp.Policy | str) -> str:
    with hmp.casts(policy), pytest.raises(hmp.NonFiniteError) as caught, hmp.detect_nonfinite():
        torch.bmm(*HUGE)
    return caught.value.finding.remedy


@pytest.mark.sampled(2)
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("entry", ["linear @ 0", "linear @ *", "* @ 0"])
def test_an_entry_for_some_modules_leaves_the_list_with_its_scope(entry: str) -> None:
    before = hmp.Policy(bf16={entry, "mm"}, dtype="float16")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    torch.nn.init.constant_(model[0].weight, 60_000.0)

    def result(policy: hmp.Policy) -> torch.Tensor:
        hmp.apply(model, policy)
        try:
            with hmp.detect_nonfinite():
                return model(torch.full((1, 2), 100.0))
        finally:
            hmp.remove(model)

    with pytest.raises(hmp.NonFiniteError) as caught:
        result(before)
    policy = pasted(caught.value.finding.remedy, policy=before)
    assert policy.entries("fp32") == ["linear @ *" if entry.endswith("*") else "linear @ 0"]
    assert policy.entries("bf16") == (["mm", entry] if entry.startswith("*") else ["mm"])
    assert result(policy).tolist() == [[12_000_000.0] * 2]


ASKED = {"half": lambda x: x.half(), "to": lambda x: x.to(torch.float16), "type": lambda x: x.type(torch.float16)}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("policy", ["habana", None])
def test_no_list_is_advised_for_what_asks_for_a_dtype(name: str, policy: str | None) -> None:
    x = torch.full((2,), 1e6)
    with hmp.casts(policy) if policy else hmp.disable_casts(), pytest.raises(hmp.NonFiniteError) as caught, hmp.detect_nonfinite():
        ASKED[name](x)
    told = f"`{name}` asks for that dtype itself, and no list reaches it: leave the tensor in float32 here, or take bfloat16"
    assert caught.value.finding.remedy == told
    assert torch.isfinite(x.bfloat16()).all()


def test_no_list_is_advised_for_an_in_place_form_of_what_is_no_op() -> None:
    with hmp.casts("habana"), pytest.raises(hmp.NonFiniteError) as caught, hmp.detect_nonfinite():
        torch.zeros(2, dtype=torch.float16).copy_(torch.full((2,), 1e6))
    assert caught.value.finding.remedy == "no list reaches an in-place form: write into a float32 tensor"
