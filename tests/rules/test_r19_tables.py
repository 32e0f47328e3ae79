"""R19: no table of torch's holds a wrapper, whoever filled it and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from process_kit import alone

USE = """
import gc, sys, torch, hmp

def function(x):
    return torch.matmul(torch.nn.functional.gelu(x), x) + torch.ones(2, 2)

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x @ x)

def use():
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
"""

USE_MORE = """
def use_more():
    global torch
    x = torch.ones(2, 2)
    torch.compile(function, backend="aot_eager")(x)
    torch.export.export(Model(), (x,))
    import torch.fx.experimental.proxy_tensor as proxy_tensor
    proxy_tensor.make_fx(function)(x)
    import torch.distributed.tensor, torch.distributed._shard.sharded_tensor, torch.distributed.fsdp
    import torch.ao.quantization.quantize_fx
    import torch.nn.utils._expanded_weights
    assert torch.distributed.tensor
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

POLICIES = {"O2": "policy='habana-o2'", "*": "policy=hmp.Policy('star', bf16=['*'])"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "when"), [("O2", "after"), ("*", "both")])
def test_r19_tables_hold_torchs_own_functions(tmp_path: Path, name: str, when: str) -> None:
    _run(tmp_path, name, when, "use()")


@pytest.mark.sampled(4)
@pytest.mark.slow  # imports and compiles much of torch
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", POLICIES)
def test_r19_tables_of_all_of_torch_hold_torchs_own_functions(tmp_path: Path, name: str, when: str) -> None:
    _run(tmp_path, name, when, "use(), use_more()")


def _run(tmp_path: Path, name: str, when: str, use: str) -> None:
    before, after = use if when in ("before", "both") else "", use if when in ("after", "both") else ""
    alone(tmp_path, "\n".join((USE, USE_MORE, LOOK, before, f"hmp.convert({POLICIES[name]})", after, "look()")))
