"""R16: revert() leaves torch identical to what was found, and what is running then keeps its casts to its end.

Handles, second conversions and patches of others P5 asks (tests/properties).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hmp
from process_kit import run_in_another_process
from trap_kit import policy


def test_r16_revert_goes_all_the_way_back_from_inside_a_region(torch_differences):
    x = torch.ones(2)
    with hmp.casts(policy(bf16=["relu"])):
        hmp.revert()
        assert torch.relu(x).dtype is torch.float32 and not hmp.casts_enabled()
        assert torch_differences() == []
    with hmp.casts(policy(bf16=["sin"])):
        assert torch.sin(x).dtype is torch.bfloat16
    assert torch.sin(x).dtype is torch.float32


def test_r16_optimizer_classes_that_were_first_used_under_casts(torch_differences):
    class Users(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            return closure()

    hmp.convert()
    optimizer = Users([torch.nn.Parameter(torch.ones(1))])
    optimizer.step(lambda: None)
    hmp.revert()
    # torch itself hooks step at the first instance; ours must be gone from it
    assert Users.step.__code__ is torch.optim.SGD.step.__code__
    assert optimizer.step(lambda: 7) == 7
    assert torch_differences() == []


def test_r16_a_tensor_never_becomes_a_sequence():
    """Python gives a class a slot for `__getitem__` when that is set, and keeps it when it is deleted."""
    is_sequence = ctypes.pythonapi.PySequence_Check
    scalar = torch.ones(())
    assert not is_sequence(ctypes.py_object(scalar))
    for lists in ({"bf16": ["getitem", "setitem"]}, {"fp32": ["*"]}):
        with hmp.convert(policy=policy(**lists)):
            assert not is_sequence(ctypes.py_object(scalar))
            assert torch.tensor([scalar, scalar]).tolist() == [1.0, 1.0]
    assert not is_sequence(ctypes.py_object(scalar))


@pytest.mark.slow
def test_r16_a_module_that_torch_imports_late_has_torchs_own_functions():
    """torch._numpy, which the first compilation imports, has `from torch import add`."""
    run_in_another_process(
        """
        own = (torch.add,)  # a tuple, which is not followed
        with hmp.convert(policy=hmp.Policy("low", bf16={"add"})):
            assert torch.add is not own[0]
            from torch._numpy import _binary_ufuncs_impl as late
            assert late.add is own[0]
        assert late.add is own[0]
        """
    )


# --- what is running when it is undone keeps its casts to its end


class Undoing(torch.nn.Sequential):
    """Between its two layers it calls a function; the second layer would refuse the first one's low result without casts."""

    def __init__(self):
        super().__init__(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        self.between = lambda: None

    def forward(self, x):
        x = self[0](x)
        self.between()
        return self[1](x)


ROW = torch.ones(1, 2)
LINEAR, SCOPED = policy(bf16=["linear"]), hmp.Policy("scoped", bf16={"linear @ 0", "linear @ 1"})
UNDO = {
    "remove": hmp.remove,
    "revert": lambda _: hmp.revert(),
    "both": lambda model: (hmp.remove(model), hmp.revert()),
    "twice": lambda _: (hmp.revert(), hmp.revert()),
}


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("undo", UNDO.values(), ids=UNDO)
@pytest.mark.parametrize(("lists", "outputs"), [(LINEAR, None), (LINEAR, "float32"), (SCOPED, None)])
def test_r16_a_call_in_which_the_last_policy_is_undone_is_cast_to_its_end(undo, lists, outputs, torch_differences):
    model = hmp.apply(Undoing(), lists, outputs=outputs)
    expected = model(ROW)
    model.between = lambda: undo(model)
    result = model(ROW)
    assert result.dtype == (torch.bfloat16 if outputs is None else torch.float32) and torch.equal(result, expected)
    assert torch_differences() == []
    model.between = lambda: None
    assert model(ROW).dtype == torch.float32


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("where", ["call", "context"])
@pytest.mark.parametrize("undo", UNDO.values(), ids=UNDO)
def test_r16_what_another_thread_runs_keeps_its_casts_until_it_ends(where, undo, torch_differences):
    inside, undone, found, still = threading.Event(), threading.Event(), [], []
    model = Undoing()

    def wait():
        inside.set()
        assert undone.wait(10)

    def work():
        if where == "call":
            model.between = wait
            found.append(model(ROW).dtype)
        else:
            with hmp.casts(LINEAR):
                wait()
                found.append(model(ROW).dtype)

    other = torch.nn.Linear(2, 2) if where == "call" else hmp.apply(torch.nn.Linear(2, 2), LINEAR)
    if where == "call":
        hmp.apply(model, LINEAR)
    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10)
    undo(model if where == "call" else other)
    if where == "call" or undo is not hmp.remove:
        still.append(other(ROW).dtype)
    undone.set()
    thread.join()
    hmp.revert()
    assert found == [torch.bfloat16] and still in ([], [torch.float32])
    assert torch_differences() == []


def test_r16_a_call_of_a_module_under_convert_keeps_its_policy_until_it_ends() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    plain = torch.nn.functional.linear
    hmp.convert(policy=hmp.Policy("low", bf16={"linear"}))
    model[0].register_forward_hook(lambda *_: hmp.revert())
    assert model(torch.ones(1, 2)).dtype is torch.bfloat16
    assert torch.nn.functional.linear is plain and not hmp.is_converted()
    assert model(torch.ones(1, 2)).dtype is torch.float32


def test_r16_a_list_of_linear_patches_what_its_results_can_meet(unpatched, torch_differences):
    """And no list names what torch's private modules hold: there torch raises, as without hmp."""
    model = hmp.apply(torch.nn.Linear(2, 2), policy(bf16=["linear"]))
    places = {each.partition(":")[0] for each in torch_differences()}
    assert 400 < len(places) < 600, len(places)
    assert not places & {"torch.nn.init.normal_", "torch.testing.assert_close", "torch.masked.softmax", "torch._C._linalg.linalg_inv"}
    low, wide = model(torch.eye(2)), torch.eye(2)
    with hmp.casts(policy(bf16=["linear"])):
        assert torch.linalg.solve(wide, low).dtype == torch.float32
        with pytest.raises(RuntimeError, match="dtype"):
            torch._C._linalg.linalg_solve(wide, low)
    with hmp.casts(policy(fp32=["linalg.solve"])):
        assert torch._C._linalg.linalg_solve(wide, low).dtype == torch.float32


@pytest.mark.parametrize("tool", ["summary", "verify", "compare"])
def test_r16_remove_undoes_the_patches_that_a_tool_made_meanwhile(
    tool: str, unpatched: None, torch_differences: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = hmp.apply(nn.Sequential(nn.Linear(4, 4), nn.GELU()), "habana"), torch.ones(2, 4)
    getattr(hmp, tool)(model, x)
    assert model(x).dtype is torch.bfloat16 and "replaces" not in caplog.text
    hmp.remove(model)
    assert model(x).dtype is torch.float32 and torch_differences() == []
