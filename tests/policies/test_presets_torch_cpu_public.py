"""Public functions of torch.nn.functional, torch.nn.attention and torch.nested that op_db lacks give under `torch-cpu` what they give under
torch.autocast("cpu"), watched by a recording or not. test_presets_torch_cpu.py compares those with samples in op_db, too."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hmp
from autocast_sweep import UNINITIALISED
from ops import op_db, title
from oracle import BF16
from preset_sweep import MIXTURES as OF_OP_DB
from preset_sweep import mixed, outcome, same_bits, samples, spellings
from public_calls import CALLS, MIXTURES, Given

# Named with its reason on the page of differences.
NAMED = {"nn.functional.affine_grid"}
COMPILING = {name for name in CALLS if "flex" in name}
pytestmark = [pytest.mark.native_kernels, pytest.mark.filterwarnings("ignore")]


@contextlib.contextmanager
def watched(policy: hmp.Policy) -> Iterator[None]:
    with hmp.casts(policy), hmp.record():
        yield


def parts(result: Any) -> list[Any] | Exception:
    """What is compared: of a jagged tensor its values."""
    if isinstance(result, Exception):
        return result
    return [each.values() if isinstance(each, torch.Tensor) and each.layout is torch.jagged else each for each in result]


def difference(one: Any, other: Any) -> str:
    """What differs between two outcomes, "" for nothing."""
    if isinstance(one, Exception) or isinstance(other, Exception):
        return "" if type(one) is type(other) else f"{one!r:.200}, {other!r:.200}"
    dtypes = [[str(each.dtype) for each in result if isinstance(each, torch.Tensor)] for result in (one, other)]
    if dtypes[0] != dtypes[1]:
        return f"{dtypes[0]}, {dtypes[1]}"
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if isinstance(a, torch.Tensor)]
    return "" if all(same_bits(a, b) for a, b in pairs) else "values"


def run(call: Callable[[Given], Any], mixture: str, context: contextlib.AbstractContextManager[Any]) -> Any:
    return parts(outcome(lambda: call(Given(mixture)), ((), {}), context))


def check(name: str) -> None:
    policy = hmp.Policy.load("torch-cpu")
    for (number, call), mixture in itertools.product(enumerate(CALLS[name]), MIXTURES):
        want = run(call, mixture, torch.autocast("cpu", dtype=BF16))
        got, seen = (run(call, mixture, context) for context in (hmp.casts(policy), watched(policy)))
        case = f"call {number}, {mixture}"
        assert difference(got, seen) == "", f"{case}: a recording changes the result"
        if not isinstance(want, Exception) and name not in NAMED:  # what torch.autocast refuses is for the rules to say
            assert difference(want, got) == "", case


@pytest.mark.parametrize("name", sorted(CALLS.keys() - COMPILING))
def test_a_public_function_has_autocasts_dtypes_and_bits_watched_or_not(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", sorted(COMPILING))
def test_a_public_function_that_compiles_has_autocasts_dtypes_and_bits_watched_or_not(name: str) -> None:
    check(name)


def recorded(infos: Any, first: int | None) -> tuple[int, list[str]]:
    """How many calls of op_db a recording has watched, and those whose results it changed."""
    count, changed = 0, []
    calls = [(info, list(spellings(info))) for info in infos]
    for policy, (info, spelled_calls) in itertools.product(map(hmp.Policy.load, ("torch-cpu", "habana")), calls):
        chosen = samples(info, first=first, most=8)
        for (spelled, call), sample, mixture in itertools.product(spelled_calls, chosen, OF_OP_DB):
            given, again = mixed(sample, mixture, BF16), mixed(sample, mixture, BF16)
            if given is None or again is None or title(info).partition("/")[0] in UNINITIALISED:
                continue
            count += 1
            found = difference(outcome(call, given, hmp.casts(policy)), outcome(call, again, watched(policy)))
            if found:
                changed.append(f"{policy.name}, {title(info)}, {spelled}, {mixture}: {found}")
    return count, changed


@pytest.mark.parametrize("at", [pytest.param(at, marks=pytest.mark.nightly if at else pytest.mark.slow) for at in range(8)])
def test_a_recording_changes_no_result_of_any_op(at: int) -> None:
    _, changed = recorded(op_db()[at::8], 2)
    assert not changed, "\n".join(changed)
