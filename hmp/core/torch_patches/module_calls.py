"""Policies on modules: an AppliedPolicy in a module's `__dict__`, and a `_call_impl` on its class that activates it in calls.

Replicas and copies of a module have it too, and what multiprocessing sends. A file has none, so that it can be loaded where hmp is not
installed; loading it warns.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import secrets
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch

from ...errors import HmpError
from ..active import Off, PolicyTable, autocast, state
from ..casting import castable, dtype_name, map_tensors
from ..patching import patches
from ..torch_private import CALL_OF_MODULES, DYNAMOS_MODULES, dynamo, is_any_autocast_enabled, tell_dynamo_of_call_impl
from . import late_imports

APPLIED = "_hmp_applied"
_compiling = torch.compiler.is_dynamo_compiling  # torch's own, taken before anything is patched


class AppliedPolicy:
    """The policies that calls of one module activate.

    Args:
        module: The module.
        applied: The policy of `apply()`, which every call of the module activates; None without one.
        scoped: The policies that scoped entries (`softmax @ decoder.*`) give the module, by scope id: a call activates one if the policy
            active around the call has its scope id. They last as long as that policy (see `keep_parts`).
        outputs: The dtype of what a call returns; None as it is.
        methods: Calls of these methods activate `applied` too.
        kept: Globs of the weights that stay float32 (see `kept_weights`).
    """

    __slots__ = ("__weakref__", "applied", "kept", "key", "methods", "module", "outputs", "scoped")

    def __init__(
        self,
        module: torch.nn.Module,
        applied: PolicyTable | None,
        scoped: Mapping[int, PolicyTable],
        outputs: torch.dtype | None = None,
        methods: tuple[str, ...] = (),
        kept: tuple[str, ...] = (),
    ) -> None:
        self.applied, self.outputs, self.methods, self.kept = applied, outputs, methods, kept
        self.scoped = weakref.WeakValueDictionary(scoped)
        # what code of torch.compile's is guarded on: modules with equal keys activate the same policies
        self.key = (_number(applied), outputs, methods, *((scope, _number(table)) for scope, table in sorted(self.scoped.items())))
        self.module = weakref.ref(module)
        _all.add(self)

    def of(self, module: torch.nn.Module) -> AppliedPolicy:
        """Return the same for another module."""
        return AppliedPolicy(module, self.applied, self.scoped, self.outputs, self.methods, self.kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> AppliedPolicy | None:
        # copy.deepcopy notes the new module before it copies the module's __dict__
        copied = memo.get(id(self.module()))
        if copied is None:
            return None
        follow_class(type(copied))  # a torch.fx.GraphModule has a class of its own, and copies of its attributes what its graph names
        made = vars(copied)[APPLIED] = self.of(copied)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        if self.applied is None or self.applied.user_policy is None:
            return type(None), ()
        # Python's own function, which returns None: the file may be loaded where hmp is not
        return warnings.warn, (
            f"the policy {self.applied.user_policy.name!r} was applied to this model when it was saved, but the file does not contain "
            "it; apply it again: hmp.apply(model, policy)",
        )


_all: weakref.WeakSet[AppliedPolicy] = weakref.WeakSet()
_numbers: weakref.WeakKeyDictionary[PolicyTable, int] = weakref.WeakKeyDictionary()  # of the policies of modules, from 1
_next_number = functools.partial(next, itertools.count(1))
_parts: weakref.WeakKeyDictionary[PolicyTable, tuple[PolicyTable, ...]] = weakref.WeakKeyDictionary()
_changes = 0
# Returns a new scope id; each model for which a policy's scoped entries are resolved has one, which it takes to other processes.
new_scope_id = functools.partial(secrets.randbits, 62)


def _number(table: PolicyTable | None) -> int:
    return 0 if table is None else _numbers.setdefault(table, _next_number())


def keep_parts(table: PolicyTable, parts: Iterable[PolicyTable]) -> None:
    """Keep what scoped entries give the modules of a model as long as `table`, the policy around their calls."""
    _parts[table] = tuple(each for each in parts if each is not table)


def parts(table: PolicyTable | None) -> tuple[PolicyTable, ...]:
    """Return what `keep_parts` was given for `table`."""
    return () if table is None else _parts.get(table, ())


def changes() -> int:
    """Return how often a module got or lost a policy: code of torch.compile's is guarded on this number."""
    return _changes


