"""R10 over the whole surface: a view that a cast turned into a copy refuses writes, whichever op made it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
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


# Where these have nothing to do they give back their input itself, as a function and, where there is one, as a module in eval.
NOTHING_TO_DO: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {
    "dropout": [
        lambda x: F.dropout(x, 0.5, False), lambda x: F.dropout(x, p=0.0), lambda x: torch.dropout(x, 0.5, False), nn.Dropout().eval(),
        lambda x: torch.dropout(x, 0.0, True),
    ],
    "dropout1d": [lambda x: F.dropout1d(x, 0.5, False), nn.Dropout1d(0.0)],
    "dropout2d": [lambda x: F.dropout2d(x[None], 0.5, False)[0], nn.Dropout2d().eval()],
    "dropout3d": [lambda x: F.dropout3d(x[None, None], training=False)[0, 0], lambda x: nn.Dropout3d().eval()(x[None])[0]],
    "alpha_dropout": [lambda x: F.alpha_dropout(x, 0.5), lambda x: torch.alpha_dropout(x, 0.5, False), nn.AlphaDropout().eval()],
    "feature_dropout": [lambda x: torch.feature_dropout(x, 0.5, False)],
    "feature_alpha_dropout": [lambda x: torch.feature_alpha_dropout(x, 0.5, False), nn.FeatureAlphaDropout().eval()],
    "sum_to_size": [lambda x: x.sum_to_size(x.shape)],
    "to_dense": [lambda x: x.to_dense()],
}  # fmt: skip


@pytest.mark.parametrize(
    ("cast", "given", "wanted"), [("bf16", torch.float32, torch.bfloat16), ("fp32", torch.bfloat16, torch.float32)], ids=["bf16", "fp32"]
)
def test_r10_what_gives_back_its_input_loses_no_write(cast: str, given: torch.dtype, wanted: torch.dtype) -> None:
    cases = [(name, call, write) for name, calls in NOTHING_TO_DO.items() for call in calls for write in WRITES.values()]
    for name, call, write in cases:
        plain = torch.full((3, 4, 4), 2.0)
        write(call(plain))
        assert not (plain == 2).all(), f"in plain torch the write arrives: {name}"
    with hmp.convert(policy=hmp.Policy("mine", **{cast: set(NOTHING_TO_DO)})):
        for name, call, write in cases:
            x = torch.full((3, 4, 4), 2.0, dtype=given)
            result = call(x)
            assert result.dtype is wanted, name
            with pytest.raises(hmp.HmpError, match=f"'{name}' is on a list that casts"):
                write(result)
            with hmp.disable_casts():
                assert (x == 2).all(), name


def test_r10_no_view_op_on_a_list_loses_a_write() -> None:
    """Either the write raises, or it arrives in the tensor that was viewed: as in plain torch."""
    with hmp.convert(policy=hmp.Policy("mine", bf16=set(CALLS))):
        for name, (what, write) in itertools.product(CALLS, WRITES.items()):
            x = torch.ones(INPUTS.get(name, (4, 4)))
            result = getattr(x, name)(*CALLS[name]) if hasattr(x, name) else getattr(torch, name)(x, *CALLS[name])
            views = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            assert views, name
            try:
                write(views[0])
            except hmp.HmpError as error:
                assert name in str(error)
            except RuntimeError as error:
                # torch refuses to write through expand() and float numbers into complex ones, with hmp and without
                assert "single memory location" in str(error) or name == "view_as_complex", (name, what)
            else:
                assert not torch.equal(x, torch.ones_like(x)), f"{what} after {name} went to a copy, unseen"


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
