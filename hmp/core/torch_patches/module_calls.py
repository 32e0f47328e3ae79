"""Calls of models: an AppliedPolicy in a module's `__dict__`, and a `_call_impl` on its class that activates it in calls.

Replicas and copies of a module share it, and what multiprocessing sends has it. A file has none, so that it can be loaded where hmp is not
installed; loading it warns.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import functools
import itertools
import secrets
import types
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch

from ...errors import HmpError
from ..active import autocast, state
from ..active.state import Off, PolicyTable
from ..casting import LOW, castable, dtype_name, dtype_named, map_tensors
from ..log import log, should_log
from ..patching import patches
from ..patching.names import instances
from ..policy.scopes import plain_path, unwrapped
from ..torch_private import CALL_OF_MODULES, DYNAMOS_MODULES, dynamo, is_any_autocast_enabled, tell_dynamo_of_call_impl
from . import imports

APPLIED = "_hmp_applied"
_compiling = torch.compiler.is_dynamo_compiling  # torch's own, taken before anything is patched


@dataclasses.dataclass(eq=False)
class AppliedPolicy:
    """The policies that calls of a module activate. Copies of the module share it; a change makes another.

    Attributes:
        kind: The module's class.
        applied: The policy of `apply()`, which every call of the module activates; None without one.
        scoped: The policies that scoped entries (`softmax @ decoder.*`) give the module, by scope id: a call activates one if the policy
            active around the call has its scope id. They last as long as that policy, in its `parts`.
        outputs: The dtype of what a call returns; None as it is.
        methods: Calls of these methods activate `applied` too.
        kept: Globs of the weights that stay float32 (see `keep`).
    """

    kind: type[torch.nn.Module]
    applied: PolicyTable | None = None
    scoped: MutableMapping[int, PolicyTable] = dataclasses.field(default_factory=dict)
    outputs: torch.dtype | None = None
    methods: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.scoped = weakref.WeakValueDictionary(self.scoped)
        # what code of torch.compile's is guarded on: modules with equal keys activate the same policies
        scoped = ((scope, table.number) for scope, table in sorted(self.scoped.items()))
        self.key = (self.applied and self.applied.number, self.outputs, self.methods, *scoped)
        _all.add(self)

    def __deepcopy__(self, memo: object) -> AppliedPolicy:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.applied is None or self.applied.user_policy is None:
            return type(None), ()
        # Python's own function, which returns None: the file may be loaded where hmp is not
        return warnings.warn, (
            f"the policy {self.applied.user_policy.name!r} was applied to this model when it was saved, but the file does not contain "
            "it; apply it again: hmp.apply(model, policy)",
        )


_all: weakref.WeakSet[AppliedPolicy] = weakref.WeakSet()
_changes = 0
# Returns a new scope id; each model for which a policy's scoped entries are resolved has one, which it takes to other processes.
new_scope_id = functools.partial(secrets.randbits, 62)


def changes() -> int:
    """Return how often a module got or lost a policy: code of torch.compile's is guarded on this number."""
    return _changes


def attach(module: torch.nn.Module, table: PolicyTable, outputs: torch.dtype | None = None, methods: tuple[str, ...] = ()) -> None:
    """Have `table` active during every call of `module`, of its `methods` and of its copies, which gives `outputs`."""
    follow(module, methods)
    _change(module, applied=table, outputs=outputs, methods=methods)


def attach_scoped(module: torch.nn.Module, table: PolicyTable) -> None:
    """Have `table` active during those calls of `module` that are made where a policy of the same scope id is active."""
    begin_outermost_calls()  # before its class's call is wrapped: most modules of the model have no entries, and convert() may use it
    follow(module)
    _change(module, scoped={**_policies(module).scoped, table.scope_id: table})


def detach(model: torch.nn.Module) -> None:
    """Undo `attach`; does nothing without it."""
    if applied(model) is not None:
        _change(model, applied=None, outputs=None, methods=(), kept=())


def _policies(module: torch.nn.Module) -> AppliedPolicy:
    return vars(module).get(APPLIED) or AppliedPolicy(type(module))


