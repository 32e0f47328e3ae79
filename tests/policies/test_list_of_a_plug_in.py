"""A kind of list that hmp does not know: all that hmp does with lists follows from what its plug-in says."""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
import list_kit
from command_kit import RUN, python
from compile_kit import BRIDGED
from hmp.cli import main
from process_kit import run_in_another_process

X, WEIGHT = torch.linspace(-1, 1, 24).view(3, 8), torch.linspace(-2, 1, 32).view(4, 8)


@pytest.fixture(scope="module")
def plug_in() -> Iterator[Any]:
    """The module that adds the list, in this file only."""
    stochastic = importlib.import_module("stochastic")
    yield stochastic
    hmp.revert()
    list_kit.remove("stochastic")


@pytest.fixture
def policy(plug_in: Any) -> hmp.Policy:
    return hmp.Policy("mine", stochastic={"linear"}, bf16={"matmul"}, fp32={"softmax"})


def is_unbiased(results: torch.Tensor, exact: torch.Tensor) -> None:
    """The mean is the number, where rounding to the nearest would always give the same neighbour."""
    assert results.dtype is torch.bfloat16 and all(len(each.unique()) <= 2 for each in results.flatten(1).T)
    spacing = (exact.bfloat16().double() / 128).abs().clamp(min=2**-14)
    assert (results.double().mean(0) - exact).abs().div(spacing).max() < 0.15  # of 1,000 draws; 0.5 by rounding to the nearest
    assert (exact.bfloat16().double() - exact).abs().div(spacing).max() > 0.25


def test_its_ops_are_rounded_without_bias(policy: hmp.Policy) -> None:
    with hmp.casts(policy):
        results = torch.stack([F.linear(X, WEIGHT) for _ in range(1000)])
        assert torch.equal(torch.matmul(X, WEIGHT.T), torch.matmul(X.bfloat16(), WEIGHT.T.bfloat16()))
    is_unbiased(results, F.linear(X.double(), WEIGHT.double()))


def test_its_gradient_is_that_of_the_op(policy: hmp.Policy) -> None:
    x = X.clone().requires_grad_()
    with hmp.casts(policy):
        F.linear(x, WEIGHT).backward(torch.ones(3, 4, dtype=torch.bfloat16))
    assert torch.equal(x.grad, torch.ones(3, 4) @ WEIGHT)


@BRIDGED
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(policy: hmp.Policy) -> None:
    with hmp.casts(policy):
        compiled = torch.compile(lambda x: F.linear(x, WEIGHT), backend="eager", fullgraph=True)
        results = torch.stack([compiled(X) for _ in range(1000)])
    is_unbiased(results, F.linear(X.double(), WEIGHT.double()))


def test_a_report_has_its_column(policy: hmp.Policy) -> None:
    with hmp.casts(policy), hmp.record() as report:
        F.linear(X, WEIGHT)
        F.linear(X[:1], WEIGHT)
        F.softmax(X, -1)
    (row,) = (row for row in report.grouped("op") if row.op == "linear")
    assert (row.rule, row.source, row.inputs, row.compute, row.output) == ("stochastic", "linear", "float32", "float32", "bfloat16")
    assert row.more == {"rounded": 12 + 4}
    header, *lines = (line for line in str(report).splitlines() if "rounded" in line or line.startswith(("linear", "softmax")))
    assert "rounded" in header and "16" in lines[0]
    assert hmp.types.Report.from_dict(report.to_dict()).grouped("op")[0].more == row.more
    assert report.verify().violations() == []


def test_explain_has_its_sentence(policy: hmp.Policy) -> None:
    told = hmp.explain("linear", policy)
    assert (told.cast, told.why) == ("stochastic", "it computes in float32, and its result is rounded stochastically")
    assert "stochastic 1" in str(policy)


def test_it_is_a_file_of_a_folder(policy: hmp.Policy, tmp_path: Path) -> None:
    folder = policy.save(tmp_path / "saved")
    assert (folder / "stochastic.txt").read_text().splitlines() == ["# the kind of list is added by: stochastic", "linear"]
    assert hmp.Policy.load(folder) == policy == hmp.Policy.from_dict(policy.to_dict())
    assert hmp.Policy.load(folder).fingerprint == policy.fingerprint != policy.replace(stochastic=()).fingerprint
    policy.replace(stochastic=()).save(folder)
    assert not (folder / "stochastic.txt").exists()
    (tmp_path / "stochastic.txt").write_text("linear, matmul\n")
    (tmp_path / "base.txt").write_text("bert\n")
    loaded = hmp.Policy.load(tmp_path)
    assert loaded.stochastic == {"linear", "matmul"} and "add" in loaded.bf16 and not {"linear", "matmul"} & loaded.bf16


