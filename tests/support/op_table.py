"""The published ops with every site where each can be called, and the arguments that it takes.

Calls are lambdas that look `torch.x` up when they run: that is how a user's code meets a patch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from oracle import F32, Outcome, cast, left_to_torch, outcome, target
from strategies import Leaf, any_dtypes, leaves

Call = Callable[..., Any]
NN, VF = torch._C._nn, torch._VF


@dataclass(frozen=True)
class Op:
    """An op under one rule: `args` holds leaf templates (dtype and content are drawn) and fixed values; `keep` is never cast."""

    name: str
    sites: dict[str, Call]
    args: tuple[Any, ...]
    keep: frozenset[int] = frozenset()

    def expected(self, call: Call, args: list[Any], rule: str) -> Outcome:
        """What plain torch gives when the user writes the casts of this rule by hand."""
        dtype = None if left_to_torch(args) else target(rule, [a for i, a in enumerate(args) if i not in self.keep])

        def cast_by_hand(*args: Any) -> Any:
            return call(*[a if i in self.keep else cast(a, dtype) for i, a in enumerate(args)])

        return outcome(cast_by_hand, args)

    def draw(self, dtypes: st.SearchStrategy[torch.dtype] = any_dtypes) -> st.SearchStrategy[list[Any]]:
        slots = [
            leaves(a.shape, st.just(F32) if i in self.keep else dtypes, a.values, a.grad) if isinstance(a, Leaf) else st.just(a)
            for i, a in enumerate(self.args)
        ]
        return st.tuples(*slots).map(list)


def x(*shape: int, values: str = "normal", grad: bool = True) -> Leaf:
    return Leaf(shape, values=values, grad=grad)


def everywhere(name: str, *owners: str) -> dict[str, Call]:
    """The op called by its own name in each owner, arguments as they come."""
    places = {"torch": torch, "F": F, "nn": NN, "VF": VF, "Tensor": torch.Tensor, "linalg": torch.linalg, "special": torch.special}
    return {f"{o}.{name}": (lambda *a, _o=places[o], **k: getattr(_o, name)(*a, **k)) for o in owners}


def conv(n: int, transposed: bool = False) -> Op:
    name = f"conv{'_transpose' if transposed else ''}{n}d"
    return Op(name, everywhere(name, "torch", "F", "VF"), (x(2, 2, *[4] * n), x(2, 2, *[3] * n), x(2)))


def dropout_n(n: int) -> Op:
    name = f"dropout{n}d"
    return Op(
        name,
        {
            f"F.{name}": lambda a: getattr(F, name)(a, 0.5, True),
            "module": lambda a: getattr(torch.nn, f"Dropout{n}d")(0.5)(a),
        },
        (x(2, 3, *[4] * n),),
    )


BF16_LIST = [
    Op("addmm", everywhere("addmm", "torch", "Tensor", "VF"), (x(2, 4), x(2, 3), x(3, 4))),
    Op(
        "batch_norm",
        {
            "F.batch_norm": lambda a, rm, rv, w, b: F.batch_norm(a, rm, rv, w, b, False),
            "torch.batch_norm": lambda a, rm, rv, w, b: torch.batch_norm(a, w, b, rm, rv, False, 0.1, 1e-5, False),
        },
        (x(4, 3, 2), x(3, grad=False), x(3, values="positive", grad=False), x(3), x(3)),
        frozenset({1, 2, 3, 4}),
    ),
    Op("bmm", everywhere("bmm", "torch", "Tensor", "VF"), (x(2, 3, 4), x(2, 4, 2))),
    *[conv(n) for n in (1, 2, 3)],
    *[conv(n, transposed=True) for n in (1, 2, 3)],
    Op("dot", everywhere("dot", "torch", "Tensor", "VF"), (x(5), x(5))),
    Op(
        "dropout",
        {
            "torch.dropout": lambda a: torch.dropout(a, 0.5, True),
            "F.dropout": lambda a: F.dropout(a, 0.5),
            "VF.dropout": lambda a: VF.dropout(a, 0.5, True),
            "module": lambda a: torch.nn.Dropout(0.5)(a),
        },
        (x(6, 4),),
    ),
    *[dropout_n(n) for n in (1, 2, 3)],
    Op(
        "group_norm",
        {
            "F.group_norm": lambda a, w, b: F.group_norm(a, 2, w, b),
            "torch.group_norm": lambda a, w, b: torch.group_norm(a, 2, w, b),
        },
        (x(2, 4, 3), x(4), x(4)),
        frozenset({1, 2}),
    ),
    Op(
        "instance_norm",
        {"F.instance_norm": lambda a, w, b: F.instance_norm(a, None, None, w, b)},
        (x(2, 3, 5), x(3), x(3)),
        frozenset({1, 2}),
    ),
    Op(
        "layer_norm",
        {
            "F.layer_norm": lambda a, w, b: F.layer_norm(a, (4,), w, b),
            "torch.layer_norm": lambda a, w, b: torch.layer_norm(a, (4,), w, b),
        },
        (x(3, 4), x(4), x(4)),
        frozenset({1, 2}),
    ),
    Op(
        "leaky_relu",
        {
            "F.leaky_relu": lambda a: F.leaky_relu(a, 0.3),
            "nn.leaky_relu": lambda a: NN.leaky_relu(a, 0.3),
            "module": lambda a: torch.nn.LeakyReLU(0.3)(a),
        },
        (x(3, 4),),
    ),
    Op("linear", everywhere("linear", "F", "nn"), (x(2, 3), x(4, 3), x(4))),
    Op(
        "matmul",
        {
            **everywhere("matmul", "torch", "Tensor", "VF", "linalg"),
            "@": operator.matmul,
            "__rmatmul__": lambda a, b: b.__rmatmul__(a),
        },
        (x(2, 3), x(3, 4)),
    ),
    Op("mm", everywhere("mm", "torch", "Tensor", "VF"), (x(2, 3), x(3, 4))),
    Op(
        "mul",
        {
            **everywhere("mul", "torch", "Tensor", "VF"),
            **everywhere("multiply", "torch", "Tensor"),
            "*": operator.mul,
            "__mul__": lambda a, b: a.__mul__(b),
            "__rmul__": lambda a, b: b.__rmul__(a),
        },
        (x(2, 3), x(3)),
    ),
    Op("mv", everywhere("mv", "torch", "Tensor", "VF"), (x(2, 3), x(3))),
    Op("relu", {**everywhere("relu", "torch", "Tensor", "F", "VF"), "module": lambda a: torch.nn.ReLU()(a)}, (x(3, 4),)),
    Op("t", everywhere("t", "torch", "Tensor", "VF"), (x(3, 4),)),
]

_CLASSES = torch.tensor([0, 2, 1, 2])
_TABLE = torch.tensor([[0, 2], [1, 2]])


def division(name: str) -> dict[str, Call]:
    return everywhere(name, "torch", "Tensor", *(["VF"] if name != "true_divide" else []))


FP32_LIST = [
    Op(
        "binary_cross_entropy",
        everywhere("binary_cross_entropy", "F", "nn"),
        (x(4, values="probability"), x(4, values="probability"), x(4, values="positive", grad=False)),
    ),
    Op(
        "binary_cross_entropy_with_logits",
        everywhere("binary_cross_entropy_with_logits", "F", "torch"),
        (x(4), x(4, values="probability"), x(4, grad=False)),
    ),
    Op(
        "cross_entropy",
        {
            "classes": lambda a, w: F.cross_entropy(a, _CLASSES, w, label_smoothing=0.1),
            "module": lambda a, w: torch.nn.CrossEntropyLoss(w)(a, _CLASSES),
        },
        (x(4, 3), x(3, values="positive", grad=False)),
    ),
    Op("cross_entropy", {"probabilities": lambda a, p: F.cross_entropy(a, p)}, (x(4, 3), x(4, 3, values="probability"))),
    Op("div", division("div"), (x(2, 3), x(3, values="positive"))),
    Op("divide", division("divide"), (x(2, 3), x(3, values="positive"))),
    Op(
        "embedding_bag",
        {
            "F.embedding_bag": lambda t, w: F.embedding_bag(_TABLE, t, mode="sum", per_sample_weights=w),
            "torch.embedding_bag": lambda t, w: torch.embedding_bag(
                t, _TABLE.flatten(), torch.tensor([0, 2]), False, 0, False, w.flatten()
            )[0],
        },
        (x(3, 4), x(2, 2)),
    ),
    Op("log", everywhere("log", "torch", "Tensor", "VF"), (x(3, values="positive"),)),
    Op("log2", everywhere("log2", "torch", "Tensor", "VF"), (x(3, values="positive"),)),
    Op(
        "log_softmax",
        {n: (lambda a, _c=c: _c(a, -1)) for n, c in everywhere("log_softmax", "torch", "Tensor", "F", "special").items()},
        (x(2, 3),),
    ),
    Op(
        "nll_loss",
        {"F.nll_loss": lambda a, w: F.nll_loss(a, _CLASSES, w), "module": lambda a, w: torch.nn.NLLLoss(w)(a, _CLASSES)},
        (x(4, 3), x(3, values="positive", grad=False)),
    ),
    Op("smooth_l1_loss", everywhere("smooth_l1_loss", "F", "nn"), (x(4), x(4))),
    Op(
        "softmax", {n: (lambda a, _c=c: _c(a, -1)) for n, c in everywhere("softmax", "torch", "Tensor", "F", "special").items()}, (x(2, 3),)
    ),
    Op("topk", {n: (lambda a, _c=c: _c(a, 2)) for n, c in everywhere("topk", "torch", "Tensor", "VF").items()}, (x(2, 5),)),
    Op(
        "truediv",
        {
            "/": operator.truediv,
            "__truediv__": lambda a, b: a.__truediv__(b),
            "__rtruediv__": lambda a, b: b.__rtruediv__(a),
            **division("true_divide"),
        },
        (x(2, 3), x(3, values="positive")),
    ),
]
