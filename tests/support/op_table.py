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

from low_kernels_kit import products_as_computed
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
            with products_as_computed():
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


OWNERS = {"torch": torch, "F": F, "nn": NN, "VF": VF, "Tensor": torch.Tensor, "linalg": torch.linalg, "special": torch.special}


def everywhere(name: str, how: Callable[..., Any] = lambda op, *args: op(*args)) -> dict[str, Call]:
    """The op called by its own name wherever it stands; `how` is given the op and the arguments."""
    return {f"{o}.{name}": (lambda *a, _o=owner: how(getattr(_o, name), *a)) for o, owner in OWNERS.items() if hasattr(owner, name)}


def module(make: Callable[[], torch.nn.Module]) -> dict[str, Call]:
    return {"module": lambda *args: make()(*args)}


def conv(n: int, transposed: bool = False) -> Op:
    name = f"conv{'_transpose' if transposed else ''}{n}d"
    return Op(name, everywhere(name), (x(2, 2, *[4] * n), x(2, 2, *[3] * n), x(2)))


def dropout(n: int) -> Op:
    name, shape = (f"dropout{n}d", (2, 3, *[4] * n)) if n else ("dropout", (6, 4))
    made = getattr(torch.nn, f"Dropout{n}d" if n else "Dropout")
    return Op(name, everywhere(name, lambda op, a: op(a, 0.5, True)) | module(lambda: made(0.5)), (x(*shape),))


BF16_LIST = [
    Op("addmm", everywhere("addmm"), (x(2, 4), x(2, 3), x(3, 4))),
    Op(
        "batch_norm",
        {
            "F.batch_norm": lambda a, rm, rv, w, b: F.batch_norm(a, rm, rv, w, b, False),
            "torch.batch_norm": lambda a, rm, rv, w, b: torch.batch_norm(a, w, b, rm, rv, False, 0.1, 1e-5, False),
        },
        (x(4, 3, 2), x(3, grad=False), x(3, values="positive", grad=False), x(3), x(3)),
        frozenset({1, 2, 3, 4}),
    ),
    Op("bmm", everywhere("bmm"), (x(2, 3, 4), x(2, 4, 2))),
    *[conv(n) for n in (1, 2, 3)],
    *[conv(n, transposed=True) for n in (1, 2, 3)],
    Op("dot", everywhere("dot"), (x(5), x(5))),
    *[dropout(n) for n in (0, 1, 2, 3)],
    Op("group_norm", everywhere("group_norm", lambda op, a, w, b: op(a, 2, w, b)), (x(2, 4, 3), x(4), x(4)), frozenset({1, 2})),
    Op(
        "instance_norm",
        {"F.instance_norm": lambda a, w, b: F.instance_norm(a, None, None, w, b)},
        (x(2, 3, 5), x(3), x(3)),
        frozenset({1, 2}),
    ),
    Op("layer_norm", everywhere("layer_norm", lambda op, a, w, b: op(a, (4,), w, b)), (x(3, 4), x(4), x(4)), frozenset({1, 2})),
    Op("leaky_relu", everywhere("leaky_relu", lambda op, a: op(a, 0.3)) | module(lambda: torch.nn.LeakyReLU(0.3)), (x(3, 4),)),
    Op("linear", everywhere("linear"), (x(2, 3), x(4, 3), x(4))),
    Op("matmul", everywhere("matmul") | {"@": operator.matmul, "__rmatmul__": lambda a, b: b.__rmatmul__(a)}, (x(2, 3), x(3, 4))),
    Op("mm", everywhere("mm"), (x(2, 3), x(3, 4))),
    Op(
        "mul",
        everywhere("mul")
        | everywhere("multiply")
        | {"*": operator.mul, "__mul__": lambda a, b: a.__mul__(b), "__rmul__": lambda a, b: b.__rmul__(a)},
        (x(2, 3), x(3)),
    ),
    Op("mv", everywhere("mv"), (x(2, 3), x(3))),
    Op("relu", everywhere("relu") | module(torch.nn.ReLU), (x(3, 4),)),
    Op("t", everywhere("t"), (x(3, 4),)),
]

_CLASSES = torch.tensor([0, 2, 1, 2])
_TABLE = torch.tensor([[0, 2], [1, 2]])


FP32_LIST = [
    Op(
        "binary_cross_entropy",
        everywhere("binary_cross_entropy"),
        (x(4, values="probability"), x(4, values="probability"), x(4, values="positive", grad=False)),
    ),
    Op(
        "binary_cross_entropy_with_logits",
        everywhere("binary_cross_entropy_with_logits"),
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
    *[Op(name, everywhere(name), (x(2, 3), x(3, values="positive"))) for name in ("div", "divide")],
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
    *[Op(name, everywhere(name), (x(3, values="positive"),)) for name in ("log", "log2")],
    *[Op(name, everywhere(name, lambda op, a: op(a, -1)), (x(2, 3),)) for name in ("log_softmax", "softmax")],
    Op(
        "nll_loss",
        {"F.nll_loss": lambda a, w: F.nll_loss(a, _CLASSES, w), "module": lambda a, w: torch.nn.NLLLoss(w)(a, _CLASSES)},
        (x(4, 3), x(3, values="positive", grad=False)),
    ),
    Op("smooth_l1_loss", everywhere("smooth_l1_loss"), (x(4), x(4))),
    Op("topk", everywhere("topk", lambda op, a: op(a, 2)), (x(2, 5),)),
    Op(
        "truediv",
        everywhere("true_divide")
        | {"/": operator.truediv, "__truediv__": lambda a, b: a.__truediv__(b), "__rtruediv__": lambda a, b: b.__rtruediv__(a)},
        (x(2, 3), x(3, values="positive")),
    ),
]
