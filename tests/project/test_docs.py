"""The README and the pages say what is so: their blocks run and print what is shown, every command is one, every link leads somewhere."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest

import doc_blocks
import hmp
import torch_alone
from doc_blocks import DEV_FILES, FILES, PAGES, ROOT
from hmp.cli import main
from making import PAGES as SITE
from making import command_line
from torch_has import release

README = FILES[0].read_text(encoding="utf-8")
# What takes more than a few seconds: it imports transformers or Lightning, starts a search, times, compares, or exports.
SLOW = (
    "transformers",
    "lightning",
    "optimum",
    "accelerate",
    "tensorboard",
    "wandb",
    "hmp.tune(",
    "hmp.benchmark(",
    "hmp.compare(",
    "torch.export.",
    "torch.onnx.",
)
ALL = {
    f"{page.parent.name}.{page.stem}-{number}": block
    for page in [*FILES[1:], ROOT / "docs" / "dev" / "list-of-your-own-kind.md"]
    for number, block in enumerate(doc_blocks.with_outputs(page.read_text(encoding="utf-8")))
}
TAKES_LONG = {name: block for name, block in ALL.items() if any(word in block[0] for word in SLOW)}


@pytest.mark.native_kernels  # the pages have the figures of a processor with instructions
@pytest.mark.skipif(os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2", reason="torch's own bfloat16 kernels take minutes there")
@pytest.mark.slow
@pytest.mark.parametrize("blocks", [ALL.keys() - TAKES_LONG, pytest.param(TAKES_LONG.keys(), marks=pytest.mark.nightly)], ids=["", "long"])
def test_every_block_runs_and_prints_what_is_shown(blocks: Collection[str], tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "recipe.py")]) == 0  # which some import
    printed = torch_alone.run({name: ALL[name][0] for name in sorted(blocks)}, tmp_path, alone=False)
    shown = {name: text for name in blocks if (text := ALL[name][1]) is not None}
    assert {name: doc_blocks.words(printed[name]) for name in shown} == {name: doc_blocks.words(text) for name, text in shown.items()}


def commands() -> list[str]:
    """Return the lines of the shell on the pages and in the README that call hmp."""
    texts = [file.read_text(encoding="utf-8") for file in FILES]
    lines = {line for text in texts for block in doc_blocks.blocks(text, "sh") for line in block.splitlines()}
    lines |= {line for text in texts for line in re.findall(r"`((?:python -m )?hmp [^`]+)`", text)}
    return sorted(line for line in lines if re.match(r"(python -m )?hmp [a-z]", line))


def test_every_command_is_one_with_the_options_that_it_has() -> None:
    helps = command_line.helps()
    for line in commands():
        words = shlex.split(line.removeprefix("python -m "), comments=True)[1:]
        if words[0] == "COMMAND":
            continue
        assert words[0] in helps, line
        own = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))  # the rest is the script's
        for option in (word.partition("=")[0] for word in words[:own] if word.startswith("--")):
            assert re.search(rf"^  (-\w, )?{option}\b", helps[words[0]], re.MULTILINE), line


def test_the_page_of_the_commands_has_each() -> None:
    page = (PAGES / "reference" / "cli.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `hmp ([\w-]+)", page, re.MULTILINE)) == command_line.helps().keys() - {""}


def test_the_lists_of_the_readme_are_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [text for text in doc_blocks.blocks(README, "sh") if "my_lists" in text]
    *lines, check = block.splitlines()
    subprocess.run(["sh", "-ec", "\n".join(lines)], cwd=tmp_path, env=os.environ, check=True)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(check, comments=True)[1:]) == 0
    lists = hmp.Policy.load("my_lists")
    assert lists.bf16 == hmp.Policy.load("autocast").bf16
    assert {"softmax", "layer_norm", "linear @ lm_head"} <= set(lists.entries("fp32"))
    (tmp_path / "my_lists" / "base.txt").unlink()
    assert not hmp.Policy.load("my_lists").bf16, "without base.txt nothing is cast to bfloat16"


def test_the_text_of_a_package_index_is_the_readme_with_links_that_work_there() -> None:
    names = runpy.run_path(str(ROOT / "docs" / "long_description.py"))
    text = (ROOT / "docs" / "package-index.md").read_text(encoding="utf-8")
    assert text == names["text"](), "run python docs/long_description.py"
    assert not [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith("https://")]


def test_the_texts_are_short() -> None:
    assert len(README.splitlines()) <= 110
    assert len(FILES[1:]) <= 22
    assert sum(len(doc_blocks.prose(page.read_text(encoding="utf-8")).split()) for page in FILES[1:]) <= 13_000, "without blocks of code"
    assert README.index("```python") < 300, "what hmp is, in a sentence, then code"


def slug(heading: str) -> str:
    """Return a heading's anchor, which is the same on the site and in the repository."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower())


@pytest.mark.parametrize("file", [*FILES, *DEV_FILES], ids=lambda file: file.stem)
def test_links_lead_to_what_is_in_the_repository(file: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"\S #{2,} \w", text), "a heading begins a line"
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (file.parent / path).resolve() if path else file
        assert found.exists(), target
        if anchor:
            assert anchor in map(slug, re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)), target


def test_every_page_is_in_the_navigation() -> None:
    """mkdocs warns of a missing page, and not of one that nobody finds."""
    config = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    assert PAGES == SITE
    named = re.findall(r"^ +- ([^:\n]+): ([\w/-]+\.md)$", config.partition("nav:")[2], re.MULTILINE)
    assert sorted(str(page.relative_to(PAGES)) for page in FILES[1:]) == sorted(file for _, file in named)
    assert [title for title, _ in named if len(title.split()) > 3] == []


def test_every_place_that_the_page_of_the_architecture_names_is_there() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    places = set(re.findall(r"`([\w/]+\.py)(?::(\w+))?`", page))
    assert len(places) > 10
    for file, name in places:
        path = ROOT / file if (ROOT / file).is_file() else ROOT / "hmp" / file
        assert re.search(rf"^( *(def|class) )?{name}\b", path.read_text(encoding="utf-8"), re.MULTILINE), f"{file}: {name}"


def test_every_rule_and_every_preset_has_a_row() -> None:
    rules = (PAGES / "reference" / "lists.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| R(\d+) \|", rules, re.MULTILINE) == [str(number) for number in range(1, 24)]
    presets = (PAGES / "reference" / "lists.md").read_text(encoding="utf-8").partition("| preset |")[2].partition("\n\n")[0]
    shown = {name for line in presets.splitlines() if line.startswith("| `") for name in re.findall(r"`([\w.@-]+)`", line.split("|")[1])}
    assert {name for name in shown if not name.startswith("@")} <= set(hmp.policies())
    assert shown >= {name for name in hmp.policies() if "@" not in name}
    for kind, first, last in re.findall(r"`([\w-]+)@([\d.]+)` to `@([\d.]+)`", presets):
        there = [release(name.partition("@")[2]) for name in hmp.policies() if name.startswith(f"{kind}@")]
        assert (min(there), max(there)) == (release(first), release(last))
