"""P6, looks like itself: whatever of torch differs while a policy is active looks, compares, pickles and is handed out as torch's own.

Oracle: what was found at each name before anything was patched, `torch_snapshot`'s owners tell where to look. The names are those that
differ, found by looking and not by asking hmp. Rules R16, R19.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import overrides

import hmp
from dispatch_kit import Noted, Noting

OWNERS: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "Tensor": torch.Tensor,
    "_C._nn": torch._C._nn,
    "_VF": torch._C._VariableFunctions,
    "special": torch.special,
    "linalg": torch.linalg,
    "fft": torch.fft,
}
HOME = {"torch": "torch", "F": F.__name__, "_C._nn": F.__name__, "special": "torch.special", "linalg": "torch.linalg", "fft": "torch.fft"}
# No ops: functions written in Python stand there, which equal themselves alone.
ANSWERS = {("torch", name) for name in dir(torch) if "autocast" in name or name in ("load", "save")}
EVERYTHING = hmp.Policy("everything", bf16={"*"})


def found_at(owner: Any) -> dict[str, Any]:
    """Its functions and methods, but those that are bound anew at each look."""
    found = {name: getattr(owner, name, None) for name in dir(owner)}
    return {n: f for n, f in found.items() if callable(f) and not inspect.isclass(f) and getattr(owner, n) is f}


def facts(value: Any) -> dict[str, Any]:
    told = {name: getattr(value, name, None) for name in ("__name__", "__qualname__", "__module__", "__doc__")}
    try:
        told["signature"] = str(inspect.signature(value))
    except (ValueError, TypeError):
        told["signature"] = "none"
    return told


# in tuples: what modules hold by name, hmp exchanges, as it exchanges a user's
PLAIN = {(where, name): (value,) for where, owner in OWNERS.items() for name, value in found_at(owner).items()}
del PLAIN["torch", "compile"]  # Lightning puts its own there when it is imported, and leaves it
FACTS = {key: facts(value) for key, (value,) in PLAIN.items()}


def patched() -> list[tuple[str, str]]:
    return [key for key in PLAIN if getattr(OWNERS[key[0]], key[1]) is not PLAIN[key][0]]


def looks(key: tuple[str, str]) -> list[str]:
    """How one patched name does not look like torch's own."""
    here, told = getattr(OWNERS[key[0]], key[1]), facts(getattr(OWNERS[key[0]], key[1]))
    # torch's builtins are of classes that nobody can look up; a function may tell its public name, by which pickle and fx find it
    public = {"__name__": key[1], "__qualname__": key[1], "__module__": HOME.get(key[0])}
    lines = [
        f"{key} {name}: {value!r}, torch's {FACTS[key][name]!r}"
        for name, value in told.items()
        if value != FACTS[key][name] and (key[0] == "Tensor" or value != public.get(name, value is None))
    ]
    lines += [f"{key}: a copy is another" for made in (copy.copy(here), copy.deepcopy(here)) if made != here]
    if key[0] in ("torch", "F") and pickle.loads(pickle.dumps(here)) != here:
        lines.append(f"{key}: what is pickled comes back as another")
    return lines


def test_p6_what_differs_looks_like_torchs_own() -> None:
    with hmp.convert(policy=EVERYTHING):
        keys = patched()
        assert len(keys) > 100
        lines = [line for key in keys for line in looks(key)]
    assert not lines, "\n".join(lines[:30])


def test_p6_what_differs_equals_what_was_taken_before() -> None:
    with hmp.convert(policy=EVERYTHING):
        for key in set(patched()) - ANSWERS:
            here, (plain,) = getattr(OWNERS[key[0]], key[1]), PLAIN[key]
            assert here == plain and plain == here and {plain: 1}.get(here)


def put(x: Any) -> None:
    x[0] = 1


# A call, and where torch's own hands out what it is a call of.
CALLS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "torch.matmul": (lambda x: torch.matmul(x, x), lambda: torch.matmul),
    "torch.mm(out)": (lambda x: torch.mm(x, x, out=torch.empty(3, 3)), lambda: torch.mm),
    "torch.conv2d as F's": (lambda x: F.conv2d(x[None, None], x[None, None]), lambda: F.conv2d),
    "F.linear": (lambda x: F.linear(x, x), lambda: F.linear),
    "torch._C._nn.linear": (lambda x: torch._C._nn.linear(x, x), lambda: torch._C._nn.linear),
    "sdpa": (lambda x: F.scaled_dot_product_attention(x, x, x), lambda: F.scaled_dot_product_attention),
    "Tensor.mul": (lambda x: x.mul(x), lambda: torch.Tensor.mul),
    "@": (lambda x: x @ x, lambda: torch.Tensor.matmul),
    "2 - x": (lambda x: 2 - x, lambda: torch.Tensor.__rsub__),
    "x == x": (lambda x: x == x, lambda: torch.Tensor.__eq__),
    "x[0] = 1": (put, lambda: torch.Tensor.__setitem__),
    "torch.cat": (lambda x: torch.cat([x, x]), lambda: torch.cat),
    "F.softmax": (lambda x: F.softmax(x, -1), lambda: F.softmax),
    "special.expit": (lambda x: torch.special.expit(x), lambda: torch.special.expit),
    "add_": (lambda x: x.clone().add_(1), lambda: torch.Tensor.add_),
    "mean": (lambda x: torch.mean(x, dim=0), lambda: torch.mean),
}


def handed_out(call: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
    """What a mode and a subclass are given."""
    x = torch.randn(3, 3)
    with Noting() as mode:
        call(x)
    Noted.seen = []
    call(x.as_subclass(Noted))
    return mode.seen, list(Noted.seen)


@pytest.mark.parametrize("name", CALLS)
def test_p6_a_mode_and_a_subclass_are_given_what_equals_torchs_own(name: str) -> None:
    call, take = CALLS[name]
    own, named = (take(),), overrides.resolve_name(take())
    assert all(any(func == own[0] for func in funcs) for funcs in handed_out(call))
    for policy in (EVERYTHING, hmp.Policy("nothing listed"), hmp.Policy("one", fp32={"tanh"})):
        with hmp.casts(policy):
            for funcs in handed_out(call):
                (func,) = {id(each): each for each in funcs if each == own[0]}.values()
                assert func is take() or policy is not EVERYTHING, "where it casts, what the user holds under that name"
                assert own[0] == func and {own[0]: True}.get(func) and func in {take()} and func in own
                assert overrides.resolve_name(func) == named
            with hmp.disable_casts():
                assert all(any(func == take() for func in funcs) for funcs in handed_out(call))