def _change(module: torch.nn.Module, **changed: Any) -> None:
    global _changes
    vars(module)[APPLIED] = new = dataclasses.replace(_policies(module), kind=type(module), **changed)
    if new.applied is None and not new.scoped:
        del vars(module)[APPLIED]
    _changes += 1


def detach_applied() -> None:
    """Undo `attach` for all models and their copies: their next calls activate nothing."""
    for module in applied_models():
        detach(module)
    for each in _all:  # something may keep one
        each.applied = None


def detach_all() -> None:
    """Take the policies off all modules, those of scoped entries too."""
    global _changes
    if _all:
        for module in instances(torch.nn.Module):
            vars(module).pop(APPLIED, None)
    _all.clear()
    _changes += 1


def any_applied() -> bool:
    """Return True if `apply()` gave a policy to a module that is alive, or to one that it is a copy of."""
    return any(each.applied is not None for each in _all)


def applied_models() -> list[torch.nn.Module]:
    """Return the modules that are alive with a policy of `apply()`, copies too. Looks through all objects."""
    return [module for module in instances(torch.nn.Module) if applied(module) is not None] if any_applied() else []


def follow(module: torch.nn.Module, methods: Iterable[str] = ()) -> None:
    """Patch the module's class, so that calls of its modules, and of these methods, activate their policies.

    Raises:
        HmpError: The class's `__call__` isn't a Python function.
    """
    cls: Any = type(module)
    follow_class(cls, methods)
    if module._compiled_call_impl is not None:  # what module.compile() made of `_call_impl`, maybe before it was patched
        patches.rebind(cls, "__call__", _activating(cls.__call__))


def follow_class(cls: Any, methods: Iterable[str] = (), kept: tuple[str, ...] = ()) -> None:
    """Patch a class, so that calls of its modules, and of these methods, activate their policies, and `.to()` leaves what is `kept`."""
    if kept:
        patches.rebind(cls, "_apply", _keeping(cls._apply))
    for name in methods:
        patches.rebind(cls, name, _activating(getattr(cls, name), name))
    # a lazy module's class changes at its first call
    for each in (cls, getattr(cls, "cls_to_become", None) or cls):
        owner = next(base for base in each.__mro__ if "__call__" in vars(base))
        own_call = vars(owner)["__call__"]
        if getattr(own_call, "__module__", "").startswith("torch."):  # torch's own `__call__` methods call _call_impl
            patches.rebind(each, "_call_impl", _activating(each._call_impl, inside_call=True))
        elif isinstance(own_call, types.FunctionType):
            patches.rebind(owner, "__call__", _activating(own_call, own_call=True))
        else:
            raise HmpError(f"apply() can't wrap {owner.__name__}.__call__, a {type(own_call).__name__}; make it a plain method")


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


def policy_of_call_now(module: torch.nn.Module) -> PolicyTable | None:
    """Return the policy that a call of `module` in this thread or task makes active; None where it changes nothing."""
    return policy_of_call(module, state.current_state()) if APPLIED in module.__dict__ else None


def policy_of_call(module: torch.nn.Module, current: PolicyTable | Off) -> PolicyTable | None:
    """Return the policy that a call of `module` makes active where `current` is active; None where it changes nothing."""
    found: AppliedPolicy | None = module.__dict__.get(APPLIED)
    if found is None or current.disabled:  # disable_casts() around the call wins, and user Python in backward
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


_looks: list[Callable[[torch.nn.Module, bool], bool]] = []  # what is to see the modules that are called


def is_new(module: torch.nn.Module, is_traced: bool = False) -> bool:
    """Return True if what `look_at_calls` was given found something to do for `module`, and has done it.

    `is_traced` is whether torch.compile traces the call.
    """
    return any(look(module, is_traced) for look in _looks)


def look_at_calls(look: Callable[[torch.nn.Module, bool], bool]) -> None:
    """Have `look` see every module that is called, until patches.restore(). Where it returns True the call begins anew."""
    own = getattr(*CALL_OF_MODULES)

    @functools.wraps(own)
    def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_new(self):
            return self._call_impl(*args, **kwargs)  # its class's, which activates policies now
        return own(self, *args, **kwargs)

    _looks[:] = [look]
    patches.on_restore(_looks.clear)
    patches.rebind(*CALL_OF_MODULES, _call_impl, own)
    imports.after({DYNAMOS_MODULES: functools.partial(tell_dynamo_of_call_impl, own)})


