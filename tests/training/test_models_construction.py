"""A model that is built after `convert()` is, to the bit, the one that is built before it, and stays float32."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers")

import torch

from model_zoo.kit import Model, build, converted
from model_zoo.selection import POLICIES, each


def held(built: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that the model holds: parameters, buffers, saved or not, and plain attributes of its modules."""
    found = dict((*built.named_parameters(), *built.named_buffers()))
    for path, module in built.named_modules():
        found |= {f"{path}.{name}": value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
    return found


def differences(built: torch.nn.Module, exact: torch.nn.Module) -> list[str]:
    ours, theirs = held(built), held(exact)
    found = [f"{name} is there only once" for name in set(ours) ^ set(theirs)]
    for name in set(ours) & set(theirs):
        a, b = ours[name], theirs[name]
        if a.dtype is not b.dtype or type(a) is not type(b):
            found.append(f"{name}: {type(a).__name__} of {a.dtype}, not {type(b).__name__} of {b.dtype}")
        elif not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
            found.append(f"{name}: other values")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", each(quick=("llama",)))
def test_r9_a_model_built_after_convert_is_the_one_built_before(model: Model):
    before = build(model)
    for policy in POLICIES:
        with converted(policy):
            assert differences(build(model), before) == [], policy
