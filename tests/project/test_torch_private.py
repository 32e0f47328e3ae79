"""Of torch's private names hmp.torch_private says which is missing; without those that may be missing hmp works all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

import hmp
from hmp import torch_private
from process_kit import run_in_another_process

HMP = Path(hmp.__file__).parent


_WITHOUT = """
    del sys.modules["hmp"]

    def without(name):
        owner, _, attribute = name.rpartition(".")
        found = torch
        for part in owner.split(".")[1:]:
            found = getattr(found, part)
        if hasattr(found, attribute):  # a torch that never had it is what is wanted
            delattr(found, attribute)
"""


@pytest.mark.slow
def test_a_torch_without_a_required_name_is_refused_when_the_first_name_is_asked_for() -> None:
    code = """
    without("torch._C._len_torch_dispatch_stack")
    torch.__version__ = "9.1.0"
    try:
        import hmp
        hmp.convert
    except Exception as error:
        print(type(error).__module__, type(error).__name__)
        print(error)
    """
    kind, said = run_in_another_process(_WITHOUT + code, with_hmp=False, path=str(HMP.parent)).splitlines()
    assert kind == "hmp.errors HmpError"
    assert all(word in said for word in ("torch 9.1.0", "torch._C._len_torch_dispatch_stack", torch_private.RELEASES_RUN[-1]))


_USED = """
    import hmp
    layer, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
    wanted = F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    with hmp.casts("gaudi"):
        with torch.no_grad():
            for _ in range(4):
                assert torch.equal(layer(x), wanted) and layer(x).dtype is torch.bfloat16
        information = hmp.cache_info()
        layer(x).sum().backward()
    assert layer.weight.grad.dtype is torch.float32
    assert torch.equal(layer.weight.grad, torch.ones(8, 64, dtype=torch.bfloat16).T.mm(x.bfloat16()).float())
    print(information.entries, information.bytes, information.hits, sorted(information.refused))
"""
# But for _lazy_clone, which a type written in C has.
OPTIONAL = [name for name, required in torch_private.NAMES.items() if not required and not name.endswith("._lazy_clone")]


@pytest.mark.slow
@pytest.mark.parametrize("names", [OPTIONAL, ["torch._C._is_cow_tensor"]], ids=["all", "mark"])
def test_without_optional_names_hmp_works_and_without_marks_no_copy_of_a_weight_is_kept(names: list[str]) -> None:
    assert {*names} <= {*OPTIONAL}
    removed = _WITHOUT + "".join(f"    without({name!r})\n" for name in names)
    said = run_in_another_process(removed + _USED, with_hmp=False, path=str(HMP.parent))
    assert said.strip() == "0 0 0 ['device']"
