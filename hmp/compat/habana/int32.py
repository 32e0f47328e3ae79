"""int32 tensors for arguments that torch takes in int64 only: Gaudi takes them, and programs for it make `torch.IntTensor` batches.

They are cast to int64 in patches of the builtins in the table below, underneath the Python functions of torch.nn.functional and outside
of hmp's own patches of the same bindings: torch's kernels would refuse them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import int32

from ...core.convert import is_in_place
from ...core.ops.sites import Site, sites_of
from ...core.patching.patched_op import INSIDE
from ...core.torch_private import reset_dynamo
from .device_arguments import scripted_as
from .device_map import target
from .replacements import AttributeReplacements


class Wide(NamedTuple):
    """An argument of some ops that torch takes in int64: its name and its position, None for keyword-only."""

    ops: str
    name: str
    position: int | None


# What the newest release of torch that hmp is tested with refuses in int32.
WIDE = (
    Wide("cross_entropy_loss nll_loss nll_loss2d nll_loss_nd multi_margin_loss multilabel_margin_loss", "target", 1),
    Wide("linear_cross_entropy", "target", 2),
    Wide("one_hot", "input", 0),
    Wide("max_unpool2d max_unpool3d", "indices", 1),
    Wide("put put_ take", "index", 1),
    Wide("take_along_dim", "indices", 1),
    Wide("tensor_split", "tensor_indices_or_sections", 1),
    # index_reduce in its backward, index_select for a sparse tensor
    Wide("index_copy index_copy_ index_fill index_fill_ index_reduce index_reduce_ index_select", "index", 2),
    Wide("searchsorted", "sorter", None),
)
# What older releases refuse besides: 2.7 does, 2.9 does not.
ONCE_WIDE = (Wide("gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_", "index", 2),)


def active_rows() -> tuple[Wide, ...]:
    """Return the rows of the table that this release of torch needs."""
    try:
        torch.ops.aten.gather(torch.zeros(1), 0, torch.zeros(1, dtype=torch.int32))
    except RuntimeError:
        return WIDE + ONCE_WIDE
    return WIDE


def install(replaced: AttributeReplacements) -> None:
    """Accept int32 until `replaced.undo()`."""
    replaced.on_undo(_forget_compiled)  # first, so that it is undone last
    for wide in active_rows():
        for op in wide.ops.split():
            # a function of torch.nn.functional calls a builtin, but linear_cross_entropy checks the dtype itself
            sites = sites_of(op)
            for site in [site for site in sites if not site.python] or sites:
                wrapper = scripted_as(site.original, _widening(site, wide), replaced)
                replaced.put_around(site.owner, site.attribute, wrapper)


def _forget_compiled() -> None:
    if not is_in_place():  # else hmp's patches have reset Dynamo
        reset_dynamo()


def _widening(site: Site, wide: Wide) -> Any:
    """Return the function at `site` with int32 accepted for the argument `wide`; hmp's patches of it go inside."""
    name, position, own = wide.name, wide.position, site.original

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
        return getattr(call, INSIDE, own)(*args, **kwargs)

    # pickle looks it up by the name of torch's function
    is_method = site.where == "torch.Tensor"
    call.__module__, call.__qualname__ = ("torch", f"Tensor.{site.attribute}") if is_method else (site.where, site.attribute)
    return call
