"""R1 to R4: what is never cast, what a look-up casts, and which of a user's and the default lists wins.

What each list does with the inputs of an op, P1 asks (tests/properties).
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import hmp
from oracle import BF16, F32, F64, assert_same, outcome
from strategies import INTEGER, Leaf, build
from trap_kit import policy

OF_INTEGERS = {
    "mul": lambda a, b: torch.mul(a, b),
    "div": lambda a, b: a / b,
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "topk": lambda a, b: torch.topk(a, 2),
    "log": lambda a, b: torch.log(b),
    "softmax": lambda a, b: torch.softmax(a, 0),
}


@given(
    st.sampled_from([*INTEGER, F64, torch.complex64]), st.sampled_from(INTEGER), st.sampled_from(sorted(OF_INTEGERS)), st.integers(0, 99)
)
def test_r1_r2_integers_bools_and_what_is_beside_float64_are_never_cast(one, other, name, seed) -> None:
    """div of two ints is torch's own float32, rounding_mode keeps int64, topk keeps the dtype, softmax of ints still raises."""
    tree = [Leaf((4,), one, seed=seed), Leaf((4,), F32 if one in (F64, torch.complex64) else other, values="positive", seed=seed + 1)]
    if name == "log" and one not in INTEGER:
        return  # its only input is float32
    expected = outcome(OF_INTEGERS[name], build(tree))
    with hmp.casts("habana"):
        got = outcome(OF_INTEGERS[name], build(tree))
    assert_same(got, expected)


def test_r1_float8_and_quantized_tensors_are_never_cast() -> None:
    eight = torch.randn(2, 3).to(torch.float8_e4m3fn)
    quantized = torch.quantize_per_tensor(torch.tensor([-1.0, 2.0]), 0.1, 10, torch.quint8)
    with hmp.casts("habana"):
        assert torch.t(eight).dtype is torch.float8_e4m3fn
        assert torch.relu(quantized).dtype is torch.quint8


def test_r1_sparse_tensors_are_cast() -> None:
    dense, other = torch.tensor([[0.0, 1.1], [2.3, 0.0]]), torch.randn(2, 3)
    want = torch.mm(dense.to_sparse().to(BF16), other.to(BF16))
    with hmp.casts("habana"):
        got, turned = torch.mm(dense.to_sparse(), other), torch.relu(dense.to_sparse())
    assert turned.is_sparse and turned.dtype is BF16
    assert got.dtype is BF16 and torch.equal(got, want)


@pytest.mark.filterwarnings("ignore:__array_wrap__")
def test_r1_a_foreign_type_still_gets_its_turn_in_an_operator() -> None:
    """`tensor * thing` falls to `thing.__rmul__`: the dunder answers NotImplemented, and so must its wrapper."""

    class Thing:
        def __rmul__(self, other):
            return "thing's"

        __radd__ = __rtruediv__ = __rmatmul__ = __rsub__ = __rmul__

    x = torch.ones(2)
    with hmp.casts("habana"):
        assert {x * Thing(), x + Thing(), x / Thing(), x @ Thing(), x - Thing()} == {"thing's"}
        assert (x * np.float32(1.5)).tolist() == [1.5] * 2
        assert (x + np.ones(2, dtype=np.float32)).tolist() == [2.0] * 2


def test_r2_a_lookup_makes_no_copy_of_the_table() -> None:
    """What autograd saves for the backward of a look-up is the rows, so a cast table would show as a cast node."""
    table = torch.randn(5, 4, dtype=BF16, requires_grad=True)
    with hmp.casts("habana"):
        out = F.embedding(torch.tensor([1, 2]), table)
    assert out.dtype is F32
    assert "ToCopy" in out.grad_fn.name()  # the result was cast
    assert "Embedding" in out.grad_fn.next_functions[0][0].name()  # and the look-up took the table as it is


@pytest.mark.parametrize("name", ["l1_loss", "mse_loss", "huber_loss"])
def test_r3_weights_of_a_loss_are_promoted_before_torch_sums_them(name: str) -> None:
    values, target, weight = torch.rand(3, 50)
    with hmp.casts(policy(promote={name})):
        found = getattr(F, name)(values, target, weight=weight.to(BF16))
    assert torch.equal(found, getattr(F, name)(values, target, weight=weight.to(BF16).float()))


