"""`hmp check`, `explain`, `lists` and `diff`: text for people, JSON for programs, exit status for scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hmp
from hmp.cli import main
from trap_kit import policy

BF16 = "linear\nliner\nmm, matmul\nlinear  # twice\nbad name\nhabana_matmul_v2\n"


@pytest.fixture
def lists(tmp_path: Path) -> tuple[str, str]:
    bf16, fp32 = tmp_path / "my_bf16.txt", tmp_path / "my_fp32.txt"
    bf16.write_text(BF16)
    fp32.write_text("softmax\nmm\n")
    return str(bf16), str(fp32)


@pytest.mark.native_kernels
def test_check_tells_every_name_and_every_problem_at_once(lists: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *lists]) == 1
    lines = capsys.readouterr().out.splitlines()
    bf16, fp32 = lists
    assert lines[0] == f"ok     {bf16}:1: linear: its floating-point inputs are cast to the low-precision dtype (R1)"
    assert lines[1].startswith(f"error  {bf16}:2: liner: unknown op 'liner'; did you mean 'linear'")
    assert lines[2].startswith(f"ok     {bf16}:3: mm: ")
    assert lines[3].startswith(f"ok     {bf16}:3: matmul: ")
    assert lines[4] == lines[0].replace(f"{bf16}:1", f"{bf16}:4")
    assert lines[5].startswith(f"error  {bf16}:5: expected the name of an op, such as 'linear', got 'bad name'")
    assert lines[6].startswith(f"error  {bf16}:6: habana_matmul_v2: unknown op 'habana_matmul_v2'")
    assert lines[7].startswith(f"ok     {fp32}:1: softmax: its floating-point inputs are cast to float32 (R2)")
    assert lines[8] == f"error  {fp32}:2: mm: is also on the bf16 list, as 'mm' ({bf16}:3); remove one of them"
    assert lines[9] == "9 findings: 4 errors, 0 notes"


def checked(folder: Path, capsys: pytest.CaptureFixture[str], **files: str) -> tuple[int, list[str]]:
    """The exit status of hmp check for a folder of these files, and what it printed without the folder's path."""
    for name, text in files.items():
        (folder / f"{name}.txt").write_bytes(text.encode("latin-1") if "\xdf" in text else text.encode())
    status = main(["check", str(folder)])
    return status, [line.replace(str(folder), "DIR") for line in capsys.readouterr().out.splitlines()]


REFUSED = {
    "dtype": ({"dtype": "float8"}, "DIR/dtype.txt: expected bfloat16 or float16, got 'float8'"),
    "base": ({"base": "brt"}, "DIR/base.txt: expected "),
    "kernel": ({"kernel": "cuda"}, "DIR/kernel.txt: expected auto or emulate, got 'cuda'"),
    "encoding": ({"bf16": "linear # gr\xf6\xdfe\nmm\n"}, "DIR/bf16.txt:1: is not UTF-8 text"),
    "byte order mark": ({"bf16": "linear\n\ufeffmm\n"}, "DIR/bf16.txt:2: expected the name of an op, such as 'linear', got '\\ufeffmm'"),
}


