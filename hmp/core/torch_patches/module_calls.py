"""Modules whose calls activates a policy: a Mark in the module's `__dict__`, and a `_call_impl` on its class that reads it.

Replicas and copies of a module have its mark too. A pickle has none, so that it can be loaded where hmp is not installed; loading warns.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch

from ...errors import HmpError
from ..active import Off, PolicyTable, autocast, state
from ..casting import castable, map_tensors
from ..formatting import dtype_name
from ..patching import patches
from ..torch_private import CALL_OF_MODULES, DYNAMOS_MODULES, dynamo, is_any_autocast_enabled, tell_dynamo_of_call_impl
from . import late_imports

MARK = "_hmp_applied"
_compiling = torch.compiler.is_dynamo_compiling  # torch's own, taken before anything is patched


class Mark:
    """The policies that calls of a module activate.

    `applied` is the policy of `apply()`, which every call of the module activates. Where it is None, `scoped` has by scope id the
    policies that scoped entries (`softmax @ decoder.*`) give the module: a call activates one if the policy active around the call has
    its scope id.
    """

    __slots__ = ("__weakref__", "applied", "kept", "key", "methods", "module", "outputs", "scoped", "told_kept")

    def __init__(
        self,
        module: torch.nn.Module,
        applied: PolicyTable | None,
        scoped: dict[int, PolicyTable],
        outputs: torch.dtype | None = None,
        methods: tuple[str, ...] = (),
        kept: tuple[str, ...] = (),
    ) -> None:
        self.applied = applied
        self.kept, self.told_kept = kept, False  # globs of the weights that stay float32 (see `kept_weights`), and whether that was logged
        self.outputs = outputs  # the dtype of what a call returns; None as it is
        self.methods = methods  # calls of these activate `applied` too
        self.scoped = scoped
        # what code of torch.compile's is guarded on: modules with equal keys activate the same policies
        self.key = (
            _number(applied),
            outputs,
            methods,
            *(part for scope, compiled in sorted(scoped.items()) for part in (scope, _number(compiled))),
        )
        self.module = weakref.ref(module)
        _marks.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark | None:
        # copy.deepcopy notes the new module before it copies the module's __dict__
        copied = memo.get(id(self.module()))
        return None if copied is None else self.of(copied)

    def of(self, module: torch.nn.Module, scoped: dict[int, PolicyTable] | None = None) -> Mark:
        """Return a mark of `module` with the same policies, those of scoped entries replaced by `scoped` where it is given."""
        return Mark(module, self.applied, self.scoped if scoped is None else scoped, self.outputs, self.methods, self.kept)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.applied is None or self.applied.user_policy is None:
            return type(None), ()
        # Python's own function, which returns None: the file may be loaded where hmp is not
        return warnings.warn, (
            f"the policy {self.applied.user_policy.name!r} was applied to this model when it was saved, but the file does not contain "
            "it; apply it again: hmp.apply(model, policy)",
        )


_marks: weakref.WeakSet[Mark] = weakref.WeakSet()
_numbers: weakref.WeakKeyDictionary[PolicyTable, int] = weakref.WeakKeyDictionary()  # of the policies of marks, from 1
_next_number = functools.partial(next, itertools.count(1))
_changes = 0
# Returns a new scope id; each model for which a policy's scoped entries are resolved has one.
new_scope_id = functools.partial(next, itertools.count(1))


def _number(compiled: PolicyTable | None) -> int:
    return 0 if compiled is None else _numbers.setdefault(compiled, _next_number())


def _count_change() -> None:
    global _changes
    _changes += 1


def mark(module: torch.nn.Module, compiled: PolicyTable, outputs: torch.dtype | None = None, methods: tuple[str, ...] = ()) -> None:
    """Mark `module`: `compiled` is active during every call of it, of its `methods` and of its deep copies, which gives `outputs`."""
    _follow_marks(module)
    for name in methods:
        patches.rebind(type(module), name, _following_marks(getattr(type(module), name), name))
    found: Mark | None = vars(module).get(MARK)
    _put(module, Mark(module, compiled, {} if found is None else found.scoped, outputs, methods))


def mark_scoped(module: torch.nn.Module, compiled: PolicyTable) -> None:
    """Mark `module`: `compiled` is active during those calls of it that are made where a policy of the same scope id is active."""
    begin_outermost_calls()  # before its class's call is wrapped: most modules of the model have no entries, and convert() may use it
    _follow_marks(module)
    found = vars(module).get(MARK) or Mark(module, None, {})
    _put(module, found.of(module, {**found.scoped, compiled.scope_id: compiled}))


def _put(module: torch.nn.Module, new: Mark) -> None:
    # a new Mark: a replica may share the old one
    if new.applied is None and not new.scoped:
        vars(module).pop(MARK, None)
    else:
        vars(module)[MARK] = new
    _count_change()


def _follow_marks(module: torch.nn.Module) -> None:
    """Patch the module's class, so that calls of its modules read their marks. Raise HmpError if its `__call__` isn't a Python function."""
    cls = type(module)
    # a lazy module's class changes at its first call
    for each in (cls, getattr(cls, "cls_to_become", None) or cls):
        patches.rebind(each, "extra_repr", _telling_mark(each.extra_repr))
        _take_marks_along(each)
        owner = next(base for base in each.__mro__ if "__call__" in vars(base))
        own_call = vars(owner)["__call__"]
        if getattr(own_call, "__module__", "").startswith("torch."):
            # torch's own `__call__` methods call _call_impl, or what module.compile() made of it, maybe before it was patched
            patches.rebind(each, "_call_impl", _following_marks(each._call_impl, inside_call=True))
            if module._compiled_call_impl is not None:
                patches.rebind(each, "__call__", _following_marks(each.__call__))
        elif isinstance(own_call, types.FunctionType):
            patches.rebind(owner, "__call__", _following_marks(own_call, own_call=True))
        else:
            raise HmpError(f"apply() can't wrap {owner.__name__}.__call__, a {type(own_call).__name__}; make it a plain method")
    patches.wrap(torch.nn.Module, "__setstate__", _without_loaded_mark)


def _take_marks_along(cls: Any) -> None:
    """Have copies of the class's modules carry their marks where its own code makes them, as that of an fx.GraphModule does."""
    for name in ("__copy__", "__deepcopy__"):
        own = getattr(cls, name, None)
        if own is not None:
            patches.rebind(cls, name, _marking_copies(own))


