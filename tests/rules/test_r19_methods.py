"""R19: the methods of torch.Tensor and of its subclasses are looked up, replaced and compared as without hmp."""

from __future__ import annotations

import pytest
import torch

import hmp
from trap_kit import policy

LOW = torch.bfloat16
A, B = torch.randn(4, 4), torch.randn(4, 4)


@pytest.mark.parametrize("attribute", ["mul", "__eq__", "__setitem__", "softmax"])
def test_r19_methods_of_a_class_are_its_own(attribute: str) -> None:
    class Own(torch.Tensor):
        mul = __eq__ = softmax = __setitem__ = lambda self, *args: "own"  # type: ignore[assignment]

    class Heir(Own):
        pass

    with hmp.convert(policy="habana-o2"):
        assert getattr(Heir, attribute) is getattr(Own, attribute) is vars(Own)[attribute]
        assert getattr(torch.nn.Parameter, attribute) is getattr(torch.Tensor, attribute)
        assert getattr(torch._C.TensorBase, attribute) == getattr(torch.Tensor, attribute)
        assert getattr(A.as_subclass(Heir), attribute)(1, 2) == "own"
        Heir.mul = Heir.__eq__ = Heir.softmax = Heir.__setitem__ = "heir's"  # type: ignore[assignment, method-assign]
        assert vars(Heir)[attribute] == getattr(Heir, attribute) == "heir's"
        delattr(Heir, attribute)
        assert getattr(Heir, attribute) is vars(Own)[attribute]
        with pytest.raises(AttributeError, match=attribute):
            delattr(Heir, attribute)


def test_r19_somebody_elses_patch_of_a_method_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    with hmp.convert(policy=policy(bf16=["mul"])):
        ours = torch.Tensor.mul
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "mul", lambda self, other: "theirs")
            assert A.mul(B) == torch.Tensor.mul(A, B) == "theirs"
        assert torch.Tensor.mul is ours
        assert A.mul(B).dtype is ours(A, B).dtype is LOW


def test_r19_classes_are_compared_as_before() -> None:
    """A metaclass that is made while torch is patched inherits what stands in that of torch.Tensor."""
    with hmp.convert(policy="habana-o2"):
        meta = type("Meta", (type(torch.Tensor),), {})
        cls = meta("Cls", (torch.Tensor,), {})
        assert cls != torch.Tensor and cls == cls and cls != 1 and hash(cls) == hash(cls)
        assert {cls: 1}[cls] == 1 and cls in [torch.Tensor, cls]
        assert (torch.Tensor | None) is not None and (cls | None) is not None
        with pytest.raises(TypeError):
            assert cls < torch.Tensor
