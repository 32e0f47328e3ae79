"""The site's navigation holds every page, and what its made pages show is what the code has, Gaudi's page every place that looks for it."""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import doc_blocks
import hmp
import hooks
from making import api, command_line, errors, evidence, gaudi, json_forms, presets, releases, tutorials

DOCS = doc_blocks.ROOT / "docs"
CONFIG = (DOCS / "mkdocs.yml").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation() -> None:
    written = {str(page.relative_to(DOCS / "pages")) for page in (DOCS / "pages").rglob("*.md")}
    made = {
        "reference/api.md",
        "reference/cli.md",
        "explain/gaudi.md",
        "reference/errors.md",
        "reference/habana-names.md",
        "reference/presets.md",
        "reference/json.md",
        "evidence/releases.md",
        "tutorials/index.md",
    }
    made |= {name for name in evidence.pages() if name.endswith(".md")}
    assert set(re.findall(r"- (?:\w+: )?([\w/-]+\.md)\b", CONFIG)) == written | made


def test_no_page_is_written_by_hand_and_made() -> None:
    written = {str(page.relative_to(DOCS / "pages")) for page in (DOCS / "pages").rglob("*") if page.is_file()}
    assert written.isdisjoint({*evidence.pages(), *tutorials.pages()})


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


def test_the_keys_of_a_json_are_those_of_all_elements() -> None:
    found = dict(json_forms._keys({"rows": [{"a": None}, {"a": 1, "b": [True]}], "changes": {"mul": ["bf16", "fp32"]}}))
    assert found == {
        "rows": "list of objects",
        "rows[].a": "number",
        "rows[].b": "list of truth values",
        "changes": "object",
        "changes.OP": "list of texts",
    }


def test_every_command_with_json_has_its_keys_on_the_page() -> None:
    printed = command_line.page()
    commands = {part.partition("\n")[0] for part in printed.split("## hmp ")[1:] if "--json" in part}
    shown = {name for _, source in json_forms._FORMS.values() for name in re.findall(r"`hmp ([\w-]+)[^`]* --json FILE`", source)}
    assert shown == commands, "the forms stand in docs/making/json_forms.py, the command that makes each in docs/making/samples.py"


def test_every_environment_variable_is_on_its_page() -> None:
    page = (DOCS / "pages" / "reference" / "environment.md").read_text(encoding="utf-8")
    read = set()
    for file in (doc_blocks.ROOT / "hmp").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        if "environ" in source:
            read |= set(re.findall(r'"((?:HMP|PT_HPU|OMPI)_[A-Z_0-9]+|RANK|WORLD_SIZE|LOCAL_RANK|\w+_LIST)"', source))
    assert len(read) >= 10
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("code", ["<script src='https://host.example/a.js'></script>", '<img alt="" src="http://host.example/a.png">'])
def test_a_page_that_needs_a_network_is_an_error(code: str) -> None:
    class page:
        class file:
            dest_uri, src_uri = "a/b.html", "a/b.md"

    with pytest.raises(RuntimeError, match=r"a/b\.md needs a network"):
        hooks.on_post_page(code, page, None)
    assert hooks.on_post_page(f'<script src="{hooks._SHIM}"></script>', page, None) == '<script src="../assets/iframe-worker.js"></script>'
    assert (DOCS / "pages" / "assets" / "iframe-worker.js").is_file()


def test_a_tutorial_becomes_a_page(tmp_path: Path) -> None:
    source = "# ---\n# jupyter: {}\n# ---\n\n# %% [markdown]\n# # A title\n#\n# Words.\n\n# %%\nx = 1  # %% no cell\n"
    assert tutorials._page(source) == "# A title\n\nWords.\n\n```python\nx = 1  # %% no cell\n```\n"


# What runs where Habana's software is not, and so depends on nothing of it, and the texts of a command.
STAND_INS = ("hmp/compat", "hmp/cli")
NAMES = ("hpu", "habana_frameworks")


def _looks(file: Path) -> list[ast.stmt]:
    """The statements, not whole functions and classes, in which one of the names is a string by itself."""
    found: list[ast.stmt] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            test = node.test if isinstance(node, ast.If) else node
            if any(isinstance(each, ast.Constant) and each.value in NAMES for each in ast.walk(test)):
                found.append(node)
    return found


def test_whatever_looks_for_gaudi_says_what_it_assumes() -> None:
    page = gaudi.page()
    for file in sorted((doc_blocks.ROOT / "hmp").rglob("*.py")):
        place = str(file.relative_to(doc_blocks.ROOT))
        if place.startswith(STAND_INS):
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        for statement in _looks(file):
            above = "\n".join(lines[max(statement.lineno - 4, 0) : statement.lineno - 1])
            assert gaudi.MARK in above, f"{place}:{statement.lineno} looks for Gaudi; say above it, after {gaudi.MARK!r}, what it assumes"
            assert f"| `{place}` |" in page
    assert page.count(gaudi.MARK) == 0 and page.count("\n| `") > 12
