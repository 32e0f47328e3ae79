"""apply() and remove(): a policy in the calls of one model, also where multiprocessing hands the model to another process."""

from __future__ import annotations

import functools
import inspect
import pickle
import types
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ...errors import HmpError
from ..patching import patches
from ..policy import DEFAULT, Policy, as_policy
from ..torch_patches import applied_policy, as_dtype, module_calls
from . import policy_tables
from .conversion import follow_others, module_of, resolved, revert_if_unused, unscripted
from .policy_tables import lock
from .verbose import announce

M = TypeVar("M", bound=torch.nn.Module)


def apply(
    model: M,
    policy: Policy | str | Path = DEFAULT,
    *,
    outputs: torch.dtype | str | None = None,
    methods: Iterable[str] = ("forward",),
    verbose: bool = False,
) -> M:
    """`model`; every call of it runs under `policy` from now on. Nothing outside its calls is cast. Without a policy it is "autocast":
    torch.autocast's own lists for the device that the model's parameters are on, in bfloat16 where that device has instructions for it,
    else float16. So move the model first.

    Works through `model(...)`, not through a direct `model.forward(...)`, and through the other `methods` that are named, such as "encode"
    and "decode". These are plain methods of the model's class, no generator or coroutine functions. Scoped lines (`softmax @ decoder.*`)
    are resolved for the modules that the model has now; they apply to calls of these modules inside calls of the model. A deep copy of the
    model has the policy too, and so has the model in another process that multiprocessing hands it to. A file has none; loading it warns.

    `outputs` is a dtype, such as "float32": the floating tensors that a call of the model returns are cast to it, also in nested lists,
    tuples, dicts and dataclasses, as accelerate and Lightning do; float64 and integers stay. For a loss, numpy or an op without a kernel
    in the low dtype behind the model. What the model's own layers hand on is not changed. `verbose` logs the policy
    and every distinct decision once. `hmp.remove(model)` undoes it; torch is patched as long as a model has a policy.
    """
    if not isinstance(model, torch.nn.Module):
        raise HmpError(f"apply() takes a torch.nn.Module; {type(model).__name__} is none. To decorate functions use hmp.casts(policy)")
    chosen, dtype = as_policy(policy, model), as_dtype(outputs)
    marked = module_calls.inside_compiled(unscripted(model, "apply()"))
    others = _others(marked, methods)
    with lock:
        follow_others()
        table = resolved(chosen, model, None, verbose) if chosen.scoped else policy_tables.table_of(chosen, verbose)
        module_calls.unmark(marked)
        module_calls.mark(marked, table, dtype, others)
        _send_with_policy(marked)
    if verbose:
        announce(chosen)
    return model


def _others(model: torch.nn.Module, methods: Iterable[str]) -> tuple[str, ...]:
    """The methods besides `forward` that are to run under the policy. HmpError for what is no method of the model's class."""
    if isinstance(methods, str):
        raise HmpError(f"apply(methods=...) takes names of methods, such as ('forward', {methods!r}), not one string")
    names = tuple(name for name in dict.fromkeys(methods) if name != "forward")
    for name in names:
        method = inspect.getattr_static(type(model), name, None) if isinstance(name, str) else None
        kind = type(model).__name__
        if not isinstance(method, types.FunctionType) or name.startswith("__"):
            raise HmpError(f"apply(methods=...): {kind} has no method {name!r}; name methods that its class defines in Python")
        if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise HmpError(f"apply(methods=...): {kind}.{name} is a generator or coroutine function; use hmp.casts(policy) inside of it")
    return names


def remove(model: M) -> M:
    """`model`; no policy is applied to it any more. HmpError for what is no module.

    Where that was the last policy, nothing of torch is patched any more: no other model has one, nothing is converted, and no `casts()`
    was entered since `revert()`, whose regions leave torch patched.
    """
    marked = module_calls.inside_compiled(module_of(model, "remove()"))
    with lock:
        module_calls.unmark(marked)
        revert_if_unused()
    return model


def _send_with_policy(model: torch.nn.Module) -> None:
    """Has multiprocessing send modules of this class with the policy that is applied to them. Other pickles, and so files, have none."""
    cls = type(model)
    reducers: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]  # register() cannot be undone
    for each in (cls, getattr(cls, "cls_to_become", None) or cls):  # a lazy module's class changes at its first call
        if each not in reducers:
            ForkingPickler.register(each, _sent)
            patches.on_restore(functools.partial(_send_as_before, each))


def _send_as_before(cls: type) -> None:
    reducers: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    if reducers.get(cls) is _sent:  # else the user has registered another one since
        del reducers[cls]


def _sent(model: torch.nn.Module) -> Any:
    reduced: Any = model.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    policy = applied_policy(model)
    if policy is None:
        return reduced
    parts = [*reduced, None, None, None][:5]
    function, arguments, state, items, pairs = parts
    arguments = tuple(map(module_calls.without_mark, arguments))
    return (
        function,
        arguments,
        _Sent(module_calls.without_mark(state), policy, module_calls.applied_outputs(model), module_calls.applied_methods(model)),
        items,
        pairs,
        _arrive,
    )


class _Sent(NamedTuple):
    """The state of a model that goes to another process, and what was given to `apply()`."""

    state: Any
    policy: Policy
    outputs: torch.dtype | None
    methods: tuple[str, ...]


def _arrive(model: torch.nn.Module, sent: _Sent) -> None:
    """Sets the state of a model that another process sent, and applies the policy: the modules that scoped lines speak of are there now."""
    if sent.state is not None:
        model.__setstate__(sent.state)
    module_calls.drop_lost_marks(model)
    apply(model, sent.policy, outputs=sent.outputs, methods=sent.methods)
