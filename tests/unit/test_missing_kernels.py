"""R11: the table of ops without a kernel, what is tried where it says nothing, and what is never tried twice.

No public call shows whether an op's kernel was known, tried or remembered: the result is the same.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils import _pytree as pytree

import hmp
from hmp.core import tables
from hmp.core.ops import table


def test_r11_random_ops_are_never_run_again() -> None:
    for op in ("dropout", "rrelu", "multinomial"):
        policy = hmp.Policy("mine", bf16={op})
        with hmp.convert(policy=policy):
            rules = [d.ruled for d in tables.decide(policy).values() if d.ruled.op == op]
        assert rules and not any(rule.facts.retries for rule in rules), op


# What an op of op_db lacks on the CPU for some of its samples only: these are tried, not known.
TRIED = table.KERNEL_BY_ARGUMENTS | {"as_strided"}  # as_strided: the sample's storage is too small in two bytes an element


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # op_db samples deprecated names and degenerate shapes too
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)], ids=str)
def test_r11_the_table_holds_every_op_of_torchs_own_tests_without_a_kernel(dtype: torch.dtype) -> None:
    """Plain torch is asked: what accepts its samples in float32 and refuses them all in the low-precision dtype is on the table."""
    from torch.testing._internal.common_methods_invocations import op_db

    known = {name for device, dtypes, names in table.NO_KERNEL if device in ("*", "cpu") and str(dtype)[6:] in dtypes for name in names}
    missing = []
    for info in op_db:
        name = info.name.removeprefix("nn.functional.")
        synonyms = table.SYNONYMS.get(name, ())
        if torch.float32 not in info.dtypes or name.startswith("jiterator") or known.intersection({name, *synonyms}) or name in TRIED:
            continue
        for sample, _ in zip(info.sample_inputs_func(info, "cpu", torch.float32, False), range(4), strict=False):
            if _runs(info.op, sample, torch.float32) and not _runs(info.op, sample, dtype):
                missing.append(name)
                break
    assert missing == []


def _runs(op: Callable[..., object], sample: object, dtype: torch.dtype) -> bool:
    def cast(value: object) -> object:
        return value.detach().to(dtype) if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value

    args, kwargs = pytree.tree_map(cast, ((sample.input, *sample.args), sample.kwargs))  # type: ignore[attr-defined]
    try:
        op(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError):
        return False
    return True
