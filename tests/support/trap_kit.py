"""What tests of the rules share: a policy of just these names, and what they assert of tensors and of writes."""

from __future__ import annotations

from typing import Any

import torch

import hmp


def policy(bf16: Any = (), fp32: Any = (), promote: Any = (), dtype: torch.dtype = torch.bfloat16, name: str = "test") -> hmp.Policy:
    """A policy that holds just these names."""
    return hmp.Policy(name=name, dtype=dtype, bf16=frozenset(bf16), fp32=frozenset(fp32), promote=frozenset(promote))


def pasted(line: str, **around: Any) -> hmp.Policy:
    """The policy after the line of Python that a finding gives."""
    names = {"hmp": hmp, **around}
    exec(line, names)
    assert isinstance(names["policy"], hmp.Policy)
    return names["policy"]


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Assert the same dtype, shape and bits."""
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    assert a.shape == b.shape, (a.shape, b.shape)
    assert torch.equal(a.detach(), b.detach()), (a, b)