def test_r4_a_name_on_both_lists_is_an_error_that_names_it(tmp_path: Path) -> None:
    for name in ("mul", "add", "*"):
        with pytest.raises(hmp.errors.OpListError, match="list") as error, hmp.casts(policy(bf16={name}, fp32={name})):
            pass
        assert repr(name) in str(error.value)
    bf16, fp32 = tmp_path / "bf16.txt", tmp_path / "fp32.txt"
    bf16.write_text("linear\n# why not\nmul\n")
    fp32.write_text("softmax\nmul\n")
    for use in (
        lambda: hmp.convert(bf16_file_path=str(bf16), fp32_file_path=str(fp32)),
        lambda: hmp.Policy.from_files(bf16=bf16, fp32=fp32),
    ):
        with pytest.raises(hmp.errors.OpListError) as error:
            use()
        assert (error.value.path, error.value.line) in {(str(bf16), 3), (str(fp32), 2)}
        assert all(part in str(error.value) for part in ("'mul'", f"{bf16}:3", f"{fp32}:2"))
    assert not hmp.is_converted()


def test_r4_a_synonym_leads_its_plain_name_unless_that_is_listed_itself() -> None:
    """rules.md: `special.softmax`/softmax and `linalg.matmul`/matmul are exact synonyms, whichever of the two is listed."""
    low, full = torch.eye(2).to(BF16), torch.eye(2)
    with hmp.casts(policy(bf16={"linalg.matmul", "mul"}, fp32={"special.softmax", "multiply"})):
        assert torch.special.softmax(low, 0).dtype is F.softmax(low, 0).dtype is low.softmax(0).dtype is F32
        assert (full @ full).dtype is BF16
        assert torch.mul(full, full).dtype is (full * full).dtype is BF16
        assert torch.multiply(low, low).dtype is low.multiply(low).dtype is F32


@pytest.mark.parametrize(("cast", "dtype"), [("bf16", BF16), ("fp32", F32)])
def test_r4_a_synonym_on_the_promote_list_is_promoted_and_of_one_name_the_other_list_wins(cast: str, dtype: torch.dtype) -> None:
    low, full = torch.ones(2).to(BF16), torch.ones(2)
    with hmp.casts(policy(**{cast: {"mul", "linalg.matmul", "div"}}, promote={"multiply", "matmul", "div", "rmul"})):
        assert torch.mul(full, full).dtype is torch.div(full, full).dtype is torch.divide(full, full).dtype is dtype
        assert torch.linalg.matmul(torch.eye(2), torch.eye(2)).dtype is dtype
        assert torch.multiply(low, low).dtype is low.multiply(low).dtype is BF16
        assert torch.multiply(full, low).dtype is F32
        assert (torch.eye(2).to(BF16) @ torch.eye(2).to(BF16)).dtype is BF16
    assert hmp.explain("multiply", policy(**{cast: {"mul"}}, promote={"multiply"})).listed_as == "multiply"


def test_r4_a_users_list_wins_over_a_default_list_with_its_synonyms_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def file(name: str, *ops: str) -> str:
        path = tmp_path / f"{name}.txt"
        path.write_text("\n".join(ops))
        return str(path)

    low, full = torch.ones(2).to(BF16), torch.ones(2)
    with caplog.at_level(logging.INFO, "hmp"):
        hmp.convert(bf16_file_path=file("bf16", "div", "linear"))  # the default FP32 list holds div, divide and truediv
    assert [r for r in caplog.records if "div" in r.getMessage()], caplog.text
    assert torch.div(full, full).dtype is torch.divide(full, full).dtype is (full / full).dtype is full.true_divide(full).dtype is BF16
    assert torch.softmax(low, 0).dtype is F32  # the rest of the default list stands
    assert torch.mul(full, full).dtype is F32  # the user's BF16 list replaces the default one
    hmp.convert(fp32_file_path=file("fp32", "multiply"))
    assert (low * low).dtype is torch.mul(low, low).dtype is torch.multiply(low, low).dtype is F32
    assert torch.mm(torch.eye(2), torch.eye(2)).dtype is BF16
    assert (full / low).dtype is F32 and (low / low).dtype is BF16  # not listed any more
    with hmp.casts(hmp.Policy.from_files(bf16=file("bf16", "add"), fp32=file("fp32", "cat"))):  # both on the default promote list
        assert (full + full).dtype is BF16
        assert torch.cat([low]).dtype is F32


def test_r4_rsub_and_iadd_name_one_dunder_and_not_the_op() -> None:
    x = torch.ones(2)
    with hmp.casts(policy(bf16={"rsub", "iadd"})):
        assert (1.0 - x).dtype is BF16
        assert (x - 1.0).dtype is (x + x).dtype is F32
        y = z = x.clone()
        y += x
        assert y is z and y.dtype is F32  # R5: in place keeps its own dtype
