"""R10 over the whole surface: a view that a cast turned into a copy refuses writes, whichever op made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import hmp

# How each op of torch that gives a view of its input is called, by its name as a method.
CALLS: dict[str, tuple[Any, ...]] = {
    "adjoint": (), "as_strided": ((2, 2), (4, 1)), "broadcast_to": ((2, 4, 4),), "chunk": (2,), "diagonal": (), "dsplit": (2,),
    "expand": (2, 4, 4), "flatten": (), "hsplit": (2,), "moveaxis": (0, 1), "movedim": (0, 1), "narrow": (0, 1, 2),
    "permute": (1, 0), "positive": (), "ravel": (), "reshape": (2, 8), "select": (0, 1), "split": (2,), "split_with_sizes": ([1, 3],),
    "squeeze": (), "swapaxes": (0, 1), "swapdims": (0, 1), "t": (), "tensor_split": (2,), "transpose": (0, 1), "unbind": (),
    "unflatten": (0, (2, 2)), "unfold": (0, 2, 1), "unsqueeze": (0,), "view": (2, 8), "vsplit": (2,), "contiguous": (), "detach": (),
    "conj": (), "resolve_conj": (), "resolve_neg": (), "view_as_complex": (),
}  # fmt: skip
INPUTS = {"dsplit": (2, 2, 4), "view_as_complex": (4, 2)}
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda y: y.add_(1),
    "zero_": lambda y: y.zero_(),
    "setitem": lambda y: y.__setitem__(0, 7.0),
    "copy_": lambda y: y.copy_(torch.ones_like(y)),
    "out=": lambda y: torch.neg(torch.ones(y.shape, dtype=y.dtype), out=y),
}


@pytest.mark.parametrize("name", CALLS)
def test_r10_no_view_op_on_a_list_loses_a_write(name: str) -> None:
    """Either the write raises, or it arrives in the tensor that was viewed: as in plain torch."""
    with hmp.convert(policy=hmp.Policy("mine", bf16={name})):
        for write in WRITES.values():
            x = torch.ones(INPUTS.get(name, (4, 4)))
            result = getattr(x, name)(*CALLS[name]) if hasattr(x, name) else getattr(torch, name)(x, *CALLS[name])
            views = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            assert views
            try:
                write(views[0])
            except hmp.HmpError as error:
                assert name in str(error)
            except RuntimeError as error:
                # torch refuses to write through expand() and float numbers into complex ones, with hmp and without
                assert "single memory location" in str(error) or name == "view_as_complex"
            else:
                assert not torch.equal(x, torch.ones_like(x)), "the write went to a copy, unseen"


def test_r10_every_view_of_torch_is_called_above() -> None:
    """The names whose ATen schema returns an alias of its input, public methods that compute nothing."""
    schemas = torch._C._jit_get_all_schemas()
    aliasing = {
        s.name.removeprefix("aten::")
        for s in schemas
        if s.name.startswith("aten::")
        and s.arguments
        and any(a.alias_info is not None and not a.alias_info.is_write for a in s.arguments)
        and any(r.alias_info is not None for r in s.returns)
    }
    public = {n for n in aliasing if not n.startswith("_") and hasattr(torch.Tensor, n) and not n.endswith("_")}
    other_dtype = {"imag", "real", "view_as_real", "to", "cpu", "cuda", "data", "expand_as", "view_as", "reshape_as"}  # complex, or R7's
    properties = {"mH", "mT"}  # no list reaches these
    named_dimensions = {"rename", "align_to", "refine_names"}  # gone from later releases
    sparse = {"coalesce", "indices", "values", "ccol_indices", "col_indices", "crow_indices", "row_indices"}
    storage = {"pin_memory", "slice_inverse", "resolve_conj", "resolve_neg"}
    assert public - set(CALLS) - other_dtype - sparse - storage - properties - named_dimensions == set()
