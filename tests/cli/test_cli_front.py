"""What every command shares: help without torch, an example each, errors of the command that was given, --json, Ctrl-C."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hmp
from command_kit import RECIPE, ROOT, python
from hmp.cli import main

COMMANDS = "demo run lists check explain diff init compare benchmark tune summary cast-weights doctor".split()
STOPS = """\
    if os.environ.get("STOP") == "loss":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in the background without it
        os.kill(os.getpid(), signal.SIGINT)
    return model(batch)"""
AT_THE_IMPORT = """
import os, signal
if os.environ.get("STOP") == "import":
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise ImportError("numpy._core.multiarray failed to import")
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.py").write_text(RECIPE.replace("    return model(batch)", STOPS) + AT_THE_IMPORT)
    return tmp_path / "recipe.py"


def test_help_and_version_import_neither_torch_nor_an_extra() -> None:
    code = f"""if True:
        import sys
        import hmp
        from hmp.cli import main
        for arguments in [[], *([name] for name in {COMMANDS!r})]:
            assert main([*arguments, "-h"]) == 0, arguments
        assert main(["--version"]) == 0
        assert main(["run", "--polcy"]) == 2
        found = {{"torch", "numpy", "rich", "jinja2", "matplotlib", "scipy"}} & set(sys.modules)
        sys.exit(f"imported {{found}}" if found else 0)
    """
    done = python("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("example:\n  hmp ") == 1 + len(COMMANDS)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{hmp.__version__}"' in project
    assert done.stdout.endswith(f"hmp {hmp.__version__}\n")


JSON = [
    ["check", "lists/"],
    ["diff", "habana", "bert"],
    ["explain", "mul"],
    ["lists"],
    ["compare", "recipe.py"],
    ["benchmark", "recipe.py", "--policies", "float32", "--seconds", "0.1", "--steps", "1"],
    ["summary", "recipe.py"],
    ["cast-weights", "weights.safetensors", "--model", "model_of_weights:make", "-o", "low.safetensors"],
]


def test_examples_are_understood_and_every_json_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-h"]) == 0
    assert re.findall(r"^    ([a-z][a-z-]*)\b(?!-)", capsys.readouterr().out, re.MULTILINE) == COMMANDS
    for name in COMMANDS:
        assert main([name, "-h"]) == 0
        text = capsys.readouterr().out
        examples = text.partition("example:\n")[2].strip().splitlines()
        assert examples
        for example in examples:
            program, *arguments = shlex.split(example)
            assert (program, arguments[0]) == ("hmp", name)
            assert main([name, "--unknown-option", *arguments[1:]]) == 2  # which is all that there is to say against it
            assert capsys.readouterr().err.splitlines()[-1] == f"hmp {name}: error: unrecognized arguments: --unknown-option"
        assert ("--json" in text) == (name == "doctor" or name in {arguments[0] for arguments in JSON}), (
            f"hmp {name} has --json and no line in JSON"
        )


@pytest.mark.parametrize("arguments", JSON, ids=" ".join)
def test_json_means_the_same_everywhere(arguments: list[str], recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hmp.Policy(bf16={"linear"}).save("lists")
    Path("model_of_weights.py").write_text("import torch\n\ndef make():\n    return torch.nn.Linear(2, 2), torch.ones(1, 2)\n")
    save_file(torch.nn.Linear(2, 2).state_dict(), "weights.safetensors")
    assert main([*arguments, "--json", "out.json"]) in (0, 1)
    assert capsys.readouterr().out, "the text is printed too"
    values = json.loads(Path("out.json").read_text())
    assert next(iter(values.items())) == ("schema_version", 1)
    assert main([*arguments, "--json", "none/out.json"]) == 2
    assert "none/out.json: the folder does not exist; create it first" in capsys.readouterr().err


def test_every_json_that_is_written_says_its_version_and_no_folder_is_made_for_a_file(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with hmp.casts(), hmp.record() as report:
        model(torch.ones(1, 2))
    comparison = hmp.compare(model, torch.ones(1, 2))
    benchmark = hmp.benchmark(lambda: None, ["float32"], rounds=1, steps=1)
    tuned = hmp.tune(model, [torch.ones(1, 2)], loss=lambda m, x: m(x).square().mean(), max_trials=3, objective="memory", folder=tmp_path)
    files = [getattr(result, form)(tmp_path / f"{form}{at}") for at, (result, form) in enumerate(
        ((report, "to_json"), (comparison, "to_json"), (benchmark, "to_json"), (tuned, "to_json")))]  # fmt: skip
    for file in (*files, tmp_path / "tune.json"):
        assert json.loads(file.read_text())["schema_version"] == 1, file
    assert hmp.types.Report.load(files[0]).rows == report.rows
    folder = tmp_path / "no"
    for result in (report, comparison, benchmark, tuned):
        for form in {"to_json", "to_html"} & {*dir(result)}:
            with pytest.raises(hmp.HmpError, match=f"there is no folder {folder} to write it into; make the folder first$"):
                getattr(result, form)(folder / "file")
            with pytest.raises(hmp.HmpError, match=f"^{tmp_path}: cannot be written .*; give a file in a folder that can be written to$"):
                getattr(result, form)(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize(("name", "where"), [("compare", "loss"), ("benchmark", "import")])
def test_ctrl_c_is_a_line_and_nobodys_fault(name: str, where: str, recipe: Path) -> None:
    done = python("-m", "hmp", name, "recipe.py", cwd=recipe.parent, STOP=where)
    assert (done.returncode, done.stderr) == (130, f"hmp {name}: interrupted\n")


# -- doctor


def test_doctor_says_what_there_is(tmp_path: Path) -> None:
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) in (0, 1)  # other folders of tests may be on the path
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert (found["hmp"], found["torch"], found["problems"]) == (hmp.__version__, torch.__version__, [])
    assert found["folder"] == str(ROOT / "hmp")
    low = torch.ones(4, 4, dtype=torch.bfloat16)
    assert found["devices"]["cpu"]["kernels"]["bfloat16"] is ((low @ low).dtype is torch.bfloat16)
    assert found["extras"]["report"] == [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    assert found["converted"] is False
    assert 300 < found["patched"] < 600
    assert found["autocast"] == hmp.Policy.load("autocast").name
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    assert ("avx2" in found["instructions"]) is (" avx2 " in flags)


def test_doctor_prints_sentences_and_the_best_of_many_times(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Busy:
        """A timer of a machine that is busy but for one of its rounds: float32 takes 1 s, a bfloat16 kernel 0.5, float16's 5."""

        def __init__(self, statement: str, globals: dict[str, Any], num_threads: int) -> None:
            given = getattr(globals["call"].args[-1], "dtype", None)
            self.seconds = {torch.float32: 1.0, torch.bfloat16: 0.5, torch.float16: 5.0}.get(given, 2.0)
            self.round = 0

        def timeit(self, number: int) -> SimpleNamespace:
            self.round += 1
            return SimpleNamespace(median=self.seconds if self.round == 3 else 40.0 + self.round * self.seconds)

    monkeypatch.setattr("torch.utils.benchmark.Timer", Busy)
    assert main(["doctor"]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    of_float16 = next(line for line in lines if line.startswith("A matrix multiplication in float16"))
    assert "takes 5 of float32's time in torch's kernel" in of_float16
    assert lines[0].startswith(f"hmp {hmp.__version__} in ") and all(line.endswith(".") for line in lines[:6])
    assert {line.split(":")[0] for line in lines if line.startswith("  ")} >= {"  report", "  weights", "  transformers"}