def test_convert_takes_its_file(plug_in: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("linear\n")
    with hmp.convert(stochastic_file_path=str(file)):
        assert len({float(F.linear(X, WEIGHT)[0, 0]) for _ in range(100)}) == 2
        assert len({float(torch.matmul(X, WEIGHT.T)[0, 0]) for _ in range(100)}) == 1
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'stochastic_file'; list files are .*stochastic_file_path"):
        hmp.convert(stochastic_file=str(file))
    with pytest.raises(hmp.HmpError, match="stochastic_file_path= and opt_level='O2', whose stochastic list is empty"):
        hmp.convert(opt_level="O2", stochastic_file_path=str(file))


def test_its_entries_may_have_a_scope(plug_in: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    policy = hmp.Policy(stochastic={"linear @ 1"}, bf16={"linear"})
    hmp.apply(model, policy)
    first, last = set(), set()
    model[0].register_forward_hook(lambda module, args, output: first.add(output[0, 0].item()))
    model[1].register_forward_hook(lambda module, args, output: last.add(output[0, 0].item()))
    for _ in range(100):
        model(X)
    assert (len(first), len(last)) == (1, 2)


def test_check_names_it(plug_in: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stochastic.txt").write_text("linear\nargmax\nsoftmax\nmath.sqrt\n")
    (tmp_path / "fp32.txt").write_text("softmax\n")
    assert main(["check", str(tmp_path)]) == 1
    lines = [line.replace(f"{tmp_path}/", "") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "ok     stochastic.txt:1: linear: it computes in float32, and its result is rounded stochastically"
    assert lines[1] == "error  stochastic.txt:2: argmax: 'argmax' returns integers, which need no rounding; remove it"
    assert lines[2].startswith("ok     stochastic.txt:3: softmax: it computes in float32")
    assert "the stochastic list expected an op of torch, got your function 'math.sqrt'; name the ops that it calls" in lines[3]
    assert lines[4] == "error  fp32.txt:1: softmax: is also on the stochastic list, as 'softmax' (stochastic.txt:3); remove one of them"


def test_lists_that_exclude_each_other(plug_in: Any) -> None:
    with pytest.raises(hmp.errors.OpListError, match="'linear' is on the stochastic list and on the FP32 list; take it off one of them"):
        hmp.Policy(stochastic={"linear"}, fp32={"linear"})
    both = hmp.Policy(stochastic={"linear"}, bf16={"linear"})
    assert hmp.explain("linear", both).cast == "stochastic"
    assert hmp.Policy(bf16={"linear"}).diff(both) == {"linear": ("bf16", "stochastic")}
    assert both.move("linear", "fp32") == hmp.Policy(fp32={"linear"})


SCRIPT = "import torch, torch.nn.functional as F\nx = torch.full((1, 3), 1 / 3)\nprint(len({float(F.linear(x, x)) for _ in range(100)}))\n"


@pytest.mark.slow
def test_hmp_run_knows_it_by_its_entry_point(tmp_path: Path) -> None:
    """As pip writes it; a list that only the script imports comes too late, which hmp run says."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "mine.txt").write_text("linear\n")
    run = (*RUN, "--list", "stochastic=mine.txt", "train.py")
    unknown = python(*run, cwd=tmp_path)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr.startswith("hmp run: no kind of list 'stochastic' is installed, expected one of ")
    assert "an entry point for it in the group 'hmp.lists'" in unknown.stderr
    installed = tmp_path / "site"
    (installed / "stochastic-1.dist-info").mkdir(parents=True)
    (installed / "stochastic-1.dist-info" / "entry_points.txt").write_text("[hmp.lists]\nstochastic = stochastic\n")
    (installed / "stochastic.py").write_text((Path(__file__).parents[1] / "support" / "stochastic.py").read_text())
    done = python(*run, cwd=tmp_path, before=installed)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_without_the_plug_in_its_list_is_an_error(policy: hmp.Policy, tmp_path: Path) -> None:
    policy.save(tmp_path / "saved")
    (tmp_path / "by_hand").mkdir()
    (tmp_path / "by_hand" / "stochastic.txt").write_text("linear  # of the head\nmatmul @ head\n")
    (tmp_path / "remarks").mkdir()
    (tmp_path / "remarks" / "bf16.txt").write_text("linear\n")
    (tmp_path / "remarks" / "readme.txt").write_text("Of each model, the head:\nlinear\n")
    (tmp_path / "policy.json").write_text(json.dumps(policy.to_dict()))
    (tmp_path / "policy.pickle").write_bytes(pickle.dumps(policy))
    run_in_another_process(
        """
        import json, pathlib
        folder = pathlib.Path(sys.argv[1])

        def error(kind, call, *args, **kwargs):
            try:
                call(*args, **kwargs)
            except kind as error:
                return str(error)
            raise AssertionError(f"{call} raised nothing")

        missing = "no kind of list 'stochastic' is installed, expected one of fp8, fp32_result, bf16, fp32, promote, saved; import "
        for name in ("saved", "by_hand"):
            said = error(hmp.errors.OpListError, hmp.Policy.load, folder / name)
            assert said.startswith(f"{folder / name / 'stochastic.txt'}: {missing}"), said
            assert said.endswith("; the file says that importing 'stochastic' adds it" if name == "saved" else ", out of the folder"), said
        assert hmp.Policy.load(folder / "remarks") == hmp.Policy(bf16={"linear"})
        assert "a policy has no 'stochastic'" in error(hmp.HmpError, hmp.Policy.from_dict, json.loads((folder / "policy.json").read_text()))
        of_policy = f"Policy(stochastic=...): {missing}"
        assert error(hmp.HmpError, pickle.loads, (folder / "policy.pickle").read_bytes()).startswith(of_policy)
        assert error(hmp.HmpError, hmp.Policy, stochastic={"linear"}).startswith(of_policy)
        assert error(hmp.HmpError, hmp.Policy("mine").replace, stochastic={"linear"}).startswith(of_policy)
        assert error(hmp.HmpError, hmp.Policy.from_files, stochastic="mine.txt").startswith(missing)
        assert error(hmp.HmpError, hmp.convert, stochastic_file_path="mine.txt").startswith(f"convert(stochastic_file_path=...): {missing}")
        assert not hmp.is_converted()
        """,
        tmp_path,
    )


@pytest.mark.parametrize(("name", "said"), [("stochastic", "there is a list or a word 'stochastic' already"), ("2bits", "got '2bits'")])
def test_a_kind_of_list_needs_a_name_of_its_own(plug_in: Any, name: str, said: str) -> None:
    with pytest.raises(hmp.HmpError, match=said):
        plug_in.lists.add(plug_in.lists.ListKind(name=name, title=name, contents="ops", module=__name__, rule=plug_in.RULE))
