"""apply() and remove(): a policy in the calls of one model, also where multiprocessing hands the model to another process."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.fx

from ..errors import HmpError
from . import tables
from .active.regions import without_casts
from .active.state import PolicyTable
from .casting import LOW, dtype_name
from .compiler_stance import untraced
from .convert import follow_others, module_of, resolved, revert_if_unused, unscripted
from .log import log_once
from .patching import patches
from .policy.policy import Policy, as_policy
from .tables import announce, lock
from .torch_patches import module_calls
from .torch_patches.module_calls import AppliedPolicy, as_dtype

M = TypeVar("M", bound=torch.nn.Module)
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


@untraced
def apply(
    model: M,
    policy: Policy | str | Path = "autocast",
    *,
    dtype: torch.dtype | str | None = None,
    outputs: torch.dtype | str | None = None,
    methods: Iterable[str] | None = None,
    verbose: bool = False,
) -> M:
    """Run every call of a model under a policy. Code outside its calls is not cast. `hmp.remove(model)` undoes it.

    This works through `model(...)`, not through a direct `model.forward(...)`. A deep copy of the model has the policy, too, and so has the
    model in a process that multiprocessing sends it to. A saved file has none; loading it gives a warning. torch is patched as long as a
    model has a policy.

    Args:
        model: The model, on its device already.
        policy: A policy, a preset's name or a folder of lists. The default is "autocast": the lists of torch.autocast for the device of
            the model's parameters, in bfloat16 if that device has instructions for it, else in float16. Scoped entries
            (`softmax @ decoder.*`) match the modules that the model has now, in calls inside calls of the model.
        dtype: The low-precision dtype, torch.bfloat16 or torch.float16; None takes that of the policy.
        outputs: A dtype such as "float32", to which the floating-point tensors that a call returns are cast, also in nested lists, tuples,
            dicts and dataclasses; float64 and integers stay. Use it if a loss, numpy or an op without a low-precision kernel follows.
            Outputs of the model's layers are not cast. None casts none.
        methods: The methods of the model's class that run under the policy when they are called directly, such as "encode". None is
            "forward" and, of a LightningModule, "training_step", "validation_step", "test_step" and "predict_step", which its Trainer
            calls. Generator and coroutine functions are not supported.
        verbose: Log the policy, and each distinct cast once.

    Returns:
        The model itself.

    Raises:
        OpListError: There is no such policy, or its lists cannot be used.
        HmpError: `model` is not a torch.nn.Module or is a scripted one, its class has no such method, or `dtype` is another dtype.

    Example:
        >>> model = hmp.apply(torch.nn.Linear(4, 2), "habana", outputs="float32")
        >>> model(torch.ones(1, 4)).dtype
        torch.float32
    """
    if not isinstance(model, torch.nn.Module):
        raise HmpError(f"hmp.apply() expected a torch.nn.Module, got {type(model).__name__}; for a function use @hmp.casts(policy)")
    chosen, returned = as_policy(policy, model, dtype), as_dtype(outputs)
    called = module_calls.inside_compiled(unscripted(model, "apply()"))
    before = module_calls.applied_policy(called)
    others = _others(called, _steps(type(called)) if methods is None else methods)
    give(model, chosen, returned, others, verbose)
    if before is not None and before != chosen:
        new, old = (f"{each.name!r} in {dtype_name(each.dtype)}" for each in (chosen, before))
        kind = type(called).__name__
        log_once("hmp.apply() of %s replaces the policy %s of a %s; to mean it, call hmp.remove(model) first", new, old, kind)
    _warn_of_low_weights(called)
    if verbose:
        announce(chosen)
    return model


def give(model: torch.nn.Module, policy: Policy, outputs: torch.dtype | None, methods: tuple[str, ...], is_verbose: bool = False) -> None:
    """Give the model the policy, whatever it had before."""
    called = module_calls.inside_compiled(model)
    with lock:
        follow_others()
        table = resolved(policy, model, None, is_verbose) if policy.scoped else tables.table_of(policy, is_verbose)
        module_calls.attach(called, table, outputs, methods)
        _log_without_casts(type(called))


def _steps(kind: type) -> tuple[str, ...]:
    """Return the steps that a LightningModule's class defines: a Trainer calls these and not the module."""
    classes = kind.__mro__
    for at, cls in enumerate(classes):
        if cls.__name__ == "LightningModule" and cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
            return tuple(name for name in _STEPS if any(name in vars(each) for each in classes[:at]))
    return ()