def begin_outermost_calls() -> None:
    """Have copies of casts, and the process's policy, last as long as the outermost call of a module, in each thread.

    Until patches.restore().
    """
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
    imports.after({DYNAMOS_MODULES: functools.partial(tell_dynamo_of_call_impl, _call_impl)})
    patches.on_restore(functools.partial(tell_dynamo_of_call_impl, own))


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
    found = dtype_named(outputs, _DTYPES)
    if found is None and outputs is not None:
        raise HmpError(f"outputs= expected None or one of {', '.join(map(dtype_name, _DTYPES))}, got {outputs!r}")
    return found


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
        is_mapping = isinstance(found, MutableMapping)
        if not is_mapping and (isinstance(found, type) or not dataclasses.is_dataclass(found)):
            return found
        items = dict(found) if is_mapping else {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        changed = {name: new for name, old in items.items() if (new := map_tensors(old, one, others)) is not old}
        if not changed:
            return found
        if not is_mapping:
            return dataclasses.replace(found, **changed)
        copied = copy.copy(found)
        copied.update(changed)
        return copied

    return map_tensors(value, one, others)


# --- weights that `cast_weights(model, keep=...)` leaves in float32: `model.to(torch.bfloat16)`, `.half()` and `.bfloat16()` do, too ----


_logged: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # the models of which the log says so


def names_of(model: torch.nn.Module) -> dict[torch.Tensor, list[str]]:
    """Return the parameters and buffers of a model, each with all of its names: that of a tied weight in each of its modules."""
    names: dict[torch.Tensor, list[str]] = defaultdict(list)
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names[tensor].append(name)
    return names


def matches(name: str, glob: str) -> bool:
    """Return True if the glob matches the weight's name, or the path of a module around it."""
    return any(fnmatch.fnmatchcase(path, glob) for path in paths_of(name))


def paths_of(name: str) -> Iterator[str]:
    """Yield the paths of the modules around a weight, and its name, without the parts that torch.compile, FSDP and checkpoints add."""
    parts = plain_path(name).split(".")
    yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def keep(model: torch.nn.Module, globs: tuple[str, ...]) -> None:
    """Have calls of `model.to(dtype)` leave the float32 weights whose names match, as long as a policy is applied to the model."""
    if applied(model) is not None:
        _change(model, kept=globs)
        follow_class(type(model), kept=globs)


def _keeping(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `_apply`, which `.to()` and `.half()` call, that leaves the float32 weights which the module's policy came with."""

    @functools.wraps(apply)
    def _apply(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        found = applied(self)
        if found is None or not found.kept:
            return apply(self, fn, *args, **kwargs)
        globs = found.kept
        kept = ((tensor, name) for tensor, found in names_of(self).items() for name in found if any(matches(name, glob) for glob in globs))
        names = {id(tensor): name for tensor, name in kept}
        names |= {id(each.grad): names[id(each)] for each in self.parameters() if id(each) in names and each.grad is not None}

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            made = fn(tensor)
            if id(tensor) not in names or tensor.dtype is not torch.float32 or made.dtype not in LOW:
                return made
            if self not in _logged and should_log():
                log.warning(
                    "%s and other weights that cast_weights(keep=%s) names stay float32; hmp.remove(model) ends that",
                    names[id(tensor)],
                    list(globs),
                )
            _logged.add(self)
            return tensor.to(made.device)

        return apply(self, moved, *args, **kwargs)

    return _apply


# --- code around a model, though it runs inside a call that hmp has put a policy around -----------------------------------------
#
# accelerate gives a model another `forward`, which opens a context and calls the model's own; Fabric and DeepSpeed put the model into a
# wrapper whose `forward` does; a pre-hook can, too. Such a context counts as outside: the policy becomes active in the model's own forward.
# So does that of any function that replaces `forward` on the object: own code is that of the model's class.
# A wrapper that asks for torch.autocast's state does so in order to open such a context, and not to build an autocast-disabled block: it
# gets torch's answer.


TORCHS = torch.nn.modules.module.__file__  # where a call of every module passes
_PASSED = (TORCHS, CALL.co_filename)  # and may pass


def install() -> None:
    """Patch torch.autocast, which has to know what is around a model, until patches.restore()."""
    autocast.install(lambda region, frame: is_around_applied(region, frames(frame)), lambda frame: is_of_wrapper(frames(frame, CALLS)))


class Step(NamedTuple):
    """One call on the way to a context, of the interpreter's stack or of a trace of torch.compile's."""

    code: types.CodeType
    local: Callable[[str], Any]  # the value of a local variable


def frames(frame: types.FrameType | None, names: Container[str] | None = None) -> Iterator[Step]:
    """Yield the calls from `frame` outwards; with `names` those of functions of such a name, for the others cost time."""
    while frame is not None:
        if names is None or frame.f_code.co_name in names:
            yield Step(frame.f_code, lambda name, frame=frame: frame.f_locals.get(name))  # type: ignore[misc]
        frame = frame.f_back


# What a call of a module passes: a frame of such a name has the module as its `self`.
CALLS = frozenset(("forward", "__call__", "_call_impl"))


def running(steps: Iterable[Step]) -> Iterator[torch.nn.Module]:
    """Yield the modules that are being called at the innermost of `steps`, innermost first, and more than once each."""
    for step in steps:
        if step.code.co_name in CALLS and isinstance(module := step.local("self"), torch.nn.Module):
            yield module


def is_inside_another(module: torch.nn.Module, frame: types.FrameType) -> bool:
    """Return True if a call of another module than `module` is running at `frame`."""
    return any(each is not module for each in running(frames(frame, CALLS)))


def is_of_wrapper(steps: Iterable[Step]) -> bool:
    """Return True if the innermost call of a module is that of a wrapper around a model, such as DeepSpeed's engine, not of the model."""
    return any(unwrapped(module) is not module for module in itertools.islice(running(steps), 1))


def is_around_applied(region: Any, steps: Iterable[Step]) -> bool:
    """Return True if `region`, which the innermost of `steps` enters, begins in a call of an applied model and before its own forward.

    `region` is torch's object; None in a trace, where it is not known: one that the model's forward is decorated with is then taken for it.
    """
    passed: list[types.CodeType] = []
    for step in steps:
        if _runs(step.code, CALL) and applied(module := step.local("self")):
            return not _is_own(region, unwrapped(module), passed)
        passed.append(step.code)
    return False


def _runs(code: types.CodeType, own: types.CodeType) -> bool:
    """Return True if `code` is `own`, or what torch.compile has made of it: of the whole, or of what comes after a graph break."""
    lines = [line for _, _, line in own.co_lines() if line is not None]
    is_inside = code.co_filename == own.co_filename and own.co_firstlineno <= code.co_firstlineno <= max(lines, default=0)
    return code is own or is_inside


_DECORATED: types.CodeType = next(
    constant for constant in torch.amp.autocast_mode.autocast_decorator.__code__.co_consts if isinstance(constant, types.CodeType)
)


def _is_own(region: Any, module: torch.nn.Module, passed: list[types.CodeType]) -> bool:
    """Return True if the module's own code opened the context.

    A method of its class is among `passed`, the code between the call and the context, or is decorated with the context.
    """
    attributes = [value for base in type(module).__mro__ if base is not torch.nn.Module for value in vars(base).values()]
    for each in (inner for value in attributes if callable(value) for inner in _with_wrapped(value)):
        code = getattr(each, "__code__", None)
        if code is _DECORATED:
            if (region is None and code in passed) or any(cell.cell_contents is region for cell in each.__closure__ or ()):
                return True
        elif code is not None and code.co_filename not in _PASSED and any(_runs(one, code) for one in passed):
            return True
    return False


def _with_wrapped(function: Any) -> Iterator[Any]:
    """Yield `function`, and what it says it wraps."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)
