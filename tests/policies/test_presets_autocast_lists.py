"""torch's own test cases for autocast on CUDA pass under its preset: the dtype that a case asks for, with the bits of explicit casts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastTestLists

import hmp
from oracle import F16, F32, assert_identical, cast, flat, left_to_torch

# Where torch's own tests call the cases of a list, besides the method.
MODULES = {"torch": torch, "nn": torch._C._nn, "linalg": torch.linalg, "methods": None, "banned": torch._C._nn}
# The arguments of this case are no arguments, and torch's own test skips it.
MALFORMED = {"einsum"}
# The cases of the CUDA lists that plain torch cannot run on CPU tensors.
NO_CPU_KERNEL = {"cudnn_convolution", "cudnn_convolution_transpose"}


@dataclass(frozen=True)
class Case:
    """One call, and the dtype that its tensors are cast to by hand: None where torch promotes by itself."""

    preset: str
    list: str
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    runs_in: torch.dtype | None

    def calls(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """The places where the op stands, looked up when they are called."""
        module = MODULES[self.list.partition("_")[0]]
        name = self.op.removeprefix("linalg_")
        if module is not None and hasattr(module, name):
            yield f"{module.__name__}.{name}", lambda *args, **kwargs: getattr(module, name)(*args, **kwargs)
        if hasattr(torch.Tensor, name):
            yield f"Tensor.{name}", lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)

    def __str__(self) -> str:
        dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in flat(list(self.args)) if isinstance(t, torch.Tensor)}))
        return f"{self.op} ({dtypes})"


def cases(preset: str, lists: Any, low: torch.dtype) -> list[Case]:
    found = []
    for name, entries in vars(lists).items():
        for op, args, *rest in entries:
            if op in MALFORMED:
                continue
            if "promote" in name:
                runs_in = F32 if "need_autocast" in name else None
                found += [Case(preset, name, op, mixture, {}, runs_in) for mixture in (args, *rest) if isinstance(mixture, tuple)]
            else:
                kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
                found.append(Case(preset, name, op, args, kwargs, low if name.endswith("16") else F32))
    return found


torch.manual_seed(0)
CASES = cases("torch-cuda", AutocastTestLists("cpu"), F16)
pytestmark = pytest.mark.filterwarnings("ignore:.*(chain_matmul is deprecated|specifying the dim arg is deprecated)")
LISTS = list(dict.fromkeys((case.preset, case.list) for case in CASES))


def check(case: Case) -> None:
    """Compares the case's outputs, wherever the op stands, with those of plain torch after explicit casts."""
    assert not left_to_torch(case.args)
    policy = hmp.Policy.load(case.preset)
    calls = list(case.calls())
    assert calls, f"{case.op} is nowhere"
    for where, call in calls:
        wanted = flat(call(*cast(case.args, case.runs_in), **cast(case.kwargs, case.runs_in)))
        with hmp.casts(policy):
            got = flat(call(*case.args, **case.kwargs))
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_identical(one, other, f"{where} under {case.preset}")
            if case.runs_in is not None and isinstance(one, torch.Tensor):
                assert one.dtype is case.runs_in


@pytest.mark.native_kernels  # explicit casts run them
@pytest.mark.parametrize(("preset", "name"), LISTS)
def test_every_case_of_torchs_lists_passes_under_the_preset(preset: str, name: str) -> None:
    failures = []
    for case in CASES:
        if (case.preset, case.list) == (preset, name) and case.op not in NO_CPU_KERNEL:
            try:
                check(case)
            except Exception as error:  # one failure must not hide the others
                failures.append(f"{case}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)
