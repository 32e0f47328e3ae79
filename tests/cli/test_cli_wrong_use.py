"""Wrong use of any command exits with 2, says on stderr what is wrong, prints nothing else, and changes nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import hmp
from command_kit import RECIPE
from hmp.cli import main
from hmp.compat import habana

WRONG = [
    ("", "usage: hmp"),
    ("chek a.txt", "usage: hmp ... invalid choice: 'chek'; did you mean 'check'?"),
    ("demo --epochs 0", "hmp demo: --epochs 0: expected a number of epochs, 1 or more"),
    ("run", "usage: hmp run"),
    ("run --polcy x.py", "usage: hmp run ... unrecognized arguments: --polcy"),
    ("run no.py", "hmp run: no.py: no such file"),
    ("run --policy bert --bf16 a --fp32 b x.py", "hmp run: expected --policy or --bf16, --fp32, got both"),
    ("run --verbose x.py", "hmp run: --verbose logs what a policy casts, but no policy was given"),
    ("run --habana --bf16 none.txt x.py", "hmp run: none.txt: cannot be read: No such file"),
    ("run --device-map hpu=tpu x.py", "hmp run: device map 'hpu=tpu': torch has no device 'tpu'"),
    ("run --report a.pdf x.py", "hmp run: --report a.pdf: expected a name that ends in .html, .json or .txt"),
    ("run --report none/a.html x.py", "hmp run: --report none/a.html: the folder does not exist"),
    ("run --capture none/a x.py", "hmp run: none/a: can't write into the folder none"),
    ("benchmark recipe.py --seconds 0", "hmp benchmark: invalid seconds=0.0: expected a positive number"),
    ("benchmark no.py", "hmp benchmark: no.py: no such file"),
    ("benchmark none.py", "hmp benchmark: none.py: lacks loss(model, batch)"),
    ("benchmark vector.py", "hmp benchmark: vector.py: loss(model, batch) returned a tensor of shape (4, 2)"),
    ("benchmark recipe.py --json no/out.json", "hmp benchmark: --json no/out.json: the folder does not exist"),
    ("compare none.py --html a.html", "hmp compare: none.py: "),
    ("compare vector.py", "hmp compare: vector.py: loss(model, batch) returned a tensor of shape (4, 2); return a scalar tensor"),
    ("compare recipe.py --trials -1", "hmp compare: invalid trials=-1: expected how many steps to try moves in"),
    ("compare recipe.py --policy scoped", "hmp compare: scoped/bf16.txt:1: 'linear @ head' matches no module"),
    ("summary recipe.py --policy scoped", "hmp summary: scoped/bf16.txt:1: 'linear @ head' matches no module"),
    ("compare recipe.py --html folder.json", "hmp compare: --html folder.json: expected a file to write, got a folder"),
    ("diff habana", "usage: hmp diff"),
    ("diff trainer.capture server.capture", "hmp diff: ... trainer has dense and server has fc"),
    (
        "diff trainer.capture habana",
        "hmp diff: ... expected two policies, two reports or two captures, got a capture, trainer.capture, and a policy, habana",
    ),
    ("diff habana bert --map a=b", "hmp diff: ... --map is for captures only; leave it out"),
    ("tune recipe.py --tolerence=0.1", "usage: hmp tune ... unrecognized arguments: --tolerence=0.1"),
    ("tune recipe.py --html no/page.html", "hmp tune: --html no/page.html: the folder does not exist"),
    ("tune recipe.py --out recipe.py", "hmp tune: recipe.py: expected a folder for the lists, got a file"),
    ("tune recipe.py --out mine", "hmp tune: mine: has lists that tune() did not write"),
    ("tune recipe.py --tolerance much", "usage: hmp tune"),
]


@pytest.fixture
def folder(tmp_path: Path, captures: None) -> Path:
    """A script, recipes, lists of one's own, and captures of the same layer under two names."""
    recipes = {"recipe": RECIPE, "none": RECIPE.replace("def loss", "def lost"), "vector": RECIPE.replace(".mean()", "")}
    for name, text in {**recipes, "x": "print('ran')\n"}.items():
        Path(f"{name}.py").write_text(text)
    hmp.Policy(bf16={"linear"}).save("mine")
    hmp.Policy(bf16={"linear @ head"}).save("scoped")
    Path("folder.json").mkdir()
    return tmp_path


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[arguments for arguments, _ in WRONG])
def test_wrong_use_is_two_and_says_what_is_wrong(arguments: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = list(sys.argv), sys.modules["__main__"], sorted(folder.rglob("*[!c]"))
    path = list(sys.path)
    assert main(arguments.split()) == 2
    printed = capsys.readouterr()
    begins, _, holds = said.partition(" ... ")
    assert not printed.out
    assert printed.err.startswith(begins) and holds in printed.err
    assert (list(sys.argv), sys.modules["__main__"], sorted(folder.rglob("*[!c]"))) == before
    assert not arguments.startswith("run") or sys.path == path
    assert not hmp.is_converted()
    habana.uninstall()  # which `hmp run` leaves to the end of the process


def test_a_folder_that_may_not_be_written_is_told_before_the_script_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != folder)  # root may write everywhere
    assert main(["run", "--report", "a.json", "x.py"]) == 2
    assert main(["summary", "recipe.py", "--json", "a.json"]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert [line.partition(": it")[0] for line in printed.err.splitlines()] == ["hmp run: --report a.json", "hmp summary: --json a.json"]
