"""R19: methods of torch.Tensor and its subclasses are looked up, replaced and compared as without hmp; no table holds a wrapper."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hmp
from process_kit import alone
from trap_kit import policy

LOW = torch.bfloat16
A, B = torch.randn(4, 4), torch.randn(4, 4)


@pytest.mark.parametrize("attribute", ["mul", "__setitem__"])
def test_r19_methods_of_a_class_are_its_own(attribute: str) -> None:
    class Own(torch.Tensor):
        mul = __eq__ = softmax = __setitem__ = lambda self, *args: "own"  # type: ignore[assignment]

    class Heir(Own):
        pass

    with hmp.convert(policy=policy(bf16=["mul", "setitem", "softmax", "eq"])):
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
    with hmp.convert(policy="habana"):
        meta = type("Meta", (type(torch.Tensor),), {})
        cls = meta("Cls", (torch.Tensor,), {})
        assert cls != torch.Tensor and cls == cls and cls != 1 and hash(cls) == hash(cls)
        assert {cls: 1}[cls] == 1 and cls in [torch.Tensor, cls]
        assert (torch.Tensor | None) is not None and (cls | None) is not None
        with pytest.raises(TypeError):
            assert cls < torch.Tensor


# --- no table of torch's holds a wrapper, whoever filled it and when


USE = """
import gc, sys, torch, hmp

def function(x):
    return torch.matmul(torch.nn.functional.gelu(x), x) + torch.ones(2, 2)

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x @ x)

def use():
    global torch
    x = torch.ones(2, 2)
    with torch.device("meta"):
        assert torch.ones(2).device.type == torch.arange(2).device.type == torch.eye(2).device.type == "meta"
    torch.set_default_device("meta")
    assert torch.full((2,), 1.0).device.type == torch.empty(2).device.type == "meta"
    torch.set_default_device(None)
    torch.overrides.get_overridable_functions(), torch.overrides.get_testing_overrides()
    torch.overrides.resolve_name(torch.matmul), torch.overrides.is_tensor_method_or_property(torch.Tensor.mul)
    torch.jit.script(function)(x), torch.jit.trace(function, (x,))(x)
    torch.fx.Interpreter(torch.fx.symbolic_trace(Model())).run(x)
    torch.compile(function, backend="aot_eager")(x)
    torch.export.export(Model(), (x,))
    import torch.fx.experimental.proxy_tensor as proxy_tensor
    proxy_tensor.make_fx(function)(x)
    import torch.distributed.tensor, torch.distributed._shard.sharded_tensor, torch.distributed.fsdp
    import torch.ao.quantization.quantize_fx
    import torch.nn.utils._expanded_weights
"""

LOOK = """
import types
from hmp.patching import stand_ins
from torch_walk import held_by_anything, held_by_torch

def is_wrapper(value):
    if isinstance(value, types.FunctionType):
        return stand_ins.is_dispatcher(value.__code__) and hasattr(value, "__wrapped__")
    return type(value) in stand_ins.KINDS

# where users find torch's functions: there they stand on purpose; and Dynamo has to know them
PLACES = [torch, torch.nn.functional, torch.special, torch.linalg, torch.fft, torch.sparse, torch.masked, torch.signal.windows]
PLACES += [torch._VF, *(getattr(torch._C, name) for name in ('_nn', '_linalg', '_special', '_fft', '_sparse'))]
PLACES = [vars(each) for each in PLACES]

def look():
    allowed = [*PLACES, torch.Tensor]
    if "torch._dynamo.trace_rules" in sys.modules:
        allowed.append(sys.modules["torch._dynamo.trace_rules"].get_torch_obj_rule_map())
    # a dict that a type written in C does not let anybody see
    allowed += [next(d for d in gc.get_referents(vars(t)) if type(d) is dict) for t in (torch.Tensor,)]
    allowed = {*map(id, allowed)}
    found = list(held_by_torch(is_wrapper))
    assert len(found) > 40  # it sees them
    assert [(where, value.__name__) for where, holder, value in found if id(holder) not in allowed] == []
    gc.collect()
    others = [(where, value.__name__) for where, holder, value in held_by_anything(is_wrapper, "hmp") if id(holder) not in allowed]
    # a static method of torch.Tensor's, a bound one, and what hmp's dispatchers and counterparts are made of
    own = ("staticmethod", "tuple", "_Method", *(kind.__name__ for kind in stand_ins.KINDS))
    others = [each for each in others if each[0] not in own]
    assert others == []
"""


@pytest.mark.slow  # imports and compiles much of torch
@pytest.mark.parametrize("when", ["before", "after"])
def test_r19_tables_of_all_of_torch_hold_torchs_own_functions(tmp_path: Path, when: str) -> None:
    convert = "hmp.convert(policy=hmp.Policy('star', bf16=['*']))"
    alone(tmp_path, "\n".join((USE, LOOK, *(["use()", convert] if when == "before" else [convert, "use()"]), "look()")))
