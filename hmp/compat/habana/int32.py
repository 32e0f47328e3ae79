"""An int32 tensor where torch wants int64: a Gaudi takes it, so programs written for one make `torch.IntTensor` batches. It is widened.

torch refuses these in its kernels, when a tensor of that dtype arrives. So they are widened at the call's door: in front of torch's
builtins of the table, below the Python functions of torch.nn.functional, and outside of what hmp puts in the same places.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import int32

from ...core.convert import is_in_place
from ...core.torch_ops import Site, sites_of
from ...core.torch_private import reset_dynamo
from .device_calls import scripted_as
from .device_map import target
from .replacements import Replacements


class Wide(NamedTuple):
    """An argument of these ops that torch wants in int64: its name and its position; None where it is given by keyword alone."""

    ops: tuple[str, ...]
    name: str
    position: int | None


def _wide(ops: str, name: str, position: int | None) -> Wide:
    return Wide(tuple(ops.split()), name, position)


# What torch refuses in int32 on the newest release that hmp was run with.
WIDE = (
    _wide("cross_entropy_loss nll_loss nll_loss2d nll_loss_nd multi_margin_loss multilabel_margin_loss", "target", 1),
    _wide("linear_cross_entropy", "target", 2),
    _wide("one_hot", "input", 0),
    _wide("max_unpool2d max_unpool3d", "indices", 1),
    _wide("put put_ take", "index", 1),
    _wide("take_along_dim", "indices", 1),
    _wide("tensor_split", "tensor_indices_or_sections", 1),
    # index_reduce in its backward, index_select where a sparse tensor is indexed
    _wide("index_copy index_copy_ index_fill index_fill_ index_reduce index_reduce_ index_select", "index", 2),
    _wide("searchsorted", "sorter", None),
)
# What older releases refuse besides: 2.7 does, 2.9 does not.
ONCE_WIDE = (_wide("gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_", "index", 2),)


def in_force() -> tuple[Wide, ...]:
    """The rows of the table that count on this release of torch, which is asked."""
    try:
        torch.ops.aten.gather(torch.zeros(1), 0, torch.zeros(1, dtype=torch.int32))
    except RuntimeError:
        return WIDE + ONCE_WIDE
    return WIDE


def install(replaced: Replacements) -> None:
    """Has int32 taken, until `replaced.undo()`."""
    replaced.on_undo(_forget_compiled)  # first, so that it is done last
    doors: dict[int, Any] = {}
    for wide in in_force():
        for op in wide.ops:
            # below a function of torch.nn.functional stands a builtin; linear_cross_entropy itself looks at the dtype
            sites = sites_of(op)
            for site in [site for site in sites if not site.python] or sites:
                # one for all places of a function, as torch.compile asks for it by any of them
                if id(site.original) not in doors:
                    there = vars(site.owner).get(site.attribute, site.original)
                    doors[id(site.original)] = scripted_as(site.original, _widening(site, wide, there), replaced)
                replaced.put_around(site.owner, site.attribute, doors[id(site.original)])


def _forget_compiled() -> None:
    if not is_in_place():  # else hmp has put torch's own functions into Dynamo's tables
        reset_dynamo()


def _widening(site: Site, wide: Wide, inside: Any) -> Any:
    """`inside`, the function at `site`, whose argument `wide` may be an int32 tensor."""
    name, position = wide.name, wide.position

    @functools.wraps(site.original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if position is not None and len(args) > position:
            given = args[position]
            if getattr(given, "dtype", None) is int32 and target() is not None:
                args = (*args[:position], given.long(), *args[position + 1 :])
        elif name in kwargs:
            given = kwargs[name]
            if getattr(given, "dtype", None) is int32 and target() is not None:
                kwargs[name] = given.long()
        return inside(*args, **kwargs)

    # pickle finds it by the name of torch's function
    is_method = site.where == "torch.Tensor"
    call.__module__, call.__qualname__ = ("torch", f"Tensor.{site.attribute}") if is_method else (site.where, site.attribute)
    return call
