"""What is made for the site is what the code has."""

from __future__ import annotations

import re

import doc_blocks
import hmp
import hmp.types
from making import completed, presets, releases


def test_the_page_of_releases_is_that_of_the_runs_and_none_fails() -> None:
    page = releases.page()
    assert releases.PAGE.read_text(encoding="utf-8") == page, "python docs/making/releases.py writes it, which .ci/releases calls"
    for table in (doc_blocks.ROOT / "tests" / "releases").glob("*.txt"):
        wanted = re.findall(r"^([^#:\n]+):", table.read_text(encoding="utf-8"), re.MULTILINE)
        assert [name for name in wanted if name != "hidden" and f"\n| {name} | " not in page] == []
    assert "fails" not in page


def test_the_api_page_has_every_public_name() -> None:
    text = (doc_blocks.PAGES / "reference" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: (\S+)$", completed(text, "reference/api.md"), re.MULTILINE)
    assert {place.rpartition(".")[2] for place in shown} >= {*hmp.__all__, *(name for name in vars(hmp.types) if name[0].isupper())}
    tables = re.sub(r"<!--.*?-->", "", text)
    assert [name for name in hmp.__all__ if not re.search(rf"`(?:\w+\.)*{name}\b", tables)] == []


def test_the_table_of_presets_is_what_they_hold() -> None:
    page = presets.inserted()
    assert "`torch-cpu@2.9` has the lists of `torch-cpu@2.7`" in page
    for op, name, held in [("mul", "habana", "bf16"), ("mul", "torch-cpu", ""), ("softmax", "habana", "fp32"), ("linear", "bert", "bf16")]:
        (row,) = re.findall(rf"^\| `{op}` \|(.*)\|$", page, re.MULTILINE)
        assert row.split("|")[presets.COLUMNS.index(name)].strip() == held


def test_every_environment_variable_is_on_its_page() -> None:
    page = (doc_blocks.PAGES / "reference" / "cli.md").read_text(encoding="utf-8")
    read = set()
    for file in (doc_blocks.ROOT / "hmp").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        if "environ" in source:
            read |= set(re.findall(r'"((?:HMP|PT_HPU|OMPI)_[A-Z_0-9]+|RANK|WORLD_SIZE|LOCAL_RANK|\w+_LIST)"', source))
    assert len(read) >= 10
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []
