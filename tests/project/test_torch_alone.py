"""With what `pip install .` brings, torch alone, the first examples run, and every result and command prints its text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import doc_blocks
import torch_alone
from command_kit import RECIPE

PAGES = [doc_blocks.ROOT / "README.md", doc_blocks.ROOT / "docs" / "pages" / "start" / "first-steps.md"]

RESULTS = """
import torch, hmp

class Island(torch.nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return x @ x.T

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Softmax(-1))
x = torch.randn(64, 64)
habana, autocast = hmp.Policy.load("habana"), hmp.Policy.load("autocast")

def step():
    model(x).sum().backward()

for policy in (habana, habana.replace(fp8={"linear"}), "saved8"):
    with hmp.casts(policy), hmp.record() as report:
        model(x.requires_grad_()).sum().backward()
    print(report, repr(report), report._repr_html_())
    for by in ("op", "module", "line", "call"):
        print(report.table(by))
print(report.diff(report), hmp.Report.from_dict(report.to_dict()), hmp.verify(model, x, habana))
print(hmp.summary(model), hmp.summary(model, x))
for comparison in (hmp.compare(model, x), hmp.compare(model, x, habana, against=autocast)):
    print(comparison, comparison._repr_html_())
print(hmp.benchmark(step, ["float32", "habana"], rounds=1, steps=1))
print(hmp.explain("softmax"), hmp.explain("softmax")._repr_html_(), habana, habana._repr_html_(), habana.diff(autocast))
print(hmp.memory_stats("cpu"), hmp.cache_info(), hmp.fallbacks(), hmp.unreachable(), hmp.policies())
try:
    with hmp.detect_nonfinite():
        torch.zeros(2).log()
except hmp.NonFiniteError as error:
    print(error)
try:
    with torch.autocast("cpu"):
        hmp.verify(Island(), torch.ones(2, 2), habana)
except hmp.ViolationError as error:
    print(error)
"""

COMMANDS = """
explain softmax
lists
lists habana
check my_lists
diff habana autocast
doctor
init new.py
summary recipe.py
compare recipe.py
compare recipe.py --policy habana --against autocast
benchmark recipe.py --seconds 0.1
run --policy habana --report a.txt train.py
run --policy habana --report a.json train.py
diff a.json a.json
"""
SHELL = f"""
from hmp.cli import main

for command in {COMMANDS.split(chr(10))[1:-1]!r}:
    status = main(command.split())
    # 1: two policies that differ, and what doctor says of this machine
    assert status == 0 or status == 1 and command in ("diff habana autocast", "doctor"), command
"""


def test_nothing_but_torch_is_to_be_had(tmp_path: Path) -> None:
    code = """
import importlib.util
import jinja2, torch
assert not [name for name in ("numpy", "rich", "matplotlib", "scipy", "safetensors", "pytest") if importlib.util.find_spec(name)]
import rich
"""
    with pytest.raises(AssertionError, match=r"ModuleNotFoundError: No module named 'rich'"):
        torch_alone.run({"script": code}, tmp_path)


def test_a_block_that_needs_more_says_so_right_above() -> None:
    page = """
```sh
pip install .
```

## A heading

```python
one
```

`pip install -e '.[report]'` for the page:

```python
two
```

```sh
pip install -e '.[report]'
```

```python
three
```
"""
    assert doc_blocks.blocks_of_torch_alone(page) == ["one\n"]


def test_the_first_examples_run(tmp_path: Path) -> None:
    blocks = {f"{page.stem}{at}": code for page in PAGES for at, code in enumerate(_blocks(page))}
    assert len(blocks) == sum(len(doc_blocks.blocks(page.read_text(encoding="utf-8"))) for page in PAGES) >= 5
    printed = torch_alone.run(blocks, tmp_path)
    assert printed["README0"].startswith("hmp record: policy ") and "\nlinear  bf16  linear (torch-" in printed["README0"]
    assert "made Inf out of finite inputs" in printed["README1"]


def _blocks(page: Path) -> list[str]:
    return doc_blocks.blocks_of_torch_alone(page.read_text(encoding="utf-8"))


def test_results_and_commands_print_their_text(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "train.py").write_text("import torch\nprint(torch.nn.Linear(4, 4)(torch.randn(2, 4)).dtype)\n")
    shutil.copytree(doc_blocks.ROOT / "op_lists" / "habana", tmp_path / "my_lists")
    printed = torch_alone.run({"results": RESULTS, "shell": SHELL}, tmp_path)
    for found in (
        "\nin FP8  role ",
        "\nkept for backward by  tensors ",
        "`log` made Inf out of finite inputs",
        "in Island at results.py:7",
    ):
        assert found in printed["results"]
    assert (tmp_path / "a.txt").read_text(encoding="utf-8").startswith("hmp record: policy habana")
    assert "every op ran in a.json as in a.json" in printed["shell"]
