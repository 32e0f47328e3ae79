"""The folder of a search: lists that load as the policy and decide as was chosen, and a true reason by each name.

No public call chooses what a search found: its result is made by hand.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hmp
import tune_result_kit
from hmp.core import lists
from hmp.core.policy import scopes
from hmp.core.policy.entries import ListEntry
from hmp.tools.tune.decisions import Decisions, Key
from hmp.tools.tune.result import list_files
from tune_result_kit import MS


def test_each_name_has_its_reason_beside_it_and_what_gains_most_is_first() -> None:
    """The lists as a reader has them: a heading with what was verified, then a name a line."""
    files = list_files(tune_result_kit.result())
    assert {name: [line.partition("  # ")[0].strip() for line in lines(text)] for name, text in files.items()} == {
        "bf16.txt": ["linear", "matmul", "conv2d", "mm"],
        "fp32.txt": ["softmax", "gelu", "log", "cdist", "exp", "layer_norm", "embedding"],
        "promote.txt": ["add", "cat"],
    }
    for text in files.values():
        assert "loss +0.10%, metric -0.11%, 0.62 of the time, 0.71 of the bytes" in text and "within 1.00%" in text
    for name, reason in {
        "linear": "3.1 ms of 9 ms | +0.01% | chosen", "matmul": "1 ms of 2 ms | under 0.01% | chosen", "conv2d": "as in habana",
        "softmax": "+3.20% | exceeds the tolerance", "gelu": "no gain", "layer_norm": "-200 us of 1 ms | +0.01% | gains nothing",
        "cdist": "cannot run: no kernel", "exp": "NaN or Inf", "embedding": "not decided", "add": "as in habana",
    }.items():  # fmt: skip
        assert reason in comment(name)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def comment(name: str, **changes: Any) -> str:
    """What stands beside the name in the lists of a result that is otherwise."""
    lines = [line for text in list_files(tune_result_kit.result(**changes)).values() for line in text.splitlines()]
    (found,) = [line.partition("  # ")[2] for line in lines if line.partition("  # ")[0].rstrip() == name]
    return found


def test_reasons_are_those_of_the_search() -> None:
    in_bytes = (tune_result_kit.unit("linear", gain=2**20, of=2**21, gains="bytes"),)
    assert comment("linear", units=in_bytes) == "1.0 MiB of 2.0 MiB | +0.01% | chosen"
    counted = (tune_result_kit.unit("linear", gain=5e7, of=1e8, gains="matrix multiplication FLOPs"),)
    assert comment("linear", units=counted) == "50.0 M of 100.0 M | +0.01% | chosen"
    taken = tune_result_kit.trial("torch-cpu", ("linear",), taken="torch-cpu")  # a policy that was taken as it is
    assert comment("conv2d", best=taken).endswith("as in torch-cpu")
    assert comment("softmax", best=taken) == "500 us of 1 ms | +3.20% | as in torch-cpu"
    policy = hmp.Policy(fp32={"__matmul__"})  # a name that stands for an op has the reason of that op
    nothing = tune_result_kit.trial("nothing low", ())
    units = (tune_result_kit.unit("matmul", why="exceeds the tolerance"),)
    assert "exceeds the tolerance" in comment("__matmul__", policy=policy, units=units, best=nothing)
    texts = list_files(tune_result_kit.result(start="/home/somebody/lists", folder="/home/somebody/tuned"))
    assert not any("/home" in text for text in texts.values())


SCOPED = tuple(ListEntry(op, cast, scope=scope) for op, cast, scope in (
    ("linear", "fp32", "head"), ("linear", "bf16", "head.inner"), ("softmax", "bf16", "decoder.*"),
))  # fmt: skip


def test_a_scoped_line_has_the_reason_of_its_module_and_another_of_all_on_its_list() -> None:
    measured: list[tuple[str, str, dict[str, Any]]] = [
        ("linear", "", {}), ("linear", "body", {}), ("linear", "head", {"change": 0.5, "why": "exceeds the tolerance"}),
        ("linear", "head.inner", {"gain": 2 * MS, "of": 2 * MS}), ("softmax", "encoder", {"change": 0.5, "why": "no gain"}),
    ]  # fmt: skip
    units = tuple(tune_result_kit.unit(op, module, **more) for op, module, more in measured)
    best = tune_result_kit.trial("3 on bf16", ("linear", "linear @ body", "linear @ head.inner"))
    changes = {"units": units, "policy": tune_result_kit.POLICY.replace(scoped=SCOPED), "best": best}
    for name, reason in {
        "linear": "8.2 ms of 20 ms | +0.01% | chosen", "linear @ head": "+50.00% | exceeds the tolerance",
        "linear @ head.inner": "2 ms of 2 ms | +0.01% | chosen", "softmax": "+50.00% | no gain",
    }.items():  # fmt: skip
        assert reason in comment(name, **changes)


@pytest.mark.parametrize(
    "policy",
    [
        tune_result_kit.POLICY,
        tune_result_kit.POLICY.replace(dtype=torch.float16),
        tune_result_kit.POLICY.replace(scoped=SCOPED),
        hmp.Policy(),
        hmp.Policy.load("habana-o2"),
    ],
    ids=["bfloat16", "float16", "scoped", "empty", "habana-o2"],
)
def test_what_is_written_loads_as_the_policy(policy: hmp.Policy, tmp_path: Path) -> None:
    result = tune_result_kit.result(policy=policy)
    folder = tmp_path / "made" / "tuned"
    for _ in range(2):
        assert result.save(folder) == folder
        assert hmp.Policy.load(folder) == policy
    names = {"bf16.txt", "fp32.txt", "promote.txt", "tune.json"} | ({"dtype.txt"} if policy.dtype is torch.float16 else set())
    assert {file.name for file in folder.iterdir()} == names


def test_the_json_is_the_whole_result(tmp_path: Path) -> None:
    result = tune_result_kit.result()
    values = json.loads((result.save(tmp_path) / "tune.json").read_text(encoding="utf-8"))
    assert values == result.to_dict()
    assert hmp.Policy.from_dict(values["policy"]) == result.policy and values["best"] == result.best.name
    assert values["trials"][-1]["lists"] == {"bf16": ["linear", "matmul"]} and len(values["units"]) == len(result.units)


def test_a_folder_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    file = tmp_path / "tuned"
    file.write_text("mine")
    with pytest.raises(hmp.HmpError, match=r"tuned: can't write the lists \(File exists"):
        tune_result_kit.result().save(file)
    assert file.read_text() == "mine"


class Exp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x)


@pytest.mark.parametrize("names", [("a b", "c#d"), ("x[0]", "x0"), ("q*", "qq"), ("a@b", "é?")])
def test_lines_of_modules_with_odd_names_are_read_as_they_were_meant(names: tuple[str, str], tmp_path: Path) -> None:
    """Whichever of the keys are low, the policy, as it is read from its files, has them low and no others."""
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4), Exp()) for name in names})
    decisions = Decisions(hmp.Policy(bf16={"exp"}), ["exp"], True, [])
    one, other = keys = [Key("exp", f"{name}.1") for name in names]
    decisions.found(dict.fromkeys(keys, 1))
    for low in (set(), {one}, {other}, {one, other}):
        chosen = decisions.policy({"bf16": frozenset(low)})
        read = hmp.Policy.load(chosen.save(tmp_path))
        assert read == chosen
        policies = scopes.resolve(read, model)
        assert {key for key in keys if "exp" in policies[model.get_submodule(str(key.module))].bf16} == low


def test_each_choice_of_three_levels_is_what_its_lines_say(tmp_path: Path) -> None:
    """Every way to put three modules on three lists, and what the policy that is read back does in each."""
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(16, 16)), "b": nn.Linear(16, 16)})
    decisions = Decisions(hmp.Policy(bf16={"linear", "mm"}, fp32={"softmax"}), ["linear"], per_module=True, levels=[lists.kind_of("fp8")])
    keys = [Key("linear", "a.0"), Key("linear", "a"), Key("linear", "b")]
    for calls, levels in itertools.product([(1, 1, 1), (3, 1, 1)], itertools.product(("fp8", "bf16", "fp32"), repeat=3)):
        decisions.found(dict(zip(keys, calls, strict=True)))
        chosen = dict(zip(keys, levels, strict=True))
        choice = {level: frozenset(key for key in keys if chosen[key] == level) for level in ("bf16", "fp8")}
        read = hmp.Policy.load(decisions.policy(choice).save(tmp_path))
        policies = scopes.resolve(read, model)
        for key, level in chosen.items():
            of = policies[model.get_submodule(str(key.module))]
            assert next(each for each in ("fp8", "bf16", "fp32") if "linear" in getattr(of, each)) == level
