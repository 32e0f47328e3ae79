"""Every Python block of the pages in docs/ runs, each in a process of its own, and every command on them is one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import doc_blocks
from hmp import cli
from hmp.torch_private import TORCH
from making import command_line

PAGES = doc_blocks.ROOT / "docs" / "pages"
FILES = sorted(PAGES.rglob("*.md"))
# What takes more than a few seconds: it imports transformers or Lightning, starts a search, or times.
SLOW = ("transformers", "lightning", "optimum", "hmp.tune(", "hmp.benchmark(")
HELP = {each.partition("\n")[0]: each for each in command_line.page().split("## hmp ")[1:]}


def _cases() -> list[object]:
    found = []
    for page in FILES:
        for number, block in enumerate(doc_blocks.blocks(page.read_text(encoding="utf-8"))):
            marks = [pytest.mark.slow] if any(word in block for word in SLOW) else []
            found.append(pytest.param(page, block, id=f"{page.relative_to(PAGES).with_suffix('')}-{number}", marks=marks))
    return found


CASES = _cases()


def test_the_pages_hold_blocks_of_known_languages() -> None:
    assert len(CASES) >= 30
    for page in FILES:
        assert len(re.findall(r"^```", page.read_text(encoding="utf-8"), re.MULTILINE)) % 2 == 0, page
        languages = set(re.findall(r"^```(\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert languages <= {"python", "text", "sh", "yaml"}, page


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("page", "block"), CASES)
def test_every_block_runs(page: Path, block: str, tmp_path: Path) -> None:
    if "torch.export.export(model, (x,))" in block and TORCH < (2, 9):
        pytest.skip("torch.export of torch 2.7 is strict unless told otherwise, which hmp refuses there: tested-versions.md")
    if "from recipe import" in block:
        assert cli.main(["init", str(tmp_path / "recipe.py")]) == 0
    doc_blocks.run(block, tmp_path)


@pytest.mark.slow
def test_the_comparison_that_is_shown_is_of_the_ops_that_are_printed(tmp_path: Path) -> None:
    """Not its numbers, which depend on the processor's bfloat16 kernels."""
    page = (PAGES / "how-to" / "compare.md").read_text(encoding="utf-8")
    printed = doc_blocks.run(doc_blocks.blocks(page)[0], tmp_path)
    shown = doc_blocks.blocks(page, "text")[0]

    def words(text: str) -> list[str]:
        return re.sub(r"[\d.]+%?", "N", text).split()

    head, _, advice = shown.partition("...\n")
    assert words(head) == words(printed)[: len(words(head))]
    assert words(advice) == words(printed.splitlines()[-1])


def commands() -> list[str]:
    """The lines of the shell on the pages and in the README that call hmp, without their remarks."""
    texts = [file.read_text(encoding="utf-8") for file in [*FILES, doc_blocks.ROOT / "README.md"]]
    lines = {line for text in texts for block in doc_blocks.blocks(text, "sh") for line in block.splitlines()}
    lines |= {line for text in texts for line in re.findall(r"`((?:python -m )?hmp [^`]+)`", text)}
    return sorted(line for line in lines if re.match(r"(python -m )?hmp [a-z]", line))


def test_every_command_is_one_with_the_options_that_it_has() -> None:
    for line in commands():
        words = shlex.split(line.removeprefix("python -m "), comments=True)[1:]
        assert words[0] in HELP, line
        own = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))  # what is behind a script is the script's
        for option in (word.partition("=")[0] for word in words[:own] if word.startswith("--")):
            assert re.search(rf"^  (-\w, )?{option}\b", HELP[words[0]], re.MULTILINE), line
