"""The README and the pages say what is so: their Python blocks run and print what is shown, every command on them is one."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

import doc_blocks
import hmp
import torch_alone
from hmp.cli import main
from making import command_line

PAGES = doc_blocks.ROOT / "docs" / "pages"
FILES = sorted(PAGES.rglob("*.md"))
# What takes more than a few seconds: it imports transformers or Lightning, starts a search, times, compares, or exports.
SLOW = ("transformers", "lightning", "optimum", "hmp.tune(", "hmp.benchmark(", "hmp.compare(", "torch.export.")
HELP = {each.partition("\n")[0]: each for each in command_line.page().split("## hmp ")[1:]}


ALL = {
    f"{page.relative_to(PAGES).with_suffix('')}-{number}".replace("/", "."): block
    for page in FILES
    for number, block in enumerate(doc_blocks.blocks(page.read_text(encoding="utf-8")))
}
TAKES_LONG = {name: block for name, block in ALL.items() if any(word in block for word in SLOW)}


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [ALL.keys() - TAKES_LONG, pytest.param(TAKES_LONG.keys(), marks=pytest.mark.nightly)], ids=["", "long"])
def test_every_block_runs(blocks: Collection[str], tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "recipe.py")]) == 0  # which some import
    torch_alone.run({name: ALL[name] for name in sorted(blocks)}, tmp_path, alone=False)


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


ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


def test_the_text_of_a_package_index_is_the_readme_with_links_that_work_there() -> None:
    names = runpy.run_path(str(ROOT / "docs" / "long_description.py"))
    text = (ROOT / "docs" / "package-index.md").read_text(encoding="utf-8")
    assert text == names["text"](), "run python docs/long_description.py"
    assert not [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith("https://")]
    assert len(README.splitlines()) <= 150


def test_every_place_that_the_page_of_the_architecture_names_is_there() -> None:
    page = (PAGES / "explain" / "architecture.md").read_text(encoding="utf-8")
    places = set(re.findall(r"`([\w/]+\.py)(?::(\w+))?`", page))
    assert len(places) > 10
    for file, name in places:
        path = ROOT / file if (ROOT / file).is_file() else ROOT / "hmp" / file
        assert re.search(rf"^( *(def|class) )?{name}\b", path.read_text(encoding="utf-8"), re.MULTILINE), f"{file}: {name}"


def test_every_page_is_in_the_navigation() -> None:
    """mkdocs tells of a page that there is not, and not of one that nobody finds."""
    config = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page for page in FILES if str(page.relative_to(PAGES)) not in config] == []


def test_every_rule_and_every_preset_has_a_line() -> None:
    rules = (PAGES / "explain" / "rules.md").read_text(encoding="utf-8")
    presets = (PAGES / "start" / "choosing-a-preset.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| R(\d+) \|", rules, re.MULTILINE) == [str(number) for number in range(1, 23)]
    section = presets.partition("| preset |")[2].partition("\n\n")[0]
    shown = {name for line in section.splitlines() if line.startswith("| `") for name in re.findall(r"`([\w.@-]+)`", line.split("|")[1])}
    assert shown == set(hmp.policies()), "each preset has a row in docs/pages/start/choosing-a-preset.md, and each row is a preset's"


def test_mul_on_the_default_list_does_what_is_said() -> None:
    assert "mul" in hmp.Policy.load("habana").bf16
    assert "mul" not in hmp.Policy.load("autocast").bf16
    positions = torch.arange(4096).float()
    inverse_frequencies = 1 / 10000 ** (torch.arange(0, 64, 2) / 64)
    exact = (positions.double()[:, None] * inverse_frequencies.double()).cos()
    plain = (positions[:, None] * inverse_frequencies).cos()
    total, loss = torch.zeros(()), torch.tensor(0.7)
    with hmp.convert():
        angles = positions[:, None] * inverse_frequencies
        total += loss * 32
    assert total.item() == 22.375
    assert f"{(angles.double().cos() - exact).abs().max():.1f}" == "2.0"
    assert f"{(plain - exact).abs().max():.4f}" == "0.0001"
    kept = hmp.Policy.load("habana")
    assert kept.replace(bf16=kept.bf16 - {"mul"}).bf16 == kept.bf16 - {"mul"}
