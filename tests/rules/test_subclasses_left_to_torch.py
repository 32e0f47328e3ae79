"""What casts cannot serve is left to torch: tensor classes that refuse them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.masked import masked_tensor

import hmp
from oracle import BF16, F16, F32

pytestmark = pytest.mark.filterwarnings("ignore")
MASK = torch.tensor([[True, False, True], [True, True, False], [False, True, True]])
DATA = torch.linspace(-1.0, 2.0, 9).reshape(3, 3)

OPS: dict[str, Callable[[Any], Any]] = {
    "m * m": lambda m: m * m,
    "m * (beyond float16)": lambda m: m * 1e38,
    "m + m": lambda m: m + m,
    "mul_": lambda m: m.mul_(m),
    "where": lambda m: torch.where(MASK, m, m),
    "log": lambda m: torch.log(m),
    "sum": lambda m: m.sum(-1),
    "softmax": lambda m: torch.softmax(m, -1),
    "matmul": lambda m: torch.matmul(m, m),
    "clamp": lambda m: m.clamp(-1, 1),
    "dropout": lambda m: F.dropout(m, 0.0),
    "layer_norm": lambda m: F.layer_norm(m, (3,)),
    "masked_fill": lambda m: m.masked_fill(MASK, 1e38),
    "norm": lambda m: m.norm(),
    "cat": lambda m: torch.cat([m, m]),
}
POLICIES = [
    hmp.Policy.load("habana"),
    hmp.Policy("every op low", bf16={"*"}),
    hmp.Policy("every op in float32", fp32={"*"}),
    hmp.Policy("none"),
]


def masked(dtype: torch.dtype, grad: bool = False) -> Any:
    return masked_tensor(DATA.to(dtype), MASK, requires_grad=grad)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_a_masked_tensor_works_wherever_it_works_in_torch(policy: hmp.Policy) -> None:
    """MaskedTensor has no bfloat16, and neither clamp nor isinf."""
    wrong = []
    for (name, op), dtype in itertools.product(OPS.items(), (F32, F16)):
        plain, result = outcome(op, masked(dtype), hmp.disable_casts()), outcome(op, masked(dtype), hmp.casts(policy))
        if isinstance(plain, Exception):
            wrong += [f"{name}, {dtype}: torch refuses it"] if not isinstance(result, Exception) else []
        elif isinstance(result, Exception):
            wrong.append(f"{name}, {dtype}: {type(result).__name__}: {result}")
        elif not isinstance(result, type(plain)) or result.dtype not in (F32, F16) or not _alike(result, plain):
            wrong.append(f"{name}, {dtype}: {result}, torch gives {plain}")
    assert not wrong, "\n".join(wrong)


def outcome(op: Callable[[Any], Any], given: Any, region: Any) -> Any:
    with region:
        try:
            return op(given)
        except Exception as error:
            return error


def _alike(result: Any, plain: Any) -> bool:
    keep = plain.get_mask()
    one, other = (t.get_data()[keep].float().clamp(-65504, 65504) for t in (result, plain))
    return torch.equal(result.get_mask(), keep) and torch.allclose(one, other, atol=1e-2, rtol=1e-2, equal_nan=True)


class Refusing(torch.Tensor):
    """Has its own `__torch_dispatch__`, which does not cast: torch's way to say so, or an error of the user's."""

    error: Exception | None = None
    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        cls.seen.append(name)
        if name in ("_to_copy", "isinf", "clamp", "where"):
            if cls.error is not None:
                raise cls.error
            return NotImplemented
        result = func(*(a.inner if isinstance(a, Refusing) else a for a in args), **(kwargs or {}))
        return Refusing(result) if isinstance(result, torch.Tensor) else result


@pytest.mark.parametrize("op", [lambda x: x * x, lambda x: torch.relu(x), lambda x: torch.add(x, 1e38)], ids=["mul", "relu", "add"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_class_that_has_no_cast_is_left_to_torch_and_its_op_runs_once(dtype: torch.dtype, op: Callable[[Any], Any]) -> None:
    Refusing.error, Refusing.seen = None, []
    with hmp.casts(hmp.Policy("mine", bf16={"mul", "relu", "add"}, dtype=dtype)):
        result = op(Refusing(DATA))
    assert result.dtype is F32
    assert torch.equal(result.inner, op(DATA))
    assert len([name for name in Refusing.seen if name in ("mul", "relu", "add")]) == 1


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
@pytest.mark.parametrize("op", [lambda x: x * x, lambda x: torch.relu(x)], ids=["mul", "relu"])
def test_another_error_of_a_class_that_is_cast_is_the_users(op: Callable[[Any], Any], kind: type[Exception]) -> None:
    error = kind("mine")  # of this test alone: its traceback holds the policy
    Refusing.error, Refusing.seen = error, []
    with hmp.casts(hmp.Policy("mine", bf16={"mul", "relu"})), pytest.raises(kind) as caught:
        op(Refusing(DATA))
    Refusing.error = None
    assert caught.value is error
    assert len(Refusing.seen) == 1
