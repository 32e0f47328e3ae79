"""What the made pages of the site show is what the code has."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

import pytest
import torch

import doc_blocks
import hmp
from making import api, errors, presets, releases

DOCS = doc_blocks.ROOT / "docs"


def test_every_environment_of_other_releases_was_run_and_none_fails() -> None:
    page = releases.page()
    for table in (doc_blocks.ROOT / "tests" / "releases").glob("*.txt"):
        wanted = re.findall(r"^([^#:\n]+):", table.read_text(encoding="utf-8"), re.MULTILINE)
        assert [name for name in wanted if name != "hidden" and f"\n| {name} | " not in page] == []
    assert "fails" not in page


def test_the_api_page_has_every_public_name() -> None:
    shown = re.findall(r"^::: (\S+)$", api.page(), re.MULTILINE)
    assert {place.rpartition(".")[2] for place in shown} >= set(hmp.__all__) - {"hmp"}


def test_the_table_of_presets_is_what_they_hold() -> None:
    page = presets.page()
    (head,) = re.findall(r"^\| op \|.*$", page, re.MULTILINE)
    names = re.findall(r"`([\w@.-]+)`", head)
    assert names == [name for name in hmp.policies() if "@" not in name or hmp.Policy.load(name).name == name]
    assert "| `torch-cpu@2.9` | `torch-cpu@2.7` |" in page
    for op, name, held in [("mul", "habana", "bf16"), ("mul", "autocast", ""), ("softmax", "habana", "fp32"), ("linear", "bert", "bf16")]:
        (row,) = re.findall(rf"^\| `{op}` \|(.*)\|$", page, re.MULTILINE)
        assert row.split("|")[names.index(name)].strip() == held


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        lambda: hmp.Policy.load("habanna"),
        lambda: hmp.Policy.load("habana").replace(dtype="int8"),
        lambda: hmp.apply(torch.nn.Linear(1, 1), 3),
        lambda: hmp.set_cache_limit(-1),
        lambda: hmp.compare(3, 4),
    ],
)
def test_the_page_of_errors_has_those_that_are_raised(wrong: Callable[[], object]) -> None:
    with pytest.raises(hmp.HmpError) as caught:
        wrong()
    shown = html.unescape(errors.page())
    messages = re.findall(r"^\| (.+) \| `\w+` \| `hmp[\w.]*` \|$", shown, re.MULTILINE)
    assert len(messages) > 150
    said = str(caught.value)
    for message in messages:
        words = [part for part in re.split(r"\{.*?\}+", message) if len(part) > 6]
        if words and all(part in said for part in words):
            return
    raise AssertionError(said)


def test_every_environment_variable_is_on_its_page() -> None:
    page = (DOCS / "pages" / "reference" / "environment.md").read_text(encoding="utf-8")
    read = set()
    for file in (doc_blocks.ROOT / "hmp").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        if "environ" in source:
            read |= set(re.findall(r'"((?:HMP|PT_HPU|OMPI)_[A-Z_0-9]+|RANK|WORLD_SIZE|LOCAL_RANK|\w+_LIST)"', source))
    assert len(read) >= 10
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []
