"""Every op that computes in float32 where a processor has no instructions for a low dtype (R11), its spellings and its inputs' shapes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Call = Callable[..., Any]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Product:
    """A product: its name on a list, each way to call it, and shapes of its tensors, those of the first entry the usual ones."""

    name: str
    calls: dict[str, Call]
    shapes: tuple[Shapes, ...]
    by_first: bool = True  # unlisted, its inputs get the dtype of the first one (R7)
    plain: Call = lambda *args: args  # of one that writes: the same without


_OWNERS = {"torch": torch, "F": F, "nn": torch._C._nn, "VF": torch._VF, "Tensor": torch.Tensor, "linalg": torch.linalg}


def _calls(name: str) -> dict[str, Call]:
    """The op called by its own name wherever it stands, looked up when it is called."""
    return {f"{o}.{name}": (lambda *a, _o=owner: getattr(_o, name)(*a)) for o, owner in _OWNERS.items() if hasattr(owner, name)}


def _convolutions() -> list[Product]:
    found = []
    for n in (1, 2, 3):
        for transposed in (False, True):
            name = f"conv{'_transpose' if transposed else ''}{n}d"
            side = (4,) * n
            usual = ((2, 2, *side), (2, 2, *(3,) * n), (2,))
            found.append(Product(name, _calls(name), (usual, ((0, 2, *side), *usual[1:]), (usual[0][1:], *usual[1:]))))
    last = {"channels_last": lambda x, w, b: F.conv2d(x.to(memory_format=torch.channels_last), w, b, stride=2, padding=1)}
    grouped = {"groups": lambda x, w: F.conv2d(x, w, None, 1, "same", 1, 2), "keyword": lambda x, w: F.conv2d(input=x, weight=w, groups=2)}
    found.append(Product("conv2d", last, (((2, 2, 5, 5), (3, 2, 3, 3), (3,)),)))
    found.append(Product("conv2d", grouped, (((2, 4, 5, 5), (4, 2, 3, 3)),)))
    # torch itself takes a bias of another dtype
    found.append(Product("conv_tbc", _calls("conv_tbc"), (((5, 2, 3), (3, 3, 4), (4,)),), by_first=False))
    whole = {"torch": lambda x, w, b: torch.convolution(x, w, b, [1], [0], [1], False, [0], 1)}
    found.append(Product("convolution", whole, (((2, 2, 5), (3, 2, 3), (3,)),)))
    return found


def _recurrent() -> list[Product]:
    found = []
    for kind, gates in (("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1), ("lstm", 4)):

        def layer(x: Any, *rest: Any, kind: str = kind) -> Any:
            hx, weights = (rest[:2], rest[2:]) if kind == "lstm" else (rest[0], rest[1:])
            return getattr(torch._VF, kind)(x, hx, list(weights), True, 1, 0.0, True, False, False)

        weights = ((gates * 4, 3), (gates * 4, 4), (gates * 4,), (gates * 4,))
        states = 2 if kind == "lstm" else 1
        found.append(Product(kind, {"VF": layer}, (((5, 2, 3), *((1, 2, 4),) * states, *weights),), by_first=False))

        def cell(x: Any, *rest: Any, kind: str = kind) -> Any:
            hx, weights = (rest[:2], rest[2:]) if kind == "lstm" else (rest[0], rest[1:])
            return getattr(torch, f"{kind}_cell")(x, hx, *weights)

        usual = ((2, 3), *((2, 4),) * states, *weights)
        found.append(Product(f"{kind}_cell", {"torch": cell}, (usual, usual[:-2]), by_first=False))
    return found


def _attention() -> list[Product]:
    usual = ((2, 2, 5, 4),) * 3
    plain = {
        "F": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        "nn": lambda q, k, v: torch._C._nn.scaled_dot_product_attention(q, k, v, scale=0.3),
        "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "bool mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(5, k.shape[-2], dtype=torch.bool).tril(2)),
    }
    # the mask becomes the query's dtype, and does not count for the widest (R12)
    masked = {"mask": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m)}
    grouped = {"gqa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)}
    name = "scaled_dot_product_attention"
    return [
        Product(name, plain, (usual, ((5, 4),) * 3, ((2, 5, 4), (2, 5, 4), (2, 5, 4)))),
        Product(name, masked, ((*usual, (5, 5)),), by_first=False),
        Product(name, grouped, (((1, 4, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4)),)),
    ]


def _einsum() -> dict[str, Call]:
    return {
        "torch": lambda a, b: torch.einsum("ij,jk->ik", a, b),
        "list": lambda a, b: torch.einsum("ij,jk", [a, b]),
        "sublists": lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [2, 0]),
        "transposed": lambda a, b: torch.einsum("ij,jk->ki", a, b),
    }


_MATRICES = (((3, 4), (4, 5)), ((0, 4), (4, 5)), ((3, 0), (0, 5)))
PRODUCTS = [
    Product(
        "linear",
        _calls("linear") | {"keyword": lambda x, w, b: F.linear(input=x, bias=b, weight=w), "no bias": lambda x, w, b: F.linear(x, w)},
        (((2, 3), (4, 3), (4,)), ((2, 5, 3), (4, 3), (4,)), ((3,), (4, 3), (4,)), ((0, 3), (4, 3), (4,))),
    ),
    Product(
        "matmul",
        _calls("matmul")
        | {"@": operator.matmul, "rmatmul": lambda a, b: b.__rmatmul__(a), "linalg": lambda a, b: torch.linalg.matmul(a, b)},
        (*_MATRICES, ((2, 3, 4), (4, 5)), ((2, 1, 3, 4), (3, 4, 5)), ((4,), (4, 5)), ((2, 3, 4), (4,)), ((4,), (4,))),
    ),
    Product("mm", _calls("mm"), _MATRICES),
    Product("bmm", _calls("bmm"), (((2, 3, 4), (2, 4, 5)), ((0, 3, 4), (0, 4, 5)))),
    Product(
        "addmm",
        _calls("addmm") | {"scaled": lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2)},
        (((3, 5), (3, 4), (4, 5)), ((5,), (3, 4), (4, 5)), ((), (3, 4), (4, 5))),
    ),
    Product("addbmm", _calls("addbmm"), (((3, 5), (2, 3, 4), (2, 4, 5)),)),
    Product(
        "baddbmm",
        _calls("baddbmm") | {"scaled": lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2)},
        (((2, 3, 5), (2, 3, 4), (2, 4, 5)), ((1, 5), (2, 3, 4), (2, 4, 5))),
    ),
    Product("inner", _calls("inner"), (((3, 4), (5, 4)), ((4,), (4,)), ((), (4,)))),
    Product("einsum", _einsum(), _MATRICES),
    Product(
        "tensordot",
        {"torch": lambda a, b: torch.tensordot(a, b, 1), "dims": lambda a, b: torch.tensordot(a, b, dims=([1], [0]))},
        (((3, 4), (4, 5)), ((3, 4), (4, 2, 2))),
    ),
    Product("linalg.multi_dot", {"linalg": lambda *m: torch.linalg.multi_dot(m)}, (((3, 4), (4, 5), (5, 2)), ((4,), (4, 5), (5,)))),
    Product("matrix_power", {"torch": lambda a: torch.matrix_power(a, 3)}, (((4, 4),), ((2, 3, 3),)), by_first=False),
    Product("cov", {"torch": lambda a: torch.cov(a), "method": lambda a: a.cov(correction=0)}, (((3, 6),),), by_first=False),
    Product("corrcoef", {"torch": lambda a: torch.corrcoef(a)}, (((3, 6),),), by_first=False),
    Product(
        "_addmm_activation",
        {"torch": lambda c, a, b: torch._addmm_activation(c, a, b, use_gelu=True)},
        (((5,), (3, 4), (4, 5)),),
        by_first=False,
    ),
    Product("bilinear", _calls("bilinear"), (((2, 3), (2, 4), (5, 3, 4), (5,)), ((2, 2, 3), (2, 2, 4), (5, 3, 4), (5,)))),
    *_attention(),
    *_convolutions(),
    *_recurrent(),
]
ALL_NAMES = sorted({p.name for p in PRODUCTS} | {"chain_matmul"})

_ADDMM = ((3, 5), (3, 4), (4, 5))
_BADDBMM = ((2, 3, 5), (2, 3, 4), (2, 4, 5))
IN_PLACE = [
    Product(
        "addmm_", {"method": lambda c, a, b: c.addmm_(a, b, beta=0.5)}, (_ADDMM,), plain=lambda c, a, b: torch.addmm(c, a, b, beta=0.5)
    ),
    Product(
        "addbmm_", {"method": lambda c, a, b: c.addbmm_(a, b)}, (((3, 5), *_BADDBMM[1:]),), plain=lambda c, a, b: torch.addbmm(c, a, b)
    ),
    Product("baddbmm_", {"method": lambda c, a, b: c.baddbmm_(a, b)}, (_BADDBMM,), plain=lambda c, a, b: torch.baddbmm(c, a, b)),
]
WRITING = [
    Product("mm", {"out": lambda a, b, out: torch.mm(a, b, out=out)}, (((3, 4), (4, 5)),), plain=torch.mm),
    Product("matmul", {"out": lambda a, b, out: torch.matmul(a, b, out=out)}, (((2, 3, 4), (4, 5)),), plain=torch.matmul),
    Product("bmm", {"out": lambda a, b, out: torch.bmm(a, b, out=out)}, (_BADDBMM[1:],), plain=torch.bmm),
    Product("addmm", {"out": lambda c, a, b, out: torch.addmm(c, a, b, out=out)}, (_ADDMM,), plain=torch.addmm),
    Product("baddbmm", {"out": lambda c, a, b, out: torch.baddbmm(c, a, b, out=out)}, (_BADDBMM,), plain=torch.baddbmm),
    Product("inner", {"out": lambda a, b, out: torch.inner(a, b, out=out)}, (((3, 4), (5, 4)),), plain=torch.inner),
    Product("linalg.multi_dot", {"out": lambda a, b, c, out: torch.linalg.multi_dot([a, b, c], out=out)}, (((3, 4), (4, 5), (5, 2)),),
            plain=lambda *m: torch.linalg.multi_dot(m)),
    Product("linear", {"out": lambda a, b, out: torch._C._nn.linear(a, b, out=out)}, (((2, 3), (4, 3)),), plain=F.linear),
    Product("tensordot", {"out": lambda a, b, out: torch.tensordot(a, b, 1, out)}, (((3, 4), (4, 5)),),
            plain=lambda a, b: torch.tensordot(a, b, 1)),
]  # fmt: skip
