"""R4: BF16 and FP32 win over promote; both at once is an error; a list that the user gave wins over a default list."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

import hmp
from oracle import BF16, F32


def lists(bf16=(), fp32=(), promote=()) -> hmp.Policy:
    return hmp.Policy(name="r4", bf16=frozenset(bf16), fp32=frozenset(fp32), promote=frozenset(promote))


@pytest.mark.parametrize("name", ["mul", "linear", "add", "softmax", "*"])
def test_r4_a_name_on_both_lists_is_an_error(name: str) -> None:
    with pytest.raises(hmp.OpListError, match=r"both|BF16 list and on the FP32 list|FP32 list and on the BF16 list") as error:
        with hmp.casts(lists(bf16={name}, fp32={name})):
            pass
    assert repr(name) in str(error.value)


def test_r4_a_name_in_both_of_the_users_files_is_an_error_that_names_the_line(tmp_path) -> None:
    bf16, fp32 = tmp_path / "bf16.txt", tmp_path / "fp32.txt"
    bf16.write_text("linear\n# why not\nmul\n")
    fp32.write_text("softmax\nmul\n")
    for use in (
        lambda: hmp.convert(bf16_file_path=str(bf16), fp32_file_path=str(fp32)),
        lambda: hmp.Policy.from_files(bf16=bf16, fp32=fp32),
    ):
        with pytest.raises(hmp.OpListError) as error:
            use()
        assert "'mul'" in str(error.value)
        assert (error.value.path, error.value.line) in {(str(bf16), 3), (str(fp32), 2)}
        assert f"{bf16}:3" in str(error.value) and f"{fp32}:2" in str(error.value)
    assert not hmp.is_converted()


def test_r4_a_dotted_synonym_leads_its_plain_name() -> None:
    """rules.md: `special.softmax`/softmax and `linalg.matmul`/matmul are exact synonyms, whichever of the two is listed."""
    low, full = torch.eye(2).to(BF16), torch.eye(2)
    with hmp.casts(lists(bf16={"linalg.matmul"}, fp32={"special.softmax"})):
        assert torch.special.softmax(low, 0).dtype is F32
        assert F.softmax(low, 0).dtype is F32
        assert low.softmax(0).dtype is F32
        assert (full @ full).dtype is BF16


def test_r4_a_synonym_that_is_listed_itself_keeps_its_own_list() -> None:
    low, full = torch.ones(2).to(BF16), torch.ones(2)
    with hmp.casts(lists(bf16={"mul"}, fp32={"multiply"})):
        assert torch.mul(full, full).dtype is BF16
        assert (full * full).dtype is BF16
        assert torch.multiply(low, low).dtype is F32
        assert low.multiply(low).dtype is F32


@pytest.mark.parametrize(("cast", "dtype"), [("bf16", BF16), ("fp32", F32)])
def test_r4_a_synonym_on_the_promote_list_is_promoted_and_of_one_name_the_other_list_wins(cast: str, dtype: torch.dtype) -> None:
    low, full = torch.ones(2).to(BF16), torch.ones(2)
    with hmp.casts(lists(**{cast: {"mul", "linalg.matmul", "div"}}, promote={"multiply", "matmul", "div", "rmul"})):
        assert torch.mul(full, full).dtype is torch.div(full, full).dtype is torch.divide(full, full).dtype is dtype
        assert torch.linalg.matmul(torch.eye(2), torch.eye(2)).dtype is dtype
        assert torch.multiply(low, low).dtype is low.multiply(low).dtype is BF16
        assert torch.multiply(full, low).dtype is F32
        assert (torch.eye(2).to(BF16) @ torch.eye(2).to(BF16)).dtype is BF16
    assert hmp.explain("multiply", lists(**{cast: {"mul"}}, promote={"multiply"})).listed_as == "multiply"


def file(tmp_path, name: str, *ops: str) -> str:
    path = tmp_path / f"{name}.txt"
    path.write_text("\n".join(ops))
    return str(path)


def test_r4_a_users_bf16_list_wins_over_the_default_fp32_list_with_its_synonyms(tmp_path) -> None:
    """Default FP32 holds div, divide and truediv; the user moved one of their names."""
    full = torch.ones(2)
    hmp.convert(bf16_file_path=file(tmp_path, "bf16", "div", "linear"))
    assert torch.div(full, full).dtype is BF16
    assert torch.divide(full, full).dtype is BF16
    assert (full / full).dtype is BF16
    assert full.true_divide(full).dtype is BF16
    assert torch.softmax(full.to(BF16), 0).dtype is F32  # the rest of the default list stands
    assert torch.mul(full, full).dtype is F32  # the user's BF16 list replaces the default one


def test_r4_a_users_fp32_list_wins_over_the_default_bf16_list_with_its_synonyms(tmp_path) -> None:
    low, full = torch.ones(2).to(BF16), torch.ones(2)
    hmp.convert(fp32_file_path=file(tmp_path, "fp32", "multiply"))
    assert (low * low).dtype is F32
    assert torch.mul(low, low).dtype is F32
    assert torch.multiply(low, low).dtype is F32
    assert torch.mm(torch.eye(2), torch.eye(2)).dtype is BF16
    assert (full / full.to(BF16)).dtype is F32  # not listed any more; torch promotes
    assert (low / low).dtype is BF16


def test_r4_the_log_says_when_a_users_list_wins(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hmp"):
        hmp.convert(bf16_file_path=file(tmp_path, "bf16", "div", "linear"))
    assert [r for r in caplog.records if "div" in r.getMessage()], caplog.text


def test_r4_a_users_list_wins_over_the_default_promote_list(tmp_path) -> None:
    full = torch.ones(2)
    with hmp.casts(hmp.Policy.from_files(bf16=file(tmp_path, "bf16", "add"), fp32=file(tmp_path, "fp32", "cat"))):
        assert (full + full).dtype is BF16
        assert torch.cat([full.to(BF16)]).dtype is F32


def test_r4_rsub_and_iadd_name_one_dunder_and_not_the_op() -> None:
    x = torch.ones(2)
    with hmp.casts(lists(bf16={"rsub", "iadd"})):
        assert (1.0 - x).dtype is BF16
        assert (x - 1.0).dtype is F32
        assert (x + x).dtype is F32
        y = z = x.clone()
        y += x
        assert y is z and y.dtype is F32  # R5: in place keeps its own dtype


@pytest.mark.parametrize("order", [("bf16", "fp32"), ("fp32", "bf16")])
def test_r4_every_other_op_is_weaker_than_a_name(order) -> None:
    """`*` on one list and a name on the other is no conflict."""
    star, named = order
    dtype = {"bf16": BF16, "fp32": F32}
    x = torch.ones(2)
    with hmp.casts(lists(**{star: {"*"}, named: {"sigmoid"}})):
        for start in (x, x.to(BF16)):
            assert torch.sigmoid(start).dtype is dtype[named]
            assert torch.exp(start).dtype is dtype[star]