def _of(module: torch.nn.Module) -> AppliedPolicy:
    return vars(module).get(APPLIED) or AppliedPolicy(module, None, {})


def attach(module: torch.nn.Module, table: PolicyTable, outputs: torch.dtype | None = None, methods: tuple[str, ...] = ()) -> None:
    """Have `table` active during every call of `module`, of its `methods` and of its copies, which gives `outputs`."""
    follow(module, methods)
    found = _of(module)
    _put(AppliedPolicy(module, table, found.scoped, outputs, methods, found.kept))


def attach_scoped(module: torch.nn.Module, table: PolicyTable) -> None:
    """Have `table` active during those calls of `module` that are made where a policy of the same scope id is active."""
    begin_outermost_calls()  # before its class's call is wrapped: most modules of the model have no entries, and convert() may use it
    follow(module)
    found = _of(module)
    _put(AppliedPolicy(module, found.applied, {**found.scoped, table.scope_id: table}, found.outputs, found.methods, found.kept))


def keep(module: torch.nn.Module, globs: tuple[str, ...]) -> None:
    """Note the globs of the weights that stay float32 as long as a policy is applied to the module."""
    found = applied(module)
    if found is not None:
        _put(AppliedPolicy(module, found.applied, found.scoped, found.outputs, found.methods, globs))


def _put(new: AppliedPolicy) -> None:
    module: Any = new.module()
    if new.applied is not None or new.scoped:
        vars(module)[APPLIED] = new
    else:
        vars(module).pop(APPLIED, None)
    _count_change()


def _count_change() -> None:
    global _changes
    _changes += 1


def follow(module: torch.nn.Module, methods: Iterable[str] = ()) -> None:
    """Patch the module's class, so that calls of its modules, and of these methods, activate their policies.

    Raises:
        HmpError: The class's `__call__` isn't a Python function.
    """
    cls: Any = type(module)
    follow_class(cls, methods)
    if module._compiled_call_impl is not None:  # what module.compile() made of `_call_impl`, maybe before it was patched
        patches.rebind(cls, "__call__", _activating(cls.__call__))


def follow_class(cls: Any, methods: Iterable[str] = ()) -> None:
    """Patch a class, so that calls of its modules, and of these methods, activate their policies."""
    for name in methods:
        patches.rebind(cls, name, _activating(getattr(cls, name), name))
    # a lazy module's class changes at its first call
    for each in (cls, getattr(cls, "cls_to_become", None) or cls):
        patches.rebind(each, "__setstate__", _adopting(each.__setstate__))
        owner = next(base for base in each.__mro__ if "__call__" in vars(base))
        own_call = vars(owner)["__call__"]
        if getattr(own_call, "__module__", "").startswith("torch."):  # torch's own `__call__` methods call _call_impl
            patches.rebind(each, "_call_impl", _activating(each._call_impl, inside_call=True))
        elif isinstance(own_call, types.FunctionType):
            patches.rebind(owner, "__call__", _activating(own_call, own_call=True))
        else:
            raise HmpError(f"apply() can't wrap {owner.__name__}.__call__, a {type(own_call).__name__}; make it a plain method")


def _adopting(set_state: Callable[..., None]) -> Callable[..., None]:
    """Return a `__setstate__` after which the module has an AppliedPolicy of its own, of a shallow copy or of what a process sent."""

    @functools.wraps(set_state)
    def __setstate__(self: torch.nn.Module, values: Any) -> None:
        set_state(self, values)
        found = self.__dict__.get(APPLIED, self)
        if found is None:  # what it becomes in a file
            del self.__dict__[APPLIED]
        elif isinstance(found, Sent):
            _put(AppliedPolicy(self, *found))
        elif isinstance(found, AppliedPolicy) and found.module() is not self:
            _put(found.of(self))

    return __setstate__


class Sent(NamedTuple):
    """The arguments of an AppliedPolicy, for a module that another process sent and that does not have its state yet."""

    applied: PolicyTable | None
    scoped: Mapping[int, PolicyTable]
    outputs: torch.dtype | None
    methods: tuple[str, ...]
    kept: tuple[str, ...]