def _log_without_casts(kind: Any) -> None:
    """Have self.log() in a step of a LightningModule run with casts off: it multiplies and adds, for an average."""
    if _steps(kind):
        patches.rebind(kind, "log", functools.wraps(kind.log)(without_casts(kind.log)))


def _warn_of_low_weights(model: torch.nn.Module) -> None:
    """Log that the optimizer loses small updates of low-precision weights."""
    lows = [each for each in model.parameters() if each.requires_grad and each.dtype in LOW]
    if not lows:
        return
    log_once(
        "%d trainable weights of %s are in %s, which loses small updates: of bfloat16 weights around 0.2, a step of AdamW with lr=2.5e-5 "
        "changes 3 %%; to fix: train float32 weights, model.float(), which hmp casts in each call",
        len(lows),
        type(model).__name__,
        dtype_name(lows[0].dtype),
    )


def _others(model: torch.nn.Module, methods: Iterable[str]) -> tuple[str, ...]:
    """Return the methods besides `forward` that run under the policy; raise HmpError for a name without a method in the model's class."""
    if isinstance(methods, str):
        raise HmpError(f"apply(methods=...) expected names of methods, got the string {methods!r}; write ('forward', {methods!r})")
    names = tuple(name for name in dict.fromkeys(methods) if name != "forward")
    for name in names:
        method = inspect.getattr_static(type(model), name, None) if isinstance(name, str) else None
        kind = type(model).__name__
        if not isinstance(method, types.FunctionType) or name.startswith("__"):
            raise HmpError(f"apply(methods=...) expected methods that {kind} defines in Python, got {name!r}; leave it out")
        if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise HmpError(f"apply(methods=...) expected a plain method, got the generator {kind}.{name}; use hmp.casts(policy) in it")
    return names


@untraced
def remove(model: M) -> M:
    """Remove the policy of a model that `hmp.apply()` gave it. A call that is running keeps it until it ends.

    If it was the last policy, torch is no longer patched: no other model has one, the process is not converted, and no `hmp.casts()` was
    entered since `hmp.revert()`.

    Args:
        model: The model, with or without a policy.

    Returns:
        The model itself.

    Raises:
        HmpError: `model` is not a torch.nn.Module.

    Example:
        >>> model = hmp.apply(torch.nn.Linear(4, 2), "habana")
        >>> hmp.remove(model)(torch.ones(1, 4)).dtype
        torch.float32
    """
    called = module_calls.inside_compiled(module_of(model, "remove()"))
    dtypes = {each.dtype for each in called.parameters()}
    if module_calls.applied(called) is not None and torch.float32 in dtypes and (low := dtypes.intersection(LOW)):
        said = "%s has weights in %s beside float32 ones, as cast_weights() leaves them: remove() does not undo that, model.float() does"
        log_once(said, type(called).__name__, " and ".join(map(dtype_name, low)))
    with lock:
        module_calls.detach(called)
        revert_if_unused()
    return model


# --- models in other processes: multiprocessing sends the policies, which other pickles, and so files, do not have ----------------


def _send(found: AppliedPolicy) -> tuple[Any, ...]:
    if issubclass(found.kind, torch.fx.GraphModule):
        raise HmpError("expected a module without a policy, got a torch.fx.GraphModule with one; send it first, then call hmp.apply()")
    sent = found.kind, found.applied, dict(found.scoped.items()), found.outputs, found.methods, found.kept
    return _receive, (sent, () if found.applied is None else found.applied.parts)


def _receive(sent: tuple[Any, ...], parts: tuple[PolicyTable, ...]) -> AppliedPolicy:
    """Return the policy of a module that is being loaded, whose class activates it from now on."""
    found = AppliedPolicy(*sent)
    with lock:
        follow_others()
        module_calls.follow_class(found.kind, found.methods, found.kept)
        if found.applied is not None:
            found.applied.parts = parts
            _log_without_casts(found.kind)
    return found


def _send_table(table: PolicyTable) -> tuple[Any, ...]:
    return tables.scoped_table, (table.user_policy, table.policy, table.scope_id)


ForkingPickler.register(AppliedPolicy, _send)
ForkingPickler.register(PolicyTable, _send_table)
