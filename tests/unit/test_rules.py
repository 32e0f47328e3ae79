"""The registry of rules: each is complete, and one that is added is chosen, carried out, explained and reported by its entry alone.

No public call adds a rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

import hmp
import list_kit
from hmp.core import lists, tables
from hmp.core.rules import registry
from hmp.core.rules.plug_ins import CastRule, one_dtype_wrapper
from process_kit import ROOT


def test_every_rule_has_its_name_a_number_of_the_page_and_a_sentence_of_its_own() -> None:
    assert [getattr(registry, rule.name) for rule in registry.RULES] == list(registry.RULES)
    page = (ROOT / "docs" / "pages" / "background" / "how-casting-works.md").read_text(encoding="utf-8")
    assert {rule.number for rule in registry.RULES} <= set(re.findall(r"^\| (R\d+) \|", page, re.MULTILINE))
    assert len({rule.sentence for rule in registry.RULES}) == len(registry.RULES)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[CastRule]:
    def rounding(op, rule, caster):
        return lambda *args: op(*args).round()

    added = CastRule(
        "ROUNDS",
        number="R11",
        label="rounds",
        sentence="its result is rounded (R11)",
        make=rounding,
        holds=lambda case: case.list is None and case.op == "tanh",
        ops=frozenset({"tanh"}),
    )
    monkeypatch.setattr(registry, "RULES", (added, *registry.RULES))
    tables.decide_anew()
    yield added
    tables.decide_anew()


def test_a_rule_is_added_by_one_entry_and_one_function(rounds: CastRule) -> None:
    policy, x = hmp.Policy("rounds", bf16={"mm"}), torch.tensor([0.2, 2.0])
    with hmp.record() as report, hmp.casts(policy):
        assert torch.tanh(x).tolist() == [0, 1]
        assert x.tanh().tolist() == [0, 1]
        assert torch.equal(torch.sigmoid(x), x.sigmoid())
    told = {row.op: row.rule for row in report.rows}
    assert (told["tanh"], told["sigmoid"]) == ("R11", "unlisted")
    said = str(hmp.explain("tanh", policy))
    assert f"torch.tanh: {rounds.sentence}" in said
    assert f"torch.Tensor.tanh: {rounds.sentence}" in said
    with hmp.casts(policy.replace(fp32={"tanh"})):  # a list has a rule of its own
        assert torch.tanh(x).tolist() != [0, 1]
    assert "float32 (R2)" in hmp.explain("tanh", policy.replace(fp32={"tanh"})).why


@pytest.fixture
def second() -> Iterator[CastRule]:
    rule = CastRule(
        "SECOND_LIST",
        label="second",
        sentence="its second input is cast to the low-precision dtype",
        make=one_dtype_wrapper,
        only=frozenset({1}),
        is_list=True,
        dtype=lambda low_dtype: low_dtype,
    )
    lists.add(lists.ListKind(name="second", title="second", contents="ops whose second input is rounded", module=__name__, rule=rule))
    yield rule
    hmp.revert()
    list_kit.remove("second")


def test_a_rule_on_the_second_input_alone_is_one_entry(second: CastRule, caplog: pytest.LogCaptureFixture) -> None:
    policy = hmp.Policy("mine", second={"hypot", "addmv"})
    x, y = torch.tensor([3.0, 6.0]), torch.tensor([4.001, 8.001])  # bfloat16 has neither of the second
    matrix, low = y.outer(y), x.bfloat16()
    with hmp.record() as report, hmp.convert(policy=policy, verbose=True):
        for found in (torch.hypot(x, y), torch.hypot(input=x, other=y), torch.hypot(other=y, input=x), x.hypot(y)):
            assert torch.equal(found, torch.tensor([5.0, 10.0]))
        assert torch.hypot(y, x).tolist() != [5.0, 10.0]  # not the first
        for added in (torch.addmv(low, matrix, low), torch.addmv(low, mat=matrix, vec=low)):
            assert torch.equal(added, low.addmv(matrix.bfloat16(), low))
        with pytest.raises(RuntimeError, match="dtype"):  # torch refuses what the rule makes; that is no missing kernel
            torch.addmv(x, matrix, x)
        assert hmp.fallbacks() == {}
    rows = {(row.op, row.rule, row.source, row.compute, row.casts > 0) for row in report.rows if row.op in ("hypot", "addmv")}
    assert {row[:3] for row in rows} == {("hypot", "second", "hypot"), ("addmv", "second", "addmv")}
    assert ("hypot", "second", "hypot", "float32", True) in rows and ("addmv", "second", "addmv", "bfloat16", True) in rows
    logged = caplog.text
    assert "hypot (second)" in logged and "float32 -> bfloat16" in logged and "kernel" not in logged
    assert hmp.explain("addmv", policy).why == second.sentence


def test_two_rules_with_one_label_are_an_error(second: CastRule) -> None:
    for label in ("second", "in place", "bf16"):
        rule = CastRule("OTHER", label=label, sentence="", make=one_dtype_wrapper)
        with pytest.raises(hmp.HmpError, match=f"no other rule has, got '{label}' of OTHER"):
            lists.add(lists.ListKind(name="other", title="other", contents="", module=__name__, rule=rule))
    assert "other" not in lists.names()
