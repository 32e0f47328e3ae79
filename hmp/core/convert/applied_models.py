"""apply() and remove(): a policy in the calls of one model, also where multiprocessing hands the model to another process."""

from __future__ import annotations

import functools
import inspect
import pickle
import types
import weakref
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ...errors import HmpError
from ..active import without_casts
from ..compiler_stance import untraced
from ..formatting import dtype_name
from ..log import caller, log, should_log
from ..patching import patches
from ..policy import DEFAULT, Policy, as_policy
from ..torch_patches import applied_policy, as_dtype, kept_weights, module_calls
from . import policy_tables
from .conversion import follow_others, module_of, resolved, revert_if_unused, unscripted
from .policy_tables import announce, lock

M = TypeVar("M", bound=torch.nn.Module)
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# Whose low-precision weights the log has named. revert() keeps the modules: to apply to one again needs no second warning.
_warned: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_warned_lines: set[tuple[str, int]] = set()


@untraced
def apply(
    model: M,
    policy: Policy | str | Path = DEFAULT,
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
    marked = module_calls.inside_compiled(unscripted(model, "apply()"))
    steps = _steps(marked)
    others = _others(marked, steps if methods is None else methods)
    with lock:
        follow_others()
        table = resolved(chosen, model, None, verbose) if chosen.scoped else policy_tables.table_of(chosen, verbose)
        kept = module_calls.kept(marked)
        module_calls.unmark(marked)
        module_calls.mark(marked, table, returned, others)
        kept_weights.keep(marked, kept)
        _send_with_policies()
        if steps:  # self.log() in a step multiplies and adds, for an average
            log_metric = type(marked).log
            patches.rebind(type(marked), "log", functools.wraps(log_metric)(without_casts(log_metric)))
    _warn_of_low_weights(marked)
    if verbose:
        announce(chosen)
    return model


def _steps(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the steps of a LightningModule that its class defines: a Trainer calls these and not the module."""
    classes = type(model).__mro__
    for at, cls in enumerate(classes):
        if cls.__name__ == "LightningModule" and cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
            return tuple(name for name in _STEPS if any(name in vars(each) for each in classes[:at]))
    return ()


def _warn_of_low_weights(model: torch.nn.Module) -> None:
    """Log that the optimizer loses small updates of low-precision weights: once for a model, and for a line that applies to several."""
    lows = [each for each in model.parameters() if each.requires_grad and each.dtype in (torch.bfloat16, torch.float16)]
    line = caller()
    if not lows or model in _warned or line in _warned_lines or not should_log():
        return
    _warned.update(model.modules())
    _warned_lines.add(line)
    patches.on_restore(_warned_lines.clear)
    log.warning(
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
    marked = module_calls.inside_compiled(module_of(model, "remove()"))
    with lock:
        module_calls.unmark(marked)
        revert_if_unused()
    return model


def keep_float32(model: torch.nn.Module, globs: tuple[str, ...]) -> None:
    """Have `.to(torch.bfloat16)`, `.half()` and `.bfloat16()` leave the float32 weights whose names match, while the model has a policy."""
    with lock:
        kept_weights.keep(module_calls.inside_compiled(model), globs)


def _send_with_policies() -> None:
    """Have multiprocessing send modules with the policy that is applied to them. Other pickles, and so files, have none."""

    def reducer_override(self: Any, value: Any) -> Any:
        if module_calls.applied(module_calls.inside_compiled(value)) is None or type(value) in self.dispatch_table:  # the user's own
            return NotImplemented
        return _sent(value)

    patches.rebind(ForkingPickler, "reducer_override", reducer_override)


def _sent(model: torch.nn.Module) -> Any:
    reduced: Any = model.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    policy, mark = applied_policy(model), module_calls.applied(module_calls.inside_compiled(model))
    if policy is None or mark is None:
        return reduced
    function, arguments, state, items, pairs = [*reduced, None, None, None][:5]
    sent = _Sent(module_calls.without_mark(state), policy, mark.outputs, mark.methods, mark.kept)
    return function, tuple(map(module_calls.without_mark, arguments)), sent, items, pairs, _arrive


class _Sent(NamedTuple):
    """The state of a model that goes to another process, what was given to `apply()`, and the weights that stay float32."""

    state: Any
    policy: Policy
    outputs: torch.dtype | None
    methods: tuple[str, ...]
    kept: tuple[str, ...]


def _arrive(model: torch.nn.Module, sent: _Sent) -> None:
    """Set the state of a model that another process sent, and apply the policy: the modules that scoped entries match are there now."""
    if sent.state is not None:
        model.__setstate__(sent.state)
    module_calls.drop_lost_marks(model)
    _warned.add(model)  # the process that sent it has logged
    apply(model, sent.policy, outputs=sent.outputs, methods=sent.methods)
    keep_float32(model, sent.kept)
