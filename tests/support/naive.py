"""The caster that anybody would write first: every floating input of a listed op, by setattr. It falls into every trap."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

# Habana's published defaults, to the letter
HABANA_BF16 = """addmm batch_norm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
dot dropout dropout1d dropout2d dropout3d group_norm instance_norm layer_norm leaky_relu linear matmul mm mul mv relu t""".split()
HABANA_FP32 = """binary_cross_entropy binary_cross_entropy_with_logits cross_entropy div divide embedding embedding_bag
log log2 log_softmax nll_loss smooth_l1_loss softmax topk truediv""".split()
HABANA_PROMOTE = ["add", "sub", "cat", "stack"]


def _castable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _wrap(op: Callable[..., Any], dtype: torch.dtype | None) -> Callable[..., Any]:
    @functools.wraps(op)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        wide = dtype or functools.reduce(
            torch.promote_types, [x.dtype for x in tree_leaves((args, kwargs)) if _castable(x)], torch.bfloat16
        )
        args, kwargs = tree_map(lambda x: x.to(wide) if _castable(x) else x, (args, kwargs))
        return op(*args, **kwargs)

    return wrapper


@contextlib.contextmanager
def casts(bf16: Iterable[str] = HABANA_BF16, fp32: Iterable[str] = HABANA_FP32, promote: Iterable[str] = HABANA_PROMOTE) -> Iterator[None]:
    """Cast the inputs of the listed ops while the block runs."""
    saved = []
    for names, dtype in ((bf16, torch.bfloat16), (fp32, torch.float32), (promote, None)):
        for name in (form for op in names for form in (op, f"{op}_", f"__{op}__", f"__r{op}__", f"__i{op}__")):
            for owner in (torch, torch.nn.functional, torch.Tensor):
                if hasattr(owner, name):
                    saved.append((owner, name, vars(owner).get(name)))
                    setattr(owner, name, _wrap(getattr(owner, name), dtype))
    try:
        yield
    finally:
        for owner, name, old in reversed(saved):
            setattr(owner, name, old) if old is not None else delattr(owner, name)
