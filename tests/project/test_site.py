"""What is made for the site is what the code has, and its search finds a user's words."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import doc_blocks
import hmp
from making import completed, presets, releases

DOCS = doc_blocks.ROOT / "docs"
# What a person types, and the page that is to be found.
SEARCHES = {
    "mixed precision": "start/quickstart.html",
    "gradient checkpointing": "how-to/activation-memory.html",
    "out of memory": "how-to/activation-memory.html",
    "activation memory": "how-to/activation-memory.html",
    "loss scaling": "start/float16-or-bfloat16.html",
    "GradScaler": "start/float16-or-bfloat16.html",
    "underflow": "start/float16-or-bfloat16.html",
    "matrix multiplication": "how-to/fp8.html",
    "NaN or Inf": "how-to/find-a-nan.html",
    "LayerNorm": "how-to/keep-a-layer-in-float32.html",
    "lm_head": "how-to/keep-a-layer-in-float32.html",
    "TransformerEngine": "start/comparison.html",
    "torchao": "start/comparison.html",
    "apex": "start/comparison.html",
    "FSDP": "how-to/distributed.html",
    "Lightning": "how-to/trainers.html",
    "torch.compile": "start/apply-casts-convert.html",
    "inference": "how-to/weights-for-inference.html",
    "Llama": "how-to/recipes.html",
    "log-probabilities": "how-to/measure-the-error.html",
    "presets": "reference/lists.html",
    "FAQ": "background/faq.html",
    "glossary": "background/faq.html",
    "Windows": "background/faq.html",
    "MPS": "background/faq.html",
    "environment variables": "reference/cli.html",
}


@pytest.mark.slow
def test_the_sites_search_finds_a_users_words(tmp_path: Path) -> None:
    """The site is built as .ci/site does, where mkdocs is installed. A page is found if a title or heading of it has the words."""
    pytest.importorskip("material", reason="the site is built with the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-f", str(DOCS / "mkdocs.yml"), "-d", str(tmp_path / "site")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    entries = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    lost = []
    for asked, page in SEARCHES.items():
        found = {entry["location"].partition("#")[0] for entry in entries if asked.lower() in re.sub(r"<.*?>", "", entry["title"]).lower()}
        if page not in found:
            lost.append(asked)
    assert lost == []
    assert not [entry for entry in entries if "<!-- " in entry["text"]]
    shutil.rmtree(tmp_path / "site")


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
    assert {place.rpartition(".")[2] for place in shown} >= set(hmp.__all__) - {"hmp"}
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