def inside_compiled(module: Any) -> Any:
    """Return the model that torch.compile made `module` of, else `module` itself.

    It is applied to instead of `module`: torch.compile calls it directly where `module` is called in compiled code or compiled again.
    """
    imported = dynamo()
    while imported is not None and isinstance(module, imported.OptimizedModule):
        module = module._orig_mod
    return module


def applied(module: Any) -> AppliedPolicy | None:
    """Return what `apply()` gave a module; None for any other object."""
    found: AppliedPolicy | None = vars(module).get(APPLIED) if isinstance(module, torch.nn.Module) else None
    return None if found is None or found.applied is None else found


def applied_policy(module: torch.nn.Module) -> Any:
    """Return the policy that the user gave to `apply(module, policy)`; None for a module that is not applied to."""
    found = applied(inside_compiled(module))
    return None if found is None or found.applied is None else found.applied.user_policy


def detach(model: torch.nn.Module) -> None:
    """Undo `attach`; does nothing without it."""
    found = applied(model)
    if found is not None:
        _put(AppliedPolicy(model, None, found.scoped))


def detach_applied() -> None:
    """Undo `attach` for all models: their next calls activate nothing."""
    for each in all_applied():
        _all.discard(each)  # a copy may keep it
        module = each.module()
        if module is not None:
            detach(module)


def detach_all() -> None:
    """Take the policies off all modules, those of scoped entries too."""
    for each in list(_all):
        module = each.module()
        if module is not None:
            vars(module).pop(APPLIED, None)
    _all.clear()
    _count_change()


def all_applied() -> Iterator[AppliedPolicy]:
    """Yield what `apply()` gave modules that are alive."""
    return (each for each in list(_all) if each.applied is not None)


def policy_of_call_now(module: torch.nn.Module) -> PolicyTable | None:
    """Return the policy that a call of `module` in this thread or task makes active; None where it changes nothing."""
    return policy_of_call(module, state.current_state()) if APPLIED in module.__dict__ else None


def policy_of_call(module: torch.nn.Module, current: PolicyTable | Off) -> PolicyTable | None:
    """Return the policy that a call of `module` makes active where `current` is active; None where it changes nothing."""
    found: AppliedPolicy | None = module.__dict__.get(APPLIED)
    if found is None or current.disabled:  # disable_casts() around the call wins: inside it torch is exactly torch
        return None
    table = found.applied or found.scoped.get(current.scope_id)
    if table is None or table.policy is None:  # revert() has emptied it
        return None
    if table is current and (found.applied is None or not is_any_autocast_enabled()):
        return None
    return table