@pytest.mark.parametrize(("files", "error"), REFUSED.values(), ids=REFUSED.keys())
def test_check_refuses_what_convert_refuses(files: dict[str, str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = checked(tmp_path, capsys, **{"bf16": "linear\n", "fp32": "softmax\n", **files})
    assert status == 1
    assert next(line for line in lines if line.startswith("error")).startswith(f"error  {error}")
    assert lines[-1].split(": ")[1].startswith("1 error,")
    with pytest.raises(hmp.HmpError):
        hmp.convert(policy=str(tmp_path))


def test_check_tells_all_that_is_wrong_in_a_folder_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "promote.txt").symlink_to("/moved/promote.txt")
    (tmp_path / "saved.txt").mkdir()
    (tmp_path / "README.md").write_text("What these lists are for.")
    status, lines = checked(tmp_path, capsys, base="autocst", dtype="float8", fp32="sofmax\n", BF16="linear\n", bf_16="linear\n")
    assert status == 1
    assert any(line.endswith("got 'autocst'; did you mean 'autocast'?") for line in lines)
    assert {line.partition(";")[0].partition("? ")[0] for line in lines if line.startswith("error")} == {
        "error  DIR/fp32.txt:1: sofmax: unknown op 'sofmax'",
        "error  DIR/promote.txt: cannot be read: No such file or directory",
        "error  DIR/saved.txt: expected a text file, got a folder",
        "error  DIR/BF16.txt: did you mean 'bf16.txt'",
        "error  DIR/bf_16.txt: did you mean 'bf16.txt'",
        "error  DIR/base.txt: expected a preset's name, got 'autocst'",
        "error  DIR/dtype.txt: expected bfloat16 or float16, got 'float8'",
    }


@pytest.mark.native_kernels
def test_check_knows_what_the_base_adds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = checked(tmp_path, capsys, base="autocast\n", promote="linear\nmm\n")
    assert status == 0
    assert lines[0] == "ok     DIR/promote.txt:1: linear: its floating-point inputs are cast to the widest dtype among them (R3)"
    assert lines[2] == "note   DIR: no bf16.txt, fp32.txt: these lists are those of 'autocast', which base.txt names"
    assert lines[3] == "3 findings: 0 errors, 1 note"
    assert hmp.explain("linear", str(tmp_path)).cast == "promote" and hmp.explain("bmm", str(tmp_path)).cast == "bf16"


def test_check_tells_names_that_do_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = checked(tmp_path, capsys, bf16="mul\n*\n", fp32="exp_\nmultiply\n", promote="mul\n*\nspecial.softmax\n")
    told = {(line.split(": ")[0].split()[1][4:], line.split(": ")[1]): line for line in lines[:-1]}
    in_place = "an in-place op: its result keeps the dtype of the tensor that it writes to, whatever list it is on (R5)"
    assert status == 0
    assert told["fp32.txt:1", "exp_"] == f"note   DIR/fp32.txt:1: exp_: {in_place}"
    assert told["promote.txt:1", "mul"] == "note   DIR/promote.txt:1: mul: also on the bf16 list, as 'mul', which wins (R4)"
    assert told["promote.txt:2", "*"] == "note   DIR/promote.txt:2: *: also on the bf16 list, which wins (R4)"
    # a synonym that is listed itself follows its own line
    assert told["bf16.txt:1", "mul"].endswith(" mul: its floating-point inputs are cast to the low-precision dtype (R1)")
    assert told["fp32.txt:2", "multiply"].endswith(" multiply: its floating-point inputs are cast to float32 (R2)")
    x = torch.ones(2)
    with hmp.casts(hmp.Policy.load(tmp_path)):
        assert torch.mul(x, x).dtype is torch.bfloat16 and torch.multiply(x, x).dtype is torch.float32


RECIPE_OF_A_GPT = """
import torch
def model(): return torch.nn.ModuleDict({"block": torch.nn.Linear(2, 2), "lm_head": torch.nn.Linear(2, 2)})
def batches(): return [1]
def loss(model, batch): raise AssertionError("nothing is computed")
"""


def test_check_finds_scopes_that_match_nothing_where_it_is_given_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "recipe.py").write_text(RECIPE_OF_A_GPT)
    lists = tmp_path / "lists"
    lists.mkdir()
    status, lines = checked(lists, capsys, base="autocast", fp32="linear @ lm_hed\nsoftmax @ lm_head\n")
    cast = "its floating-point inputs are cast to float32 (R2)"
    assert status == 0
    assert lines[0] == f"ok     DIR/fp32.txt:1: linear @ lm_hed: inside modules whose path 'lm_hed' matches (scope not checked): {cast}"
    assert lines[-1] == "scopes were not checked: give your model, --model recipe.py (hmp init writes a recipe)"
    assert main(["check", str(lists), "--model", str(tmp_path / "recipe.py")]) == 1
    lines = [line.replace(str(lists), "DIR") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "error  DIR/fp32.txt:1: linear @ lm_hed: matches no module of ModuleDict; did you mean 'lm_head'?"
    assert lines[1] == f"ok     DIR/fp32.txt:2: softmax @ lm_head: inside modules whose path 'lm_head' matches: {cast}"
    assert lines[-1] == "3 findings: 1 error, 1 note"


def test_only_close_names_are_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, lines = checked(tmp_path, capsys, bf16="layer_nrm\n")
    assert lines[0] == "error  DIR/bf16.txt:1: layer_nrm: unknown op 'layer_nrm'; did you mean 'layer_norm'?"


def test_json_is_not_written_over_a_list(lists: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", *lists]) == 2
    assert "expected a file that ends in .json" in capsys.readouterr().err
    assert Path(lists[0]).read_text() == BF16


@pytest.mark.parametrize("preset", ["habana", "autocast", "torch-cuda@2.13"])
def test_check_of_a_preset_prints_each_entry_with_its_meaning(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", preset]) == 0
    lines, policy = capsys.readouterr().out.splitlines(), hmp.Policy.load(preset)
    entries = [name for cast in policy.lists for name in policy.entries(cast)]
    assert {line.split(": ")[1] for line in lines[:-1] if ".txt:" in line.split(": ")[0]} >= {*entries}
    folder = Path(next(iter(policy.origin.values())).path).parent.name  # of the nearest release whose lists are these
    assert f"{folder}/bf16.txt:" in lines[0] and not any(line.startswith("error") for line in lines)


def test_check_of_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "bf16.txt")]) == 1
    assert "No such file" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "missing.txt")]) == 2
    assert f"{tmp_path}/missing.txt: no such file" in capsys.readouterr().err
    for path in (tmp_path, *(tmp_path / name for name in ("ops.txt", "bf16_and_fp32.txt"))):  # no list, and none that its name tells
        if path != tmp_path:
            path.write_text("linear\n")
        assert main(["check", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    assert main(["check", "--list", "fp32", str(tmp_path / "ops.txt")]) == 0
    capsys.readouterr()
    (tmp_path / "bf16.txt").write_bytes(b"linear\n\xff\xfe\n")
    assert main(["check", str(tmp_path / "bf16.txt")]) == 1
    assert f"{tmp_path}/bf16.txt:2" in capsys.readouterr().out


def test_explain_says_what_a_policy_does_with_an_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "truediv"]) == 0
    assert capsys.readouterr().out == f"{hmp.explain('truediv', 'autocast')}\n"
    assert main(["explain", "truediv", "--policy", "bert", "--json", str(tmp_path / "told.json")]) == 0
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["name"], told["cast"], told["policy"]) == ("truediv", "bf16", "bert")
    assert main(["explain", "truedif"]) == 2
    assert "did you mean 'truediv'" in capsys.readouterr().err


def test_diff_of_two_recordings_exits_with_one_when_what_ran_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(3, 3)
    files = []
    for number, lists in enumerate((policy(bf16={"linear"}), policy(fp32={"linear"}))):
        with hmp.convert(policy=lists), hmp.record() as report:
            F.linear(x, x)
            if files:
                x.tanh()
        files.append(str(report.to_json(tmp_path / f"{number}.json")))
    assert main(["diff", files[0], files[0]]) == 0
    assert capsys.readouterr().out == f"{files[0]} -> {files[0]}: 0 differences\n"
    changes = ["linear: bfloat16 -> float32", "tanh: not called -> float32"]
    assert main(["diff", *files, "--json", str(tmp_path / "changes.json")]) == 1
    assert capsys.readouterr().out.splitlines() == [f"{files[0]} -> {files[1]}: 2 differences", *(f"  {each}" for each in changes)]
    assert json.loads((tmp_path / "changes.json").read_text())["changes"] == changes
    assert main(["diff", files[0], str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
