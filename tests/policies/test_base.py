"""A folder whose lists are laid over a preset's by base.txt, and the preset fp8, which is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hmp

BF16, F32 = torch.bfloat16, torch.float32


def folder(path: Path, **files: str) -> Path:
    for name, text in files.items():
        (path / f"{name}.txt").write_text(text)
    return path


def test_the_base_decides_what_the_lists_do_not_name(tmp_path: Path) -> None:
    base = hmp.Policy.load("bert")
    policy = hmp.Policy.load(folder(tmp_path, base="# Habana's for BERT\nbert\n", fp32="gelu\nmatmul\n", bf16="softmax\n"))
    assert {"gelu", "matmul"} <= policy.fp32 and "softmax" in policy.bf16
    for cast in ("bf16", "fp32"):
        assert getattr(policy, cast) - {"gelu", "matmul", "softmax"} == getattr(base, cast) - {"gelu", "matmul", "softmax"}
    assert policy.promote == base.promote
    assert not policy.bf16 & policy.fp32
    x = torch.randn(4, 4)
    with hmp.casts(policy):
        assert (x @ x).dtype is F32 and torch.mm(x, x).dtype is BF16 and torch.softmax(x, -1).dtype is BF16


def test_a_promote_list_takes_ops_from_the_base_and_from_the_default_lists(tmp_path: Path) -> None:
    """R4: a list of the user's wins over a default list. A copy of Habana's promote list, which has ops of its BF16 list, changes none."""
    habana = hmp.Policy.load("habana")
    copied = [*sorted(habana.promote), "linear"]
    over_base = hmp.Policy.load(folder(tmp_path, base="habana", promote="\n".join(copied)))
    over_default = hmp.Policy.from_files(promote=tmp_path / "promote.txt")
    assert "mul" in habana.promote & habana.bf16
    x = torch.randn(4, 4)
    for policy in (over_base, over_default):
        assert policy == habana.replace(bf16=habana.bf16 - {"linear"}, promote=habana.promote | {"linear"})
        with hmp.casts(policy):
            assert torch.nn.functional.linear(x, x).dtype is F32 and torch.mm(x, x).dtype is BF16 and (x * x).dtype is BF16


def test_what_is_saved_has_no_base(tmp_path: Path) -> None:
    policy = hmp.Policy.load(folder(tmp_path, base="bert", fp32="gelu"))
    assert hmp.Policy.load(policy.save(tmp_path)) == policy
    assert not (tmp_path / "base.txt").exists()


class Model(torch.nn.Module):
    def __init__(self, head: str) -> None:
        super().__init__()
        self.body = torch.nn.Linear(32, 32)
        self.add_module(head, torch.nn.Linear(32, 16))
        self.name = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.name)(self.body(x))


@pytest.mark.parametrize("head", ["lm_head", "out"])
def test_fp8_is_autocast_with_layers_in_fp8_but_for_the_head(head: str) -> None:
    torch.manual_seed(0)
    model, x = Model(head), torch.randn(16, 32)
    with hmp.casts("autocast"):
        hidden = torch.nn.functional.linear(x, model.body.weight, model.body.bias)
    with hmp.record() as report:
        y = hmp.apply(model, "fp8")(x)
    dtypes = {row.module: row.compute for row in report.grouped("module") if row.calls}
    assert dtypes["body"] == "float8_e4m3fn"
    assert dtypes[head] == ("float8_e4m3fn" if head == "out" else "bfloat16")
    assert y.dtype is hidden.dtype is BF16
    unscoped, autocast = hmp.Policy.load("fp8").unscoped, hmp.Policy.load("autocast")
    assert unscoped.fp8 == {"linear", "addmm"} == autocast.bf16 - unscoped.bf16
    assert (unscoped.fp32, unscoped.promote, unscoped.dtype) == (autocast.fp32, autocast.promote, BF16)


def test_a_base_may_have_a_base_and_lines_for_single_modules(tmp_path: Path) -> None:
    policy, fp8 = hmp.Policy.load(folder(tmp_path, base="fp8", fp32="softmax")), hmp.Policy.load("fp8")
    assert [entry.text for entry in policy.scoped] == [entry.text for entry in fp8.scoped]
    assert (policy.fp8, policy.bf16) == (fp8.fp8, fp8.bf16)
    own = hmp.Policy.load(folder(tmp_path, fp32="linear"))  # an op that the list names is the list's, everywhere
    assert (own.scoped, own.fp8) == ((), {"addmm"}) and "linear" in own.fp32
    torch.manual_seed(0)
    model = hmp.apply(Model("lm_head"), policy)
    with hmp.record() as report:
        model(torch.randn(16, 32))
    assert [row.compute for row in report.rows if row.op == "linear"] == ["float8_e4m3fn", "bfloat16"]


def test_fp8_needs_a_model_and_says_so() -> None:
    with pytest.raises(hmp.HmpError, match=r"fp8/bf16.txt:\d+: .* needs a model, .* use hmp.apply\(model, policy\)"):
        hmp.convert(policy="fp8")
    assert not hmp.is_converted()
