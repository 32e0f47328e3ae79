"""What tests of the rules share: a policy of just these names, and what they assert of tensors and of writes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten

import hmp
from oracle import assert_identical


def policy(bf16: Any = (), fp32: Any = (), promote: Any = (), dtype: torch.dtype = torch.bfloat16, name: str = "test") -> hmp.Policy:
    """A policy that holds just these names."""
    return hmp.Policy(name=name, dtype=dtype, bf16=frozenset(bf16), fp32=frozenset(fp32), promote=frozenset(promote))


def listable(name: str | None, kind: str = "bf16") -> bool:
    """Whether the list takes the name of a function; an attribute of tensors, such as mT, is none."""
    try:
        return name is not None and bool(hmp.Policy("one", **{kind: {name}}).casts_by_op(kind))
    except hmp.errors.OpListError:
        return False


def pasted(line: str, **around: Any) -> hmp.Policy:
    """The policy after the line of Python that a finding gives."""
    names = {"hmp": hmp, **around}
    exec(line, names)
    assert isinstance(names["policy"], hmp.Policy)
    return names["policy"]


def same(found: Any, wanted: Any, what: object = "") -> None:
    """Assert the same tree, and of each tensor the same dtype, shape and bits; NaN equals NaN."""
    (ours, tree), (theirs, its) = tree_flatten(found), tree_flatten(wanted)
    assert tree == its, (what, tree, its)
    with hmp.disable_casts():
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_identical(*(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in pair), f"{what}: leaf {number}")
