"""Containers keep their type, attention by classes of torch's follows its list, and classes that refuse casts are left to torch."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import bias
from torch.nn.attention.flex_attention import flex_attention

import hmp
from oracle import BF16, F16, F32
from strategies import Outputs

Pair = namedtuple("Pair", "first second")


class Tensors(list):
    """A list with a constructor of its own."""

    def __init__(self, owner, values):
        super().__init__(values)
        self.owner = owner


@pytest.mark.parametrize(("cast", "dtype"), [("bf16", BF16), ("fp32", torch.float32), ("promote", torch.float32)])
def test_what_stands_in_a_dict_of_any_class_is_cast_as_it_counts_for_the_dtype(cast, dtype):
    class Mine:
        @staticmethod
        def product(items, other):
            seen.append((items, other))
            return items["x"] @ other

    x, other = torch.randn(4, 4).bfloat16(), torch.randn(4, 4)
    hmp.register(Mine, "product", cast)
    for kind in (dict, OrderedDict, lambda **items: defaultdict(list, items), Outputs):
        given, seen = kind(x=x, words="kept"), []
        with hmp.casts(hmp.Policy("mine")):
            got = Mine.product(given, other)
        # by hand
        assert torch.equal(got, x.to(dtype) @ other.to(dtype)) and got.dtype is dtype
        ((items, _),) = seen
        assert type(items) is type(given) and list(items) == ["x", "words"] and items["words"] == "kept"
        assert getattr(items, "x", items["x"]) is items["x"] and getattr(items, "default_factory", list) is list
        assert given["x"] is x  # what was given is not written into


def test_what_holds_a_tensor_keeps_its_type_and_what_holds_none_is_handed_on_itself():
    class Mine:
        @staticmethod
        def given(tree):
            seen.append(tree)
            return torch.ones(1)

    seen = []
    x, words = torch.ones(2), ["a", "b"]
    tree = [x, (x, 3), Pair(x, None), {"x": x, "words": words}, Tensors("me", [x]), torch.aminmax(x), words]
    hmp.register(Mine, "given", "bf16")
    with hmp.casts(hmp.Policy("mine")):
        Mine.given(tree)
    (got,) = seen
    assert type(got) is list and [type(each) for each in got[1:]] == [type(each) for each in tree[1:]]
    low = [got[0], got[1][0], got[2].first, got[3]["x"], got[4][0], got[5].max]
    assert [each.dtype for each in low] == [BF16] * 6
    assert got[1][1] == 3 and got[2].second is None and got[4].owner == "me" and got[6] is got[3]["words"] is words
    assert tree[0] is x and tree[4][0] is x and tree[3]["x"] is x  # what was given is not written into


LISTED = {
    "bf16": (hmp.Policy("low", bf16={"scaled_dot_product_attention"}), BF16),
    "float16": (hmp.Policy("half", bf16={"scaled_dot_product_attention"}, dtype=F16), F16),
    "fp32": (hmp.Policy("wide", fp32={"scaled_dot_product_attention"}), F32),
    "a list with the products inside": (hmp.Policy("others", bf16={"matmul", "mul", "where", "softmax", "bmm"}), None),
    "none": (hmp.Policy("none"), None),
}
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def heads(*dtypes: torch.dtype) -> Heads:
    made = torch.randn(3, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0))
    return tuple(x.to(dtype) for x, dtype in zip(made, dtypes, strict=True))  # type: ignore[return-value]


def jagged(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x[0, 0, :3], x[0, 0, 3:9]], layout=torch.jagged).unflatten(-1, (2, 4)).transpose(1, 2)


def of_jagged(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(jagged(query), jagged(key), jagged(value)).values()


def lower_right(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query[:, :, :4], key, value, attn_mask=bias.causal_lower_right(4, 16))


ATTENTION: dict[str, Callable[..., torch.Tensor]] = {"jagged": of_jagged, "a causal bias": lower_right}


def check(call: Callable[..., torch.Tensor], listed: str, dtypes: tuple[torch.dtype, ...], *, watched: bool) -> None:
    policy, dtype = LISTED[listed]
    given_heads = heads(*dtypes)
    # without a list the first input's (R7), where torch refuses the mixture
    by_hand = [x.to(dtype or dtypes[0]) for x in given_heads]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = call(*by_hand)
        with hmp.casts(policy):
            got = call(*given_heads)
            if watched:
                with hmp.record() as report:
                    seen = call(*given_heads)
                assert torch.equal(seen, got) and seen.dtype is got.dtype
                assert not [row for row in report.rows if row.op in ("matmul", "softmax", "where", "mul") and row.inputs]  # one op (R8)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


@given(
    st.sampled_from(sorted(ATTENTION)), st.sampled_from(sorted(LISTED)), st.tuples(*[st.sampled_from([F32, BF16, F16])] * 3), st.booleans()
)
def test_r1_attention_that_a_class_of_torchs_computes_follows_its_list_in_every_mixture(
    name: str, listed: str, dtypes: tuple[torch.dtype, ...], watched: bool
) -> None:
    check(ATTENTION[name], listed, dtypes, watched=watched)


@pytest.mark.slow  # it imports Dynamo
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:return_lse is deprecated")
@pytest.mark.parametrize("listed", LISTED)
def test_r1_flex_attention_follows_scaled_dot_product_attention_and_is_one_op(listed: str) -> None:
    check(lambda *heads: flex_attention(*heads, lambda score, b, h, i, j: score * 2 + (i - j) / 4), listed, (F32, F32, F32), watched=True)


def test_r12_a_causal_bias_is_no_mask_of_numbers() -> None:
    """Its class has a shape and no values, in whatever dtype torch makes tensors."""
    torch.set_default_dtype(torch.float64)
    try:
        mask = bias.causal_lower_right(4, 16)
    finally:
        torch.set_default_dtype(F32)
    query, key, value = heads(F32, F32, F32)
    with hmp.casts("torch-cpu"), hmp.record():
        assert F.scaled_dot_product_attention(query[:, :, :4], key, value, attn_mask=mask).dtype is BF16


DATA = torch.linspace(-1.0, 2.0, 9).reshape(3, 3)


class Refusing(torch.Tensor):
    """Has its own `__torch_dispatch__`, which does not cast, as torch's MaskedTensor: torch's way to say so, or an error of the user's."""

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
    ops = {"mul", "relu", "add"}
    for lists, data in (({"bf16": ops}, DATA), ({"fp32": ops}, DATA.to(dtype)), ({}, DATA.to(dtype))):
        Refusing.error, Refusing.seen = None, []
        with hmp.casts(hmp.Policy("mine", dtype=dtype, **lists)):
            result = op(Refusing(data))
        assert result.dtype is data.dtype
        assert torch.equal(result.inner, op(data))
        assert len([name for name in Refusing.seen if name in ops]) == 1


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
