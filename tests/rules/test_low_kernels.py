"""R11: no op's kernel in a low-precision dtype gives garbage: hmp has float64's results for the rounded inputs, in its range."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import hmp
from ops import list_name, op_db, seed, title

F32, F64 = torch.float32, torch.float64
SAMPLES = 3
# Beyond this relative error of the whole result its kernel is at fault, not the rounding of what it computes.
MOST = {torch.bfloat16: 0.5, torch.float16: 0.2}
# Results that are random, or not determined by the inputs, or counts of rounding itself; near zero nothing is left of x - tanh(x).
UNDETERMINED = re.compile(
    r".*(dropout|rand|normal|uniform|lowrank|resize|svd|eig|arg|scaled_mm|fractional|householder|ormqr|geqrf|pinv|matrix_rank|histogram).*"
    r"|bernoulli|multinomial|exponential|cauchy|geometric|rrelu|poisson|(new_)?empty.*|nextafter|frexp|sort|topk|mode|unique.*|(linalg.)?qr"
    r"|(linalg.)?(lu|ldl).*|.*tanhshrink|floor.*|ceil|round|trunc|remainder|fmod|frac|sign|heaviside|histc|div|multi_head_attention_forward"
)


def _cast(tree: Any, dtype: torch.dtype, only: torch.dtype) -> Any:
    return pytree.tree_map(lambda x: x.detach().to(dtype) if isinstance(x, torch.Tensor) and x.dtype is only else x, tree)


def _found(name: str) -> Any:
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _can_be_listed(name: str) -> bool:
    try:
        hmp.Policy(bf16={name})
    except hmp.OpListError:
        return False
    return True


def garbage(info: Any, low: torch.dtype) -> list[str]:
    """What is wrong with the op's samples: a line each."""
    name = list_name(info.name)
    if UNDETERMINED.fullmatch(name) or not callable(_found(info.name)) or not _can_be_listed(name):
        return []
    seed()
    lines, policy = [], hmp.Policy("low", dtype=low, bf16={name})
    for sample in itertools.islice(info.sample_inputs_func(info, "cpu", F32, False), SAMPLES):
        args, kwargs = _cast(((sample.input, *sample.args), sample.kwargs), low, F32)
        wide = _cast((args, kwargs), F64, low)
        try:
            seed()
            want = [t for t in pytree.tree_leaves(_found(info.name)(*wide[0], **wide[1])) if isinstance(t, torch.Tensor)]
            with hmp.casts(policy):
                seed()
                got = [t for t in pytree.tree_leaves(_found(info.name)(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):
            continue  # which other tests look at
        for one, other in zip(got, want, strict=True):
            if other.dtype is not F64 or one.layout is not torch.strided or not other.numel() or one.shape != other.shape:
                continue
            finite = other.isfinite() & (other.abs() < torch.finfo(low).max / 2)
            error = ((one.double() - other)[finite].norm() / other[finite].norm().clamp_min(1e-6)).item() if finite.any() else 0.0
            if not error <= MOST[low]:
                lines.append(f"{title(info)} in {low}: off by {error if math.isfinite(error) else 'NaN'}")
    return lines[:1]


@pytest.mark.slow
@pytest.mark.parametrize("low", MOST, ids=str)
def test_r11_no_op_gives_garbage_in_a_low_dtype(low: torch.dtype) -> None:
    assert not [line for info in op_db() for line in garbage(info, low)]


@pytest.mark.parametrize("low", MOST, ids=str)
def test_r11_ops_whose_low_kernels_give_garbage_run_in_float32(low: torch.dtype) -> None:
    x = torch.randn(3, 4, 4).to(low)
    with hmp.casts(hmp.Policy("low", dtype=low, bf16={"matrix_exp"})):
        got = torch.matrix_exp(x)
    want = torch.matrix_exp(x.double())
    assert float((got.double() - want).norm() / want.norm()) < MOST[low] / 10
