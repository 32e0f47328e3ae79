"""With what `pip install .` brings, torch alone, the first examples run, and every result and command prints its text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import doc_blocks
import torch_alone
from command_kit import RECIPE
from torch_has import SAVED_TENSORS

PAGES = [doc_blocks.ROOT / "README.md", doc_blocks.PAGES / "start" / "quickstart.md"]

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
print(report.diff(report), hmp.types.Report.from_dict(report.to_dict()), hmp.verify(model, x, habana))
print(hmp.summary(model), hmp.summary(model, x))
for comparison in (hmp.compare(model, x), hmp.compare(model, x, habana, against=autocast)):
    print(comparison, comparison._repr_html_())
print(hmp.benchmark(step, ["float32", "habana"], rounds=1, steps=1))
print(hmp.explain("softmax"), hmp.explain("softmax")._repr_html_(), habana, habana._repr_html_(), habana.diff(autocast))
print(hmp.memory.memory_stats("cpu"), hmp.fallbacks(), hmp.unreachable(), hmp.policies())
try:
    with hmp.detect_nonfinite():
        torch.zeros(2).log()
except hmp.NonFiniteError as error:
    print(error)
try:
    with torch.autocast("cpu"):
        hmp.verify(Island(), torch.ones(2, 2), habana)
except hmp.errors.ViolationError as error:
    print(error)
"""

COMMANDS = """
explain softmax
lists
check habana
check my_lists
diff habana bert
doctor
init new.py
summary recipe.py
compare recipe.py --policy habana --against autocast
benchmark recipe.py --policies float32,habana --seconds 0.1 --steps 1
run --policy habana --report a.txt train.py
run --policy habana --report a.json train.py
diff a.json a.json
"""
SHELL = f"""
from hmp.cli import main

for command in {COMMANDS.split(chr(10))[1:-1]!r}:
    status = main(command.split())
    # 1: two policies that differ, and what doctor says of this machine
    assert status == 0 or status == 1 and command in ("diff habana bert", "doctor"), command
"""


NOTHING_ELSE = """
import importlib.util
import jinja2, torch
assert not [name for name in ("numpy", "rich", "matplotlib", "scipy", "safetensors", "pytest") if importlib.util.find_spec(name)]
try:
    import rich
except ModuleNotFoundError:
    print("no rich")
"""


@pytest.mark.slow  # a process that imports and does everything once: ten seconds
@pytest.mark.native_kernels
def test_the_first_examples_results_and_commands_print_their_text(tmp_path: Path) -> None:
    examples = {
        f"{page.stem}{at}": example
        for page in PAGES
        for at, example in enumerate(doc_blocks.with_outputs(page.read_text(encoding="utf-8")))
    }
    assert len(examples) >= 4
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "train.py").write_text("import torch\nprint(torch.nn.Linear(4, 4)(torch.randn(2, 4)).dtype)\n")
    shutil.copytree(doc_blocks.ROOT / "op_lists" / "habana", tmp_path / "my_lists")
    scripts = {"alone": NOTHING_ELSE, **{name: code for name, (code, _) in examples.items()}, "results": RESULTS, "shell": SHELL}
    printed = torch_alone.run(scripts, tmp_path)
    assert printed["alone"] == "no rich\n"
    if SAVED_TENSORS:  # else bytes saved for backward are not counted
        for name, (_, shown) in examples.items():
            assert doc_blocks.comparable(printed[name]) == doc_blocks.comparable(shown or ""), name
    for found in (
        "Quantisation of the operands of FP8 matrix multiplications",
        "Packed activations",
        "`log` made Inf out of finite inputs",
        "in Island at results.py:7",
    ):
        assert found in printed["results"]
    assert (tmp_path / "a.txt").read_text(encoding="utf-8").startswith("hmp report: ")
    assert "a.json -> a.json: 0 differences" in printed["shell"]
