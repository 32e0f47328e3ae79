"""The scoped lines that tune() writes decide in each module what was chosen for it, and can be read again."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import hmp
from hmp.lists import scopes
from hmp.tune.decisions import Decisions, Key


class Exp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x)


class Holder(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(-x.square()) + self.shared(x)


def assert_each_choice_decides(decisions: Decisions, model: nn.Module, keys: list[Key], folder: Path) -> None:
    """Whichever of the keys are low, the policy, as it is read from its files, has them low and no others."""
    decisions.found(dict.fromkeys(keys, 1))
    for count in range(len(keys) + 1):
        for low in itertools.combinations(keys, count):
            chosen = decisions.policy(low)
            read = hmp.Policy.load(chosen.save(folder / str(low.__hash__())))
            assert read == chosen
            policies = scopes.resolve(read, model)
            assert {key for key in keys if "exp" in policies[model.get_submodule(str(key.module))].bf16} == set(low)


def test_a_module_at_two_paths_has_what_was_chosen_for_it(tmp_path: Path) -> None:
    exp = Exp()
    model = nn.ModuleDict({"a": Holder(exp), "b": Holder(exp)})
    assert scopes.shared(model) == {"a.shared"}
    decisions = Decisions(hmp.Policy(bf16={"exp"}), ["exp"], True, scopes.shared(model))
    assert_each_choice_decides(decisions, model, [Key("exp", "a"), Key("exp", "b"), Key("exp", "a.shared")], tmp_path)


@pytest.mark.parametrize("names", [("a b", "c#d"), ("a b", "a_b"), ("x[0]", "x0"), ("q*", "qq"), ("a@b", "c"), ("#1", "k"), ("é?", "éa")])
def test_lines_of_modules_with_odd_names_are_read_as_they_were_meant(names: tuple[str, str], tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4), Exp()) for name in names})
    decisions = Decisions(hmp.Policy(bf16={"exp"}), ["exp"], True)
    assert_each_choice_decides(decisions, model, [Key("exp", f"{name}.1") for name in names], tmp_path)