def _marking_copies(copied: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(copied)
    def copying(self: torch.nn.Module, *args: Any) -> Any:
        made = copied(self, *args)
        found: Mark | None = self.__dict__.get(MARK)
        if found is not None and made is not self and MARK not in made.__dict__:
            _follow_marks(made)
            _put(made, found.of(made))
        return made

    return copying


def without_mark(value: Any) -> Any:
    """Return `value`; of the `__dict__` of a marked module a copy without the mark."""
    return {name: item for name, item in value.items() if name != MARK} if type(value) is dict and MARK in value else value


def drop_lost_marks(model: torch.nn.Module) -> None:
    """Take away what marks have become in a pickle, from modules that were loaded while nothing was patched."""
    for module in model.modules():
        if module.__dict__.get(MARK, module) is None:
            del module.__dict__[MARK]


def inside_compiled(module: Any) -> Any:
    """Return the model that torch.compile made `module` of, else `module` itself.

    It is marked instead of `module`: torch.compile calls it directly where `module` is called in compiled code or compiled again.
    """
    imported = dynamo()
    while imported is not None and isinstance(module, imported.OptimizedModule):
        module = module._orig_mod
    return module


def applied(module: Any) -> Mark | None:
    """Return the mark of a module that a policy is applied to; None for any other object."""
    found: Mark | None = vars(module).get(MARK) if isinstance(module, torch.nn.Module) else None
    return None if found is None or found.applied is None else found


def applied_policy(module: torch.nn.Module) -> Any:
    """Return the policy that the user gave to `apply(module, policy)`; None for a module that is not applied to."""
    found = applied(inside_compiled(module))
    return None if found is None or found.applied is None else found.applied.user_policy


def kept(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the globs of the weights that stay float32 as long as a policy is applied to the module."""
    found = applied(module)
    return () if found is None else found.kept


def unmark(model: torch.nn.Module) -> None:
    """Undo `mark` for `model`, and `mark_scoped` for its submodules of the same scope id; does nothing where there is no mark."""
    found = applied(model)
    if found is None or found.applied is None:
        return
    _put(model, Mark(model, None, found.scoped))
    if found.applied.scope_id:  # its scoped entries hold in calls that are running
        state.when_ended(functools.partial(_unmark_modules, weakref.ref(model), found.applied.scope_id))


def _unmark_modules(reference: weakref.ref[torch.nn.Module], scope_id: int) -> None:
    model = reference()
    if model is not None:
        shared = _modules_of_marked_models(scope_id)
        for module in model.modules():
            if module not in shared:
                _unmark_scoped(module, scope_id)


def _modules_of_marked_models(scope_id: int) -> set[torch.nn.Module]:
    """Return the modules of all models that `apply()` has marked with this scope id: a shallow copy of a model shares its submodules."""
    marks = [each for each in list(_marks) if each.applied is not None and each.applied.scope_id == scope_id]
    models = [model for each in marks if (model := each.module()) is not None and vars(model).get(MARK) is each]
    return {module for model in models for module in model.modules()}


def unmark_scope(scope_id: int) -> None:
    """Undo `mark_scoped` for all modules with this scope id, deep copies included."""
    for each in list(_marks):
        module = each.module()
        if module is not None:
            _unmark_scoped(module, scope_id)


def _unmark_scoped(module: torch.nn.Module, scope_id: int) -> None:
    found: Mark | None = vars(module).get(MARK)
    if found is not None and scope_id in found.scoped:
        scoped = {number: compiled for number, compiled in found.scoped.items() if number != scope_id}
        _put(module, found.of(module, scoped))


def unmark_applied() -> None:
    """Undo `apply()` for all models: their next calls activate nothing."""
    for each in list(_marks):
        module = each.module()
        if each.applied is not None:
            _marks.discard(each)
            if module is not None:
                _put(module, Mark(module, None, each.scoped))


def unmark_all() -> None:
    """Remove all marks from modules, those of deep copies included."""
    for each in list(_marks):
        module = each.module()
        if module is not None:
            vars(module).pop(MARK, None)
    _marks.clear()
    _count_change()


def any_marked() -> bool:
    """Return True if a policy is applied to any module that is alive."""
    return any(each.applied is not None for each in list(_marks))  # a shallow copy may hold the mark of a module that is gone


def policy_of_call_now(module: torch.nn.Module) -> PolicyTable | None:
    """Return the policy that a call of `module` in this thread or task makes active; None where it changes nothing."""
    return policy_of_call(module, state.current_state()) if MARK in module.__dict__ else None


def policy_of_call(module: torch.nn.Module, current: PolicyTable | Off) -> PolicyTable | None:
    """Return the policy that a call of `module` makes active where `current` is active; None where it changes nothing."""
    found: Mark | None = module.__dict__.get(MARK)
    if found is None or current.disabled:  # disable_casts() around the call wins: inside it torch is exactly torch
        return None
    compiled = found.applied or found.scoped.get(current.scope_id)
    if compiled is None or compiled.policy is None:  # revert() has emptied it
        return None
    if compiled is current and (found.applied is None or not is_any_autocast_enabled()):
        return None
    return compiled


def outputs_of_call(module: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype of what a call of `module`, in which its policy is active, returns; None as it is."""
    found: Mark | None = module.__dict__.get(MARK)
    return None if found is None else found.outputs


def has_method(module: torch.nn.Module, name: str) -> bool:
    """Return True if calls of the module's method activate the policy that is applied to the module."""
    found: Mark | None = module.__dict__.get(MARK)
    return found is not None and name in found.methods


def applied_around(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return a model that a policy is applied to and that `module` is a submodule of; None without one."""
    for each in list(_marks):
        model = each.module() if each.applied is not None and each.applied.policy is not None else None
        if model is not None and model is not module and applied(model) is each and any(one is module for one in model.modules()):
            return model
    return None


def policy_in(compiled: PolicyTable, running: Iterable[torch.nn.Module]) -> Any:
    """Return the policy that would be active in calls of the modules `running`, outermost first, inside `compiled`; None for none."""
    is_around = compiled.policy is None  # outside of all policies
    for module in running:
        found: Mark | None = module.__dict__.get(MARK)
        if found is not None:
            compiled = (found.applied if is_around else None) or found.scoped.get(compiled.scope_id) or compiled
    return compiled.policy


_look: Callable[[torch.nn.Module, bool], bool] | None = None  # what is to see the modules that are called


def is_new(module: torch.nn.Module, is_traced: bool = False) -> bool:
    """Return True if what `look_at_calls` was given found something to do for `module`, and has done it.

    `is_traced` is whether torch.compile traces the call.
    """
    return _look is not None and _look(module, is_traced)


def look_at_calls(look: Callable[[torch.nn.Module, bool], bool]) -> None:
    """Have `look` see every module that is called, until patches.restore(). Where it returns True the call begins anew, with new marks."""
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
        call = state.begin_call()
        try:
            if state.current_state() is state.PROCESS and state.PROCESS.policy is not None:
                return state.call_under(state.process_table, own, self, *args, **kwargs)
            return own(self, *args, **kwargs)
        finally:
            outermost.end()
            state.end_running(call)

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
            marked: Any = self
            return marked._call_impl(*args, **kwargs)  # its class's, which follows marks now
        return call_impl(self, *args, **kwargs)

    return _call_impl


def changes() -> int:
    """Return how often a mark was put on a module or removed: code of torch.compile's is guarded on this number."""
    return _changes


def _following_marks(
    call_impl: Callable[..., Any], method: str = "", *, own_call: bool = False, inside_call: bool = False
) -> Callable[..., Any]:
    """Return `call_impl`, or the `method` of that name, which activates the policy of its module's mark.

    What is called `inside_call`, by a class's `own_call` that does so, leaves it at that: a context in between wins.
    """
    if getattr(call_impl, "hmp_follows_marks", False):
        return call_impl  # a base class's

    @functools.wraps(call_impl)
    def _call_impl(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if method and not has_method(self, method):
            return call_impl(self, *args, **kwargs)
        compiled = policy_of_call_now(self)
        if compiled is None or (inside_call and getattr(type(self).__call__, "hmp_is_own_call", False)):
            return call_impl(self, *args, **kwargs)
        outputs = outputs_of_call(self)  # before the call, in which remove() may take the mark away
        result = autocast.call_innermost(compiled, call_impl, self, *args, **kwargs)
        return result if outputs is None else in_dtype(result, outputs)

    _call_impl.hmp_follows_marks = True  # type: ignore[attr-defined]
    _call_impl.hmp_is_own_call = own_call  # type: ignore[attr-defined]
    return _call_impl


# The code of every function that activates the policy of a module's mark; its local variable `self` is the module.
CALL: types.CodeType = next(
    constant
    for constant in _following_marks.__code__.co_consts
    if isinstance(constant, types.CodeType) and constant.co_name == "_call_impl"
)


def _telling_mark(extra_repr: Callable[[torch.nn.Module], str]) -> Callable[[torch.nn.Module], str]:
    """Return an `extra_repr` with which `print(model)` shows the policy that is applied to the module, too."""
    if getattr(extra_repr, "hmp_tells_mark", False):
        return extra_repr  # a base class's

    @functools.wraps(extra_repr)
    def telling(self: torch.nn.Module) -> str:
        own_text = extra_repr(self)
        found: Mark | None = self.__dict__.get(MARK)
        if found is None:
            return own_text
        if found.applied is not None:
            policies = [f"policy {found.applied.user_policy.name!r}"] if found.applied.user_policy is not None else []
        else:
            policies = [
                f"scoped entries of policy {compiled.user_policy.name!r}"
                for compiled in found.scoped.values()
                if compiled.user_policy is not None
            ]
        return ", ".join(filter(None, (own_text, *policies)))

    telling.hmp_tells_mark = True  # type: ignore[attr-defined]
    return telling


def _without_loaded_mark(set_state: Callable[..., None]) -> Callable[..., None]:
    """Return a `__setstate__` after which the module has no mark from a pickle, and one of its own from a shallow copy."""

    def __setstate__(self: torch.nn.Module, values: dict[str, Any]) -> None:
        set_state(self, values)
        found = self.__dict__.get(MARK, self)
        if found is None:  # what a mark becomes in a pickle
            del self.__dict__[MARK]
        elif isinstance(found, Mark) and found.module() is not self:  # a shallow copy brings the mark of another module
            self.__dict__[MARK] = found.of(self)

    return __setstate__


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

    Also those in lists, tuples, dicts, other mappings and dataclasses. What holds none of another dtype is returned itself. A tensor that
    occurs twice is cast once.
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
            names = [field.name for field in dataclasses.fields(found) if hasattr(found, field.name)]
            changed = {name: new for name in names if (new := map_tensors(old := getattr(found, name), one, others)) is not old}
            instance: Any = copy.copy(found) if changed else found
            for name, new in changed.items():
                object.__setattr__(instance, name, new)  # it may be frozen
            return instance
        if isinstance(found, MutableMapping):
            items = {key: new for key, old in found.items() if (new := map_tensors(old, one, others)) is not old}
            copied = copy.copy(found) if items else found
            for key, new in items.items():
                copied[key] = new
            return copied
        return found

    return map_tensors(value, one, others)
