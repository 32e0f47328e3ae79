"""What cannot run in FP8, and the reason that is counted for it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import hmp
from fp8_oracle import function, in_fp8, policy

BF16 = torch.bfloat16
MULTIPLES = "dimensions that aren't multiples of 16"
BLOCKS = "dimensions that aren't multiples of 32"
SHAPES = "shapes that torch refuses"
ARGUMENTS = "arguments that FP8 does not support"


class Subclass(torch.Tensor):
    pass


class SubclassOfParameter(torch.nn.Parameter):
    pass


def t(*shape: int, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, **kwargs)


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("linear", (t(3, 16), t(32, 16)), {}, ""),
    ("linear", (t(3, 17), t(32, 17)), {}, MULTIPLES),
    ("linear", (t(3, 16), t(16)), {}, "a vector"),
    ("linear", (t(3, 16), t(2, 32, 16)), {}, SHAPES),
    ("linear", (t(3, 16), t(32, 16), t(3, 32)), {}, ""),
    ("linear", (t(0, 16), t(32, 16)), {}, "an empty tensor"),
    ("mm", (t(3, 16), t(16, 0)), {}, "an empty tensor"),
    ("matmul", (t(2, 1, 3, 16), t(5, 16, 32)), {}, ""),
    ("matmul", (t(2, 3, 16), t(5, 16, 32)), {}, SHAPES),
    ("mm", (t(3, 16), t(16, 32)), {"out": t(3, 32, dtype=BF16)}, ""),
    ("mm", (t(3, 16), t(16, 32)), {"out": t(3, 32, dtype=torch.float64)}, "out= of another kind"),
    ("mm", (leaf(3, 16), t(16, 32)), {"out": t(3, 32)}, "out= where a gradient is needed"),
    ("mm", (t(3, 16), t(16, 32)), {"out_dtype": torch.float32}, "out_dtype is given"),
    ("bmm", (t(2, 3, 16), t(2, 16, 32)), {}, ""),
    ("bmm", (t(2, 3, 16), t(3, 16, 32)), {}, SHAPES),
    ("addmm", (t(32), t(3, 16), t(16, 32)), {"beta": 2, "alpha": 0.5}, ""),
    ("addmm", (leaf(32), t(3, 16), t(16, 32)), {"beta": 0}, "beta=0 with an input that needs a gradient"),
    ("addmm", (t(32), t(3, 16), t(16, 32)), {"beta": torch.tensor(2.0)}, "an alpha or beta that isn't a number"),
    ("addmm", (0.5, t(32), 2, t(3, 16), t(16, 32)), {}, ARGUMENTS),  # a signature of old
    ("baddbmm", (t(2, 3, 32), t(2, 3, 16), t(2, 16, 32)), {}, ""),
    ("addbmm", (t(3, 32), t(2, 3, 8), t(2, 8, 32)), {}, ""),  # 2 times 8 terms
    ("addbmm", (t(3, 32), t(2, 3, 4), t(2, 4, 32)), {}, MULTIPLES),
    *((op, (t(2, 3, 16), t(16, 32)), {}, SHAPES) for op in ("mm", "bmm")),
    *((op, (t(3, 32), t(2, 3, 16), t(16, 32)), {}, SHAPES) for op in ("addmm", "baddbmm", "addbmm")),
    ("linear", (t(3, 16), [[1.0]]), {}, ARGUMENTS),
    ("linear", (t(3, 16, dtype=torch.float64), t(32, 16)), {}, "a float64 input"),
    ("mm", (t(3, 16).to(torch.float8_e4m3fn), t(16, 32)), {}, "a float8_e4m3fn input"),
    ("mm", (t(16, 16).to_sparse(), t(16, 32)), {}, "a tensor that is not dense"),
    ("linear", (t(3, 16).as_subclass(Subclass), t(32, 16)), {}, "a tensor subclass"),
    ("linear", (t(3, 16), SubclassOfParameter(t(32, 16))), {}, "a tensor subclass"),
    ("linear", (t(3, 16), torch.empty(32, 16, device="meta")), {}, "several devices"),
    ("linear", (torch.empty(3, 16, device="meta"), torch.empty(32, 16, device="meta")), {}, ""),
]  # fmt: skip


def reason_of(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], recipe: str = "rowwise") -> str:
    """What the call is counted for as one that did not run in FP8; nothing where it did."""
    before = hmp.fallbacks()
    with hmp.casts(policy(op, recipe)), contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):  # torch's own errors
        function(op)(*args, **kwargs)
    reasons = [name.partition(": not in FP8, ")[2] for name, count in hmp.fallbacks().items() if count > before.get(name, 0)]
    assert len(reasons) < 2
    return "".join(reasons)


def test_the_reason() -> None:
    for op, args, kwargs, reason in CALLS:
        assert reason_of(op, args, kwargs) == reason, (op, [getattr(each, "shape", each) for each in args])
    for shapes, reason in ((((3, 16), (32, 16)), BLOCKS), (((3, 32), (48, 32)), BLOCKS), (((3, 32), (32, 32)), "")):
        assert reason_of("linear", tuple(t(*shape) for shape in shapes), {}, "mxfp8") == reason
    nested = torch.nested.nested_tensor([t(2, 16), t(3, 16)])
    assert reason_of("linear", (nested, t(32, 16)), {}) == "a tensor that is not dense"
    jagged = torch.nested.nested_tensor([t(2, 16), t(3, 16)], layout=torch.jagged)
    assert reason_of("linear", (jagged, t(32, 16)), {}) == "a tensor subclass"


def test_where_there_is_none_the_product_has_torchs_shape() -> None:
    for op, args, kwargs, reason in CALLS:
        if reason == "":
            cast = [a.to(BF16) for a in args]
            wanted = function(op)(*cast, **{name: v.to(BF16) if isinstance(v, torch.Tensor) else v for name, v in kwargs.items()})
            found = in_fp8(op, *args, **kwargs, recipe="rowwise")
            assert found.shape == wanted.shape
            assert found.dtype is (kwargs["out"].dtype if "out" in kwargs else BF16)
        elif reason == SHAPES and op != "linear":  # there a bias may broadcast, and a weight have three dimensions
            with pytest.raises((RuntimeError, IndexError)):
                function(op)(*args, **kwargs)
