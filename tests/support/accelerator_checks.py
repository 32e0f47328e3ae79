"""What test_accelerator.py runs in a process of its own, on tensors of the device that python_device.py makes."""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import hmp
from hmp import torch_private
from hmp.context import state
from op_table import BF16_LIST, FP32_LIST, Op
from oracle import assert_identical, flat, tensors
from python_device import NAME, on_main_thread, set_up, to_cpu, to_device
from seen_in_backward import Seen
from strategies import build
from trap_kit import policy, refused, same

LOW, WIDE = torch.bfloat16, torch.float32
OTHER = policy(bf16=["softmax"], fp32=["matmul", "mul"])
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def device(*shape: int, dtype: torch.dtype = WIDE, grad: bool = False) -> torch.Tensor:
    return to_device(torch.randn(*shape).to(dtype).requires_grad_(grad))


# --- user Python in backward, on the device's thread

EVERYWHERE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "convert": hmp.convert,
    "casts": lambda: hmp.casts("habana"),
    "another policy": lambda: hmp.casts(OTHER),
    "nowhere": nullcontext,
}


def noting(seen: Seen) -> Callable[[torch.Tensor], torch.Tensor]:
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.note()
            return gradient

    return Identity.apply


def loss_with_hooks(seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss whose backward runs user Python in five places, and the leaf."""
    x, w = device(2, 3, grad=True), device(3, 3, grad=True)
    w.register_post_accumulate_grad_hook(seen.note)
    hidden = noting(seen)(torch.matmul(x, w))
    hidden.register_hook(seen.note)
    hidden.grad_fn.register_prehook(seen.note)
    x.register_hook(seen.note)
    return hidden.float().sum(), x


@check
def r13_user_python_in_backward_runs_on_the_devices_thread_without_casts() -> None:
    for where in EVERYWHERE.values():
        seen = Seen()
        with where():
            loss, x = loss_with_hooks(seen)
            loss.backward()
        seen.assert_without_casts(5)
        assert x.grad.dtype is WIDE
        hmp.revert()


@check
def r13_it_does_so_when_backward_is_called_outside_or_under_other_casts() -> None:
    for around in (nullcontext, lambda: hmp.casts(OTHER), hmp.disable_casts, hmp.convert):
        seen = Seen()
        with hmp.casts("habana"):
            loss, _ = loss_with_hooks(seen)
        with around():
            loss.backward()
        seen.assert_without_casts(5)
        hmp.revert()


# Where torch leaves the context of the thread that called backward() for autograd's threads.
when_told = check if "_stash_obj_in_tls" in torch_private.run_backward.__code__.co_names else lambda function: function


@when_told
def r13_user_python_in_backward_may_switch_its_callers_casts_on() -> None:
    found = []

    def hook(gradient: torch.Tensor) -> None:
        with hmp.enable_casts():
            found.append((hmp.casts_enabled(), torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype))
        found.append((hmp.casts_enabled(), None))

    x = device(2, 2, grad=True)
    x.register_hook(hook)
    with hmp.convert(policy=policy(fp32=["relu"])), hmp.casts("habana"):
        (x * 1).float().sum().backward()
    assert found == [(True, LOW), (False, None)], found


@when_told
def r13_it_may_do_so_after_a_backward_of_its_own() -> None:
    """torch no longer tells the thread, then, where backward was called."""
    found = []

    @torch.enable_grad()
    def hook(gradient: torch.Tensor) -> None:
        device(2, 2, grad=True).sum().backward()
        with hmp.enable_casts():
            found.append(torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype)

    for region, want in ((hmp.casts("habana"), LOW), (hmp.casts(policy(bf16=["softmax"])), WIDE), (hmp.casts("habana"), LOW)):
        x = device(2, 2, grad=True)
        x.register_hook(hook)
        with region:
            (x * 1).sum().backward()
        assert found.pop() is want


@check
def r13_it_may_do_so_where_torch_does_not_tell_the_thread_its_callers_context() -> None:
    """torch 2.11 and others."""
    with mock.patch.object(state, "_has_in_thread", return_value=False):
        r13_user_python_in_backward_may_switch_its_callers_casts_on()


@check
def r13_a_backward_inside_a_hook_leaves_the_thread_without_casts() -> None:
    seen = Seen()

    @torch.enable_grad()
    def nested(gradient: torch.Tensor) -> None:
        inner = device(2, 2, grad=True)
        inner.register_hook(seen.note)
        torch.matmul(inner, inner).float().sum().backward()
        seen.note()

    hmp.convert()
    x = device(2, 2, grad=True)
    hidden = torch.relu(x)
    hidden.register_hook(nested)
    hidden.register_hook(seen.note)
    x.register_hook(seen.note)
    hidden.float().sum().backward()
    seen.assert_without_casts(4)
    loss, _ = loss_with_hooks(later := Seen())
    loss.backward()
    later.assert_without_casts(5)


@check
def r13_a_backward_that_no_python_function_starts_runs_without_casts() -> None:
    hmp.convert()
    seen = Seen()
    loss, _ = loss_with_hooks(seen)
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    seen.assert_without_casts(5)
    loss, _ = loss_with_hooks(later := Seen())
    loss.backward()
    later.assert_without_casts(5)


# --- recomputed checkpoints


class Block:
    """A block that notes where it runs and the dtypes that it computes in."""

    def __init__(self) -> None:
        self.w = device(3, 3, grad=True)
        self.x = device(2, 3, grad=True)
        self.runs: list[tuple[bool, torch.dtype, torch.dtype]] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.matmul(x, self.w)
        z = torch.softmax(y, -1)
        self.runs.append((on_main_thread(), y.dtype, z.dtype))
        return y * z

    def gradients(self) -> list[torch.Tensor]:
        found = [to_cpu(self.x.grad), to_cpu(self.w.grad)]
        self.x.grad = self.w.grad = None
        return found


def elsewhere(loss: torch.Tensor) -> None:
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


@check
def r14_a_checkpoint_is_recomputed_on_the_devices_thread_as_its_forward_ran() -> None:
    dtypes = {"convert": (LOW, WIDE), "casts": (LOW, WIDE), "another policy": (WIDE, LOW), "nowhere": (WIDE, WIDE)}
    for name, where in EVERYWHERE.items():
        for reentrant in (True, False):
            for backward in (
                torch.Tensor.backward,
                hmp.disable_casts(torch.Tensor.backward),
                hmp.casts(OTHER)(torch.Tensor.backward),
                elsewhere,
            ):
                block = Block()
                with where():
                    block(block.x).float().sum().backward()
                    expected, _ = block.gradients(), block.runs.clear()
                    backward(checkpoint(block, block.x, use_reentrant=reentrant).float().sum())
                assert block.runs == [(True, *dtypes[name]), (False, *dtypes[name])], (name, block.runs)
                for ours, theirs in zip(block.gradients(), expected, strict=True):
                    same(ours, theirs)
                hmp.revert()


@check
def r14_a_checkpoint_inside_an_applied_model_is_recomputed_as_its_forward_ran() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(block, x, use_reentrant=False)

    block, seen = Block(), Seen()
    block.x.register_hook(seen.note)
    hmp.apply(Model(), "habana")(block.x).float().sum().backward()
    assert block.runs == [(True, LOW, WIDE), (False, LOW, WIDE)], block.runs
    seen.assert_without_casts(1)


@check
def r14_threads_with_policies_of_their_own_share_the_devices_thread() -> None:
    blocks = {"habana": Block(), "other": Block()}
    start = threading.Barrier(2)

    def train(name: str) -> None:
        block = blocks[name]
        for _ in range(10):
            with hmp.casts("habana" if name == "habana" else OTHER):
                loss = checkpoint(block, block.x, use_reentrant=False).float().sum()
            start.wait()
            loss.backward()

    threads = [threading.Thread(target=train, args=(name,)) for name in blocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert blocks["habana"].runs == [(False, LOW, WIDE)] * 20, blocks["habana"].runs
    assert blocks["other"].runs == [(False, WIDE, LOW)] * 20, blocks["other"].runs


# --- the rules, with values


def results_and_gradients(call: Callable[..., Any], args: list[Any]) -> list[Any]:
    torch.manual_seed(3)  # random ops draw the same on either device
    results = [t for t in flat(call(*args)) if isinstance(t, torch.Tensor)]
    ends, leaves = [r for r in results if r.requires_grad], [t for t in tensors(args) if t.requires_grad]
    if not ends or not leaves:
        return results
    return [*results, *torch.autograd.grad(ends, leaves, [torch.ones_like(e) for e in ends], allow_unused=True)]


def agree(call: Callable[..., Any], args: list[Any], what: str) -> None:
    """The call gives on the device what it gives on the CPU under the same policy, gradients and the inputs afterwards included."""
    on_device = pytree.tree_map(lambda a: to_device(a) if isinstance(a, torch.Tensor) else a, args)
    expected = [*results_and_gradients(call, args), *tensors(args)]
    got = [*results_and_gradients(call, on_device), *tensors(on_device)]
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one is None or one.device.type == NAME, (what, number)
        if one is not None or other is not None:
            assert_identical(to_cpu(one).detach().clone(), other.detach().clone(), f"{what} {number}")


def _agree_at_all_sites(ops: list[Op]) -> None:
    for op in ops:
        for label, call in op.sites.items():
            with hmp.casts("habana"):
                agree(call, [build(a) for a in op.args], f"{op.name} {label}")


@check
def r1_ops_of_the_bf16_list_give_what_they_give_on_the_cpu() -> None:
    _agree_at_all_sites(BF16_LIST)


@check
def r2_ops_of_the_fp32_list_give_what_they_give_on_the_cpu() -> None:
    _agree_at_all_sites(FP32_LIST)


@check
def r3_r5_r7_r12_ops_give_what_they_give_on_the_cpu() -> None:
    low, wide = torch.randn(3, 3).to(LOW), torch.randn(3, 3)
    mask = torch.full((3, 3), torch.finfo(WIDE).min).triu(1)
    index, rows = torch.tensor([0, 2]), torch.randn(2, 3)
    # looked up at the call: hmp does not reach a function taken before it was there
    calls: dict[str, tuple[Callable[..., Any], list[Any]]] = {
        "R3 cat": (lambda a, b: torch.cat([a, b]), [low, wide]),
        "R3 baddbmm": (lambda a, b, c: torch.baddbmm(a, b, c), [wide[None], low[None], low[None]]),
        "R5 add_": (lambda a, b: a.clone().add_(b), [low, wide]),
        "R5 addmm_": (lambda a, b: a.clone().addmm_(b, b), [wide, low]),
        "R5 setitem": (lambda a, b: a.__setitem__(0, b[0]), [low, wide]),
        "R7 index_add": (lambda a, b, i: a.index_add(0, i, b), [low, rows, index]),
        "R12 masked_fill": (lambda a: a.masked_fill(a > 0, torch.finfo(WIDE).min), [low]),
        "R12 mask": (lambda a, m: torch.softmax(a + m, -1), [low, mask]),
        "R12 product": (lambda a: (1.0 - a) * torch.finfo(WIDE).min, [low]),
    }
    with hmp.casts("habana"):
        for name, (call, args) in calls.items():
            agree(call, args, name)


@check
def r6_a_result_arrives_in_out() -> None:
    out = device(2, 2)
    with hmp.casts("habana"):
        assert torch.matmul(device(2, 2), device(2, 2), out=out) is out
    assert out.dtype is WIDE and out.device.type == NAME


@check
def r9_running_statistics_and_parameters_keep_their_dtype_and_move() -> None:
    args = [torch.randn(4, 3, 5), torch.zeros(3), torch.ones(3), torch.rand(3).requires_grad_(), torch.rand(3).requires_grad_()]
    with hmp.casts("habana"):
        agree(lambda x, mean, var, w, b: F.batch_norm(x, mean, var, w, b, training=True), args, "batch_norm")
    assert bool(args[1].any()) and args[1].dtype is WIDE


@check
def r10_writing_into_a_cast_view_raises() -> None:
    x = device(2, 3)
    with hmp.casts("habana"):
        refused(lambda: x.t().add_(1))
        refused(lambda: x.t().__setitem__(0, 0.0))


@check
def r11_an_op_without_a_kernel_runs_in_float32_known_or_learnt() -> None:
    x = torch.randn(4, 4).to(LOW)
    with hmp.casts("habana"):
        agree(lambda a: torch.linalg.inv(a), [x + 4 * torch.eye(4)], "inv")
        agree(lambda a: torch.special.bessel_j0(a), [x], "bessel_j0")
        # the CPU's table is no other device's: learnt there
        assert F.avg_pool3d(to_device(x[None, None]), (1, 2, 2)).dtype is WIDE
        assert "avg_pool3d" in hmp.fallbacks()


@check
def r17_autocast_of_the_device_is_answered_for_and_its_disabled_region_acts_as_disable_casts() -> None:
    x = device(2, 2)
    with hmp.casts("habana"):
        assert torch.is_autocast_enabled(NAME) and torch.get_autocast_dtype(NAME) is LOW
        with torch.autocast(NAME, enabled=False):
            assert torch.matmul(x, x).dtype is WIDE
        assert torch.matmul(x, x).dtype is LOW


def main() -> None:
    """Runs every check, and prints what failed by name as JSON."""
    torch.set_num_threads(1)
    set_up()
    failed = {}
    for name, function in CHECKS.items():
        torch.manual_seed(0)
        try:
            function()
        except BaseException:
            failed[name] = traceback.format_exc()
        hmp.revert()
    print(json.dumps(failed), flush=True)
    os._exit(0)  # the device's thread ends with the process, not before it


if __name__ == "__main__":
    main()