def outputs_of_call(module: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype of what a call of `module`, in which its policy is active, returns; None as it is."""
    found: AppliedPolicy | None = module.__dict__.get(APPLIED)
    return None if found is None else found.outputs


def has_method(module: torch.nn.Module, name: str) -> bool:
    """Return True if calls of the module's method activate the policy that is applied to the module."""
    found: AppliedPolicy | None = module.__dict__.get(APPLIED)
    return found is not None and name in found.methods


_look: Callable[[torch.nn.Module, bool], bool] | None = None  # what is to see the modules that are called


def is_new(module: torch.nn.Module, is_traced: bool = False) -> bool:
    """Return True if what `look_at_calls` was given found something to do for `module`, and has done it.

    `is_traced` is whether torch.compile traces the call.
    """
    return _look is not None and _look(module, is_traced)


def look_at_calls(look: Callable[[torch.nn.Module, bool], bool]) -> None:
    """Have `look` see every module that is called, until patches.restore(). Where it returns True the call begins anew."""
    global _look
    own = getattr(*CALL_OF_MODULES)
    _look = look
    patches.on_restore(_look_no_more)
    patches.rebind(*CALL_OF_MODULES, _looking(own), own)
    late_imports.after({DYNAMOS_MODULES: functools.partial(tell_dynamo_of_call_impl, own)})


def begin_outermost_calls() -> None:
    """Have the outermost call of a module, in each thread, be one in which copies of casts are used again, until patches.restore()."""
    own = getattr(*CALL_OF_MODULES)
    if getattr(own, "hmp_begins_outermost", False):
        return

    @functools.wraps(own)
    def _call_impl(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _compiling() or (outermost := state.begin_outermost()) is None:
            return own(self, *args, **kwargs)
        try:
            if state.current_state() is state.PROCESS and state.PROCESS.policy is not None:
                return state.call_under(state.process_table, own, self, *args, **kwargs)
            return own(self, *args, **kwargs)
        finally:
            outermost.end()

    _call_impl.hmp_begins_outermost = True  # type: ignore[attr-defined]
    patches.rebind(*CALL_OF_MODULES, _call_impl, own)
    # to Dynamo it is torch's own, which it skips where a module has no hooks
    late_imports.after({DYNAMOS_MODULES: functools.partial(tell_dynamo_of_call_impl, _call_impl)})
    patches.on_restore(functools.partial(tell_dynamo_of_call_impl, own))


def _look_no_more() -> None:
    global _look
    _look = None


def _looking(call_impl: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call_impl)
    def _call_impl(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_new(self):
            followed: Any = self
            return followed._call_impl(*args, **kwargs)  # its class's, which activates policies now
        return call_impl(self, *args, **kwargs)

    return _call_impl


def _activating(
    call_impl: Callable[..., Any], method: str = "", *, own_call: bool = False, inside_call: bool = False
) -> Callable[..., Any]:
    """Return `call_impl`, or the `method` of that name, which activates the policy of its module.

    What is called `inside_call`, by a class's `own_call` that does so, leaves it at that: a context in between wins.
    """
    if getattr(call_impl, "hmp_activates", False):
        return call_impl  # a base class's

    @functools.wraps(call_impl)
    def _call_impl(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if method and not has_method(self, method):
            return call_impl(self, *args, **kwargs)
        table = policy_of_call_now(self)
        if table is None or (inside_call and getattr(type(self).__call__, "hmp_is_own_call", False)):
            return call_impl(self, *args, **kwargs)
        outputs = outputs_of_call(self)  # before the call, in which remove() may be called
        result = autocast.call_innermost(table, call_impl, self, *args, **kwargs)
        return result if outputs is None else in_dtype(result, outputs)

    _call_impl.hmp_activates = True  # type: ignore[attr-defined]
    _call_impl.hmp_is_own_call = own_call  # type: ignore[attr-defined]
    return _call_impl


# The code of every function that activates the policy of a module; its local variable `self` is the module.
CALL: types.CodeType = next(
    constant for constant in _activating.__code__.co_consts if isinstance(constant, types.CodeType) and constant.co_name == "_call_impl"
)


# --- what a model returns, in one dtype: `apply(model, outputs="float32")` ------------------------------------------------------


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def as_dtype(outputs: Any) -> torch.dtype | None:
    """Return the dtype that `outputs=` names. Raise HmpError for any dtype that outputs cannot have."""
    for dtype in _DTYPES:
        if outputs is dtype or (isinstance(outputs, str) and outputs.removeprefix("torch.") == dtype_name(dtype)):
            return dtype
    if outputs is None:
        return None
    raise HmpError(f"outputs= expected None or one of {', '.join(map(dtype_name, _DTYPES))}, got {outputs!r}")


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with its float32, bfloat16 and float16 tensors in `dtype`.

    Also those in lists, tuples, dicts, other mappings and dataclasses, of which `dataclasses.replace()` makes a new one. What holds none of
    another dtype is returned itself. A tensor that occurs twice is cast once.
    """
    casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: with the tensor, so that it lives as long

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if not castable(tensor):
            return tensor
        if id(tensor) not in casts:
            casts[id(tensor)] = tensor, tensor.to(dtype)
        return casts[id(tensor)][1]

    def others(found: Any) -> Any:
        if dataclasses.is_dataclass(found) and not isinstance(found, type):
            fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
            changed = {name: new for name, old in fields.items() if (new := map_tensors(old, one, others)) is not old}
            return dataclasses.replace(found, **changed) if changed else found
        if isinstance(found, MutableMapping):
            items = {key: new for key, old in found.items() if (new := map_tensors(old, one, others)) is not old}
            copied = copy.copy(found) if items else found
            for key, new in items.items():
                copied[key] = new
            return copied
        return found

    return map_tensors(value, one, others)
