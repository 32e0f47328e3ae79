"""One list entry followed from its file through rules, sites, wrapper and patch to a call, and back."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

import hmp
from trap_kit import same

LOW, WIDE = torch.bfloat16, torch.float32


@pytest.fixture
def lists(tmp_path):
    """A folder with one op on each list, written as people write them: with a byte-order mark, CRLF, commas and comments."""
    (tmp_path / "bf16.txt").write_bytes(b"\xef\xbb\xbf# mine\r\nsoftmax  # entry\r\n\r\n")
    (tmp_path / "fp32.txt").write_bytes(b"gelu, log_softmax")
    (tmp_path / "promote.txt").write_text("lerp\n")
    return tmp_path


SITES = {
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "Tensor.softmax": lambda x: x.softmax(-1),
    "F.softmax": lambda x: F.softmax(x, -1),
    "nn.Softmax": lambda x: torch.nn.Softmax(-1)(x),
    "special.softmax": lambda x: torch.special.softmax(x, -1),
    "_VF.softmax": lambda x: torch._VF.softmax(x, -1),
    "keywords": lambda x: torch.softmax(dim=-1, input=x),
}


@pytest.mark.searches_references
def test_one_entry_from_its_file_to_a_call(lists, torch_differences):
    x = torch.randn(3, 4)

    # text → policy
    policy = hmp.Policy.load(lists)
    assert (policy.bf16, policy.fp32, policy.promote) == ({"softmax"}, {"gelu", "log_softmax"}, {"lerp"})
    assert torch_differences() == []

    # policy → patches: every site of the entry, and of no other op
    with hmp.convert(policy=policy):
        patched = "\n".join(torch_differences())
        assert "torch.softmax:" in patched and "Tensor.softmax:" in patched
        assert "torch.exp:" not in patched and "Tensor.exp:" not in patched

        # the rule says where it came from
        rule = hmp.explain("softmax")
        assert "softmax" in str(rule) and "bf16" in str(rule).lower()
        assert str(lists / "bf16.txt") in str(rule) or "bf16.txt" in str(rule), str(rule)

        # patch → wrapper → call, at every site, values and gradient as with an explicit cast
        for name, call in SITES.items():
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            y.float().square().sum().backward()
            reference = x.clone().requires_grad_()
            with hmp.disable_casts():
                expected = torch.softmax(reference.to(LOW), -1)
                expected.float().square().sum().backward()
            same(y, expected)
            same(leaf.grad, reference.grad)
            assert leaf.grad.dtype == WIDE, name

        # the other two lists
        assert F.gelu(x.to(LOW)).dtype == F.log_softmax(x.to(LOW), -1).dtype == WIDE
        assert torch.lerp(x.to(LOW), x, 0.5).dtype == WIDE
        # and an unlisted op
        assert torch.matmul(x, x.T).dtype == WIDE

    # and back
    assert torch_differences() == []
    assert {call(x).dtype for call in SITES.values()} == {WIDE}


def test_habanas_own_call(lists, capfd, monkeypatch):
    # what it goes through here, among all that the other tests hold, takes seconds
    monkeypatch.setattr(sys.modules["hmp.session.conversion"], "tell_unreachable", lambda: None)
    with hmp.convert(opt_level="O1", bf16_file_path=str(lists / "bf16.txt"), fp32_file_path=str(lists / "fp32.txt"), isVerbose=True):
        assert torch.softmax(torch.ones(2), 0).dtype == LOW
        # "" elsewhere means the default list: here promote
        assert torch.cat([torch.ones(1), torch.ones(1, dtype=LOW)]).dtype == WIDE
    assert torch.softmax(torch.ones(2), 0).dtype == WIDE


def test_the_module_is_found_under_habanas_name():
    from hmp import hmp as habanas

    assert habanas.convert is hmp.convert


def test_convert_takes_o2_or_a_policy():
    with pytest.raises(hmp.HmpError, match="policy= and opt_level='O2', which is the policy 'habana-o2', exclude each other"):
        hmp.convert(opt_level="O2", policy="habana")
    with pytest.raises(
        hmp.HmpError, match="fp8_file_path= and opt_level='O2', which has no product in FP8, exclude each other; give policy="
    ):
        hmp.convert(opt_level="O2", fp8_file_path="fp8.txt")
    assert not hmp.is_converted()
    with hmp.convert(opt_level="O1", policy="habana"):
        assert torch.relu(torch.ones(2)).dtype is torch.bfloat16
