"""The README and the pages say what is so: their Python blocks run and print what is shown, every command on them is one."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import doc_blocks
import hmp
from hmp import cli
from hmp.torch_private import TORCH
from making import command_line

PAGES = doc_blocks.ROOT / "docs" / "pages"
FILES = sorted(PAGES.rglob("*.md"))
# What takes more than a few seconds: it imports transformers or Lightning, starts a search, times, compares, or exports.
SLOW = ("transformers", "lightning", "optimum", "hmp.tune(", "hmp.benchmark(", "hmp.compare(", "torch.export.")
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


ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
TABLE_START = re.compile(r"^ *─+ *$", re.MULTILINE)


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


def test_opens_with_one_sentence_and_a_picture_and_is_short() -> None:
    title, sentence, picture = README.split("\n\n")[:3]
    assert title == "# hmp"
    assert sentence.count(". ") == 0 and sentence.endswith(".")
    assert re.fullmatch(r"!\[.+\]\(docs/images/\w+\.png\)", picture)
    assert len(README.splitlines()) <= 150


def test_every_other_python_block_runs_as_it_stands(tmp_path: Path) -> None:
    (code,) = [code for code in blocks("python") if "hmp.record()" not in code and "detect_nonfinite" not in code]
    doc_blocks.run(code, tmp_path)


@pytest.mark.native_kernels
def test_the_first_success_prints_what_is_shown(tmp_path: Path) -> None:
    (code,) = [code for code in blocks("python") if "hmp.record()" in code]
    (shown,) = [text for text in blocks("text") if text.startswith("hmp record:")]
    printed = doc_blocks.run(code, tmp_path)
    # rows stand in the order of the time that they took, which is not the same in each run
    wanted, found = (Counter(map(without_times, text.splitlines())) for text in (shown.removesuffix("...\n").removesuffix("..."), printed))
    assert wanted <= found
    assert without_times(printed.splitlines()[0]) == without_times(shown.splitlines()[0])


def without_times(text: str) -> str:
    """The words of a report, without what differs between two runs and two releases of torch."""
    text = re.sub(r"[\d.]+ (ns|us|ms|s)\b", "N", text)
    return " ".join(re.sub(r"@[\d.]+( \(\w+\))?|:\d+\)", "", text).split())


@pytest.mark.slow
def test_the_finding_is_what_the_block_on_nans_prints(tmp_path: Path) -> None:
    (code,) = [code for code in blocks("python") if "detect_nonfinite" in code]
    printed = doc_blocks.run(code, tmp_path).splitlines()
    assert "made Inf out of finite inputs" in printed[0]
    assert [line.split(":")[0].strip() for line in printed[1:]] == ["inputs", "output", "rule", "try"]


@pytest.mark.parametrize("code", doc_blocks.blocks((PAGES / "start" / "first-steps.md").read_text(encoding="utf-8"))[:1])
def test_the_first_steps_print_what_is_shown(code: str, tmp_path: Path) -> None:
    shown = doc_blocks.blocks((PAGES / "start" / "first-steps.md").read_text(encoding="utf-8"), "text")[0]
    assert doc_blocks.run(code, tmp_path) == shown


def test_the_text_of_a_package_index_is_the_readme_with_links_that_work_there() -> None:
    names = runpy.run_path(str(ROOT / "docs" / "long_description.py"))
    text = (ROOT / "docs" / "package-index.md").read_text(encoding="utf-8")
    assert text == names["text"](), "run python docs/long_description.py"
    assert not [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith("https://")]
    with_source = names["anywhere"]("![a](b.png) [c](d.md)", "https://host.example/hmp")
    assert with_source == "![a](https://host.example/hmp/raw/HEAD/b.png) [c](https://host.example/hmp/blob/HEAD/d.md)"


@pytest.mark.slow
def test_demo_output_is_what_the_demo_prints() -> None:
    pytest.importorskip("rich")
    pytest.importorskip("sklearn")
    # what is shown is of a processor without bfloat16 instructions
    environment = {**os.environ, "HMP_LOW_KERNELS": "float32"}
    command = [sys.executable, "-m", "hmp", "demo", "--epochs", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    page = (PAGES / "start" / "first-steps.md").read_text(encoding="utf-8")
    (shown,) = [text for text in doc_blocks.blocks(page, "text") if text.startswith("hmp demo,")]
    assert table_of(done.stdout) == table_of(shown), "run python -m hmp demo again and paste what it prints"
    assert "check passed" in shown
    # plain where it is piped, and one screen, which ends in the verdict
    assert "\x1b" not in done.stdout and "\r" not in done.stdout and "trained convnet in float32: 18 steps" in done.stdout
    assert len(done.stdout.splitlines()) <= 40 and "ATen ops" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("check ")


def table_of(output: str) -> list[str]:
    """The table's words without what differs between two runs: accuracy, time, what is said of the processor, and where lines break."""
    body = TABLE_START.split(output, maxsplit=1)[1].partition("check ")[0]
    body = re.sub(r"Low precision saves memory.*?says\s+more\)\.", "", body, flags=re.DOTALL)
    body = re.sub(r"-(?=\s+[\d.]+ ms)", "0 %", body)  # torch.autocast is cut short where it is slow
    return re.sub(r"[\d.]+ (%|ms)", r"N \1", body).split()


def test_each_search_of_the_pages_has_a_folder_of_its_own() -> None:
    page = (PAGES / "how-to" / "tune.md").read_text(encoding="utf-8")
    lines = [line for text in doc_blocks.blocks(page, "sh") for line in text.splitlines()]
    folders = [re.findall(r'"folder": "(\w+)"', text) for text in doc_blocks.blocks(page)]
    folders += [re.findall(r"--out (\w+)", line) or ["tuned"] for line in lines if "hmp tune" in line]
    found = [name for names in folders for name in names]
    assert len(found) >= 2
    assert len(set(found)) == len(found)


def test_ci_calls_the_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (extraction,) = re.findall(r"^test_command=.*$", script, re.MULTILINE)
    extracted = subprocess.run(
        ["bash", "-c", f'{extraction}\nprintf %s "$test_command"'], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (shown,) = [text for text in blocks("sh") if "pytest" in text]
    assert extracted == shown.rstrip("\n")
    assert re.search(r'^bash .*-c "\$test_command"', script, re.MULTILINE)


def test_both_commands_make_their_own_environment_with_pinned_versions() -> None:
    commands = [text for text in blocks("sh") if "venv" in text]
    assert len(commands) == 2
    for command in commands:
        (environment,) = re.findall(r"python3 -m venv (\S+) && ", command)
        assert command.count(f"{environment}/bin/") == 2
        assert "-c tests/constraints.txt" in command
    assert re.search(r"^torch==\S+$", (ROOT / "tests" / "constraints.txt").read_text(), re.MULTILINE)


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
