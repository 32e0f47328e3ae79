"""The registry of rules: each is complete, and one that is added is chosen, carried out, explained and reported by its entry alone.

No public call adds a rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

import hmp
from hmp.core import tables
from hmp.core.rules import CastRule, rules
from process_kit import ROOT


def test_every_rule_has_its_name_a_number_of_the_page_and_a_sentence_of_its_own() -> None:
    assert [getattr(rules, rule.name) for rule in rules.RULES] == list(rules.RULES)
    page = (ROOT / "docs" / "pages" / "background" / "how-casting-works.md").read_text(encoding="utf-8")
    assert {rule.number for rule in rules.RULES} <= set(re.findall(r"^\| (R\d+) \|", page, re.MULTILINE))
    assert len({rule.sentence for rule in rules.RULES}) == len(rules.RULES)


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
    monkeypatch.setattr(rules, "RULES", (added, *rules.RULES))
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
