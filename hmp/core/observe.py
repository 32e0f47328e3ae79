"""One stream of calls: tools listen to it, and the core reports ops, modules, casts and what is saved for backward.

`with listen(listener):` is all that a tool does. While nobody listens nothing is reported and nothing is paid: the wrappers of ops are made
without a word about it.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from . import locks, saved_tensors
from .active import state
from .active.state import Off, PolicyTable
from .casting import castable, dtype_name, each_castable
from .ops.python_ops import name_of
from .patching.patched_op import unpatched_op
from .torch_private import TorchDispatchMode, devices_in_autocast, function_mode_stack, hooks_with_keywords

if TYPE_CHECKING:
    from .rules.op import CastRule, Op, OpUnderRule

_MOST_NAMES = 4096  # which a mode remembers
_compiling = torch.compiler.is_compiling
_autocast_dtype = torch.get_autocast_dtype


class Call:
    """The call of an op: the same object where it begins and where it ends.

    `ruled` is the op under its rule, None for a torch function that hmp leaves as it is; then `decided` says whether hmp decided an op
    inside of it. `here` is the active state as the call began, `autocast` torch.autocast's dtype by device, where it was enabled. `result`
    is None while it runs, `error` what it raised.

    The others are noted for listeners that measure: the dtypes that torch's op `computed` in, seconds in the op and in casts, how many
    `casts` were made, of how many bytes, and how many a cache saved; `cast_dtypes` has the two dtypes of each, where a listener asks.
    `is_autocast`: torch.autocast decided. `saturates`: a value was moved to a finite extreme. `in_float32`: a product that rounds its
    inputs to the low-precision dtype and computes in float32. `lacks_kernel`: it ran in float32 for want of a kernel.
    """

    result: Any = None
    error: BaseException | None = None
    decided = is_autocast = saturates = in_float32 = lacks_kernel = False
    casts = casts_saved = cast_bytes = 0
    cast_seconds = op_seconds = 0.0
    computed = ""
    cast_dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = ()

    def __init__(self, op: str, ruled: OpUnderRule | None, function: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op = op
        self.ruled = ruled
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.here: PolicyTable | Off = state.current_state()
        self.autocast = {device: _autocast_dtype(device) for device in devices_in_autocast()}  # an op's kernel runs outside of it

    @property
    def rule(self) -> CastRule | None:
        """Return the op's rule, one of those that lists or the core bring."""
        return None if self.ruled is None else self.ruled.rule

    @property
    def given(self) -> tuple[Any, ...]:
        """Return all arguments."""
        return (*self.args, *self.kwargs.values()) if self.kwargs else self.args


class Listener:
    """Base class of listeners: gets the calls of ops, and more where it has a method or an attribute for it. Its methods do nothing.

    Calls that hmp decides are reported in every thread, modules too; what hmp does not decide, ATen's ops and what autograd saves, in the
    thread that listens.
    """

    measures = False  # whether casts, dtypes and seconds of a call are noted
    lists_casts = False  # whether the two dtypes of each cast are noted
    synchronizes = False  # whether an accelerator is waited for around what is timed
    unlisted = False  # whether it gets torch's functions that hmp does not decide
    inside = False  # whether it gets those that an op calls which hmp decides
    in_backward = False  # whether it gets torch's functions in the user's Python that backward calls
    follows_tensors = False  # whether it needs each op of ATen by which a tensor gets its values

    def begin(self, call: Call) -> None:
        """Handle the call of an op that hmp decides; of the others listeners get the end alone."""

    def end(self, call: Call) -> None:
        """Handle the end of the call, which returned or raised."""

    def entered(self, module: torch.nn.Module) -> None:
        """Handle the call of a module, which is the innermost one of `modules`."""

    def left(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any, raised: bool) -> None:
        """Handle the end of the call, which returned or raised; the module is still the innermost one of `modules`."""

    def backward_begins(self) -> None:
        """Handle the call of a backward pass."""

    def noted(self, about: str, op: str, module: str, value: Any) -> None:
        """Handle what an op on the list `about` reports of itself, in forward or backward of a call in that module."""

    def saved(self, tensor: torch.Tensor) -> None:
        """Handle a tensor that autograd saves for backward."""

    def kept(self, op: str, tensor: torch.Tensor, nbytes: int | None) -> Any:
        """Handle an op that saves tensors for backward in a form of its own: this one in so many bytes, or as it is (None).

        What this returns is given to `changed`.
        """

    def changed(self, about: Any, saved: int, seconds: float, errors: list[tuple[float, float]]) -> None:
        """Handle a change to that form or back, `saved` bytes fewer are kept: `errors` are sums of squares, of changes and of numbers."""

    def aten(self, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Handle an op of ATen's: `run(*args, **kwargs)` gives its result, which this returns."""
        return run(*args, **kwargs)


class Here(threading.local):
    """What runs in this thread: the outermost call that hmp decides, and the outermost function that a mode sees, which may be inside."""

    call: Call | None = None
    function: Call | None = None
    functions: _Functions | None = None
    aten: _Aten | None = None


here = Here()
listeners: tuple[Listener, ...] = ()  # those that get calls, in every thread
_lock = locks.RLock()


rebuild: Callable[[], object] = lambda: None  # noqa: E731  # makes wrappers anew, for other listeners; core.tables says how


@contextmanager
def listen(*added: Listener) -> Iterator[None]:
    """Return a context manager in which the listeners get reports."""
    with ExitStack() as undo:
        calls = tuple(each for each in added if _has(each, "begin", "end", "noted"))
        if calls:
            _change(lambda known: (*known, *calls))
            undo.callback(_change, lambda known: tuple(each for each in known if each not in calls))
        undo.enter_context(modules.watch(added))
        for each in added:
            if _has(each, "kept"):
                saved_tensors.watchers.append(each)
                undo.callback(saved_tensors.watchers.remove, each)
            if _has(each, "saved"):
                undo.enter_context(saved_tensors.counting(each.saved))
        functions = [each for each in added if each.unlisted]
        if functions:
            undo.enter_context(_in_mode("functions", _Functions, functions))
        for each in added:
            if _has(each, "aten"):
                undo.enter_context(hear_aten(each))
        yield


def end_all(listeners: Sequence[Listener], call: Call) -> None:
    """Report the end of a call to all of the listeners; what one raises is raised when the others have heard of it."""
    for at, each in enumerate(listeners):
        try:
            each.end(call)
        except BaseException:
            end_all(listeners[at + 1 :], call)
            raise


def _has(listener: Listener, *methods: str) -> bool:
    return any(getattr(type(listener), name) is not getattr(Listener, name) for name in methods)


def _change(to: Callable[[tuple[Listener, ...]], tuple[Listener, ...]]) -> None:
    global listeners
    with _lock:
        listeners = to(listeners)
    rebuild()


def noting(listeners: Sequence[Listener], about: str, op: str, other: Callable[[Any], None] | None) -> Callable[[Any], None]:
    """Return the function to which an op on the list `about` reports, in backward too; `other` gets it as well."""
    module = modules.path

    def tell(value: Any) -> None:
        if other is not None:
            other(value)
        for each in listeners:
            each.noted(about, op, module, value)

    return tell


# --- times and dtypes of a call ---

Clock = Callable[[], float]


def clock_of(listeners: Sequence[Listener]) -> Clock | None:
    """Return what times calls for these listeners, None where none of them measures."""
    if not any(each.measures for each in listeners):
        return None
    return _once_done if any(each.synchronizes for each in listeners) and torch.accelerator.is_available() else time.perf_counter


def _once_done() -> float:
    torch.accelerator.synchronize()
    return time.perf_counter()


_SHORT = {dtype: dtype_name(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NO_TENSORS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter


def dtypes_of(values: Iterable[Any]) -> str:
    """Return the dtypes of the castable tensors among `values`, each once, in order."""
    found: dict[torch.dtype, None] = {}
    for value in values:
        kind = type(value)
        if kind is _Tensor or kind is _Parameter:
            if castable(value):
                found[value.dtype] = None
        elif kind not in _NO_TENSORS:
            found.update((tensor.dtype, None) for tensor in each_castable((value,)))
    return _SHORT[next(iter(found))] if len(found) == 1 else ", ".join([_SHORT[dtype] for dtype in found])


def first_dtype(values: tuple[Any, ...]) -> str:
    """Return the dtype of the first castable tensor, "" without one."""
    first = values[0] if values and type(values[0]) is _Tensor and castable(values[0]) else next(each_castable(values), None)
    return "" if first is None else _SHORT[first.dtype]


def asked_dtype(values: tuple[Any, ...]) -> str:
    """Return the floating dtype that `dtype=` names, which the inputs are cast to before torch computes; "" where none is."""
    for value in values:
        if type(value) is torch.dtype and value.is_floating_point:
            return _SHORT[value]
    return ""


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor's elements, of a sparse one of those that it stores."""
    if tensor.layout is torch.sparse_coo:
        return int(tensor._values().nbytes)
    return int(tensor.nbytes if tensor.layout is torch.strided else tensor.values().nbytes)


# --- modules ---


class Modules:
    """Which nn.Module is running in each thread, known while somebody listens, for every module of the process, whatever its model.

    A path is relative to the outermost running module: `encoder.layer.3.attention.self`. The outermost one has the name of its class.
    """

    def __init__(self) -> None:
        self._threads = threading.local()
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._hooks: list[Any] = []
        self._listeners: tuple[Listener, ...] = ()

    @contextmanager
    def watch(self, added: Sequence[Listener]) -> Iterator[None]:
        """Return a context manager with hooks on all modules, one pair for all that listen."""
        with _lock:
            if not self._listeners:
                register = torch.nn.modules.module
                self._hooks = [
                    register.register_module_forward_pre_hook(self._enter),
                    register.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
                ]
            self._listeners = (*self._listeners, *added)
        try:
            yield
        finally:
            with _lock:
                self._listeners = tuple(each for each in self._listeners if each not in added)
                if not self._listeners:
                    for hook in self._hooks:
                        hook.remove()
                        hooks_with_keywords.pop(hook.id, None)  # which torch leaves there
                    self._threads = threading.local()

    @property
    def path(self) -> str:
        """Return the path of the innermost running module of this thread, "" for none."""
        return next((path for _, path in reversed(self._stack())), "")

    @property
    def running(self) -> list[torch.nn.Module]:
        """Return the running modules of this thread, outermost first."""
        return [module for module, _ in self._stack()]

    def _stack(self) -> list[tuple[torch.nn.Module, str]]:
        stack: list[tuple[torch.nn.Module, str]] = vars(self._threads).setdefault("stack", [])
        return stack

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if _compiling():
            return
        stack = self._stack()
        stack.append((module, self._path_in(stack[0][0] if stack else module, module, stack)))
        for each in self._listeners:
            each.entered(module)

    def _leave(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        # torch calls it without keywords where the module has raised
        raised, kwargs = len(rest) == 1, rest[0] if len(rest) > 1 else {}
        if _compiling():
            return
        stack = self._stack()
        at = next((at for at in reversed(range(len(stack))) if stack[at][0] is module), -1)
        if at < 0:
            stack.clear()  # it was called before anybody listened
            return
        del stack[at + 1 :]  # a user's hook raised before ours ran
        try:
            for each in self._listeners:
                each.left(module, args, kwargs, rest[-1], raised)
        finally:
            del stack[at:]

    def _path_in(self, root: torch.nn.Module, module: torch.nn.Module, stack: list[tuple[torch.nn.Module, str]]) -> str:
        if root is module:
            return type(module).__name__
        names = self._names.get(root)
        if names is None or id(module) not in names:
            names = self._names[root] = {id(each): name for name, each in root.named_modules()}
        # the root does not contain the module: a forward called one that is held elsewhere
        return names.get(id(module)) or f"{stack[-1][1]}.{type(module).__name__}"


modules = Modules()


# --- torch's functions that hmp does not decide ---


class _Functions(TorchFunctionMode):
    """The one mode of a thread, for all that listen in it."""

    def __init__(self) -> None:
        super().__init__()
        self.report_to(())
        self._name_of = functools.lru_cache(_MOST_NAMES)(name_of)  # "" for other functions than ops

    def report_to(self, listeners: Sequence[Listener]) -> None:
        """Report to these listeners from now on."""
        self.listeners = tuple(listeners)
        self.inside = tuple(each for each in listeners if each.inside)
        self.clock = clock_of(listeners)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the function's own result."""
        func = unpatched_op(func)  # a wrapper has called it
        kwargs = kwargs or {}
        # most of what arrives here reads a tensor's dtype and the like, hmp's own code before all
        listeners = self.listeners if here.call is None else self.inside
        if not listeners or here.function is not None or not (name := self._name_of(func)):
            return func(*args, **kwargs)
        call = here.function = Call(name, None, func, args, kwargs)
        clock = self.clock or time.perf_counter
        started = clock()
        try:
            call.result = func(*args, **kwargs)
            call.op_seconds = clock() - started
        except BaseException as error:
            call.error = error
            raise
        finally:
            here.function = None
            end_all(listeners, call)
        return call.result


def _around_backward(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, a backward pass, with the mode active for the user's Python that it calls: torch has deactivated it."""
    mode = here.functions
    listeners = () if mode is None else tuple(each for each in mode.listeners if each.in_backward)
    if mode is None or not listeners or mode in function_mode_stack():
        return run
    return functools.partial(_run_backward, mode, listeners, run)


state.around_backward = _around_backward


def _run_backward(mode: _Functions, listeners: Sequence[Listener], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for each in listeners:
        each.backward_begins()
    with mode:
        return run(*args, **kwargs)


# --- ATen's ops ---


class _Aten(TorchDispatchMode):
    """The one mode of a thread, for all that listen in it, the latest first: what a listener computes itself reaches no other one.

    A DTensor calls ops on this process's part of it.
    """

    only_listens = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.report_to(())

    def report_to(self, listeners: Sequence[Listener]) -> None:
        """Report to these listeners from now on."""
        self.listeners = tuple(listeners)

    @property
    def allows_exchanged_memory(self) -> bool:
        """Return True if hmp may make nodes for casts that are used again, as it does where nobody listens."""
        return not any(each.follows_tensors for each in self.listeners)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the op's own result."""
        for kind in types:
            if kind.__module__.startswith("torch.distributed."):
                return NotImplemented
            if kind.__name__ == "FakeTensor":
                return func(*args, **(kwargs or {}))  # a DTensor asks for shapes
        run, listeners = func, self.listeners
        for each in listeners[:-1]:
            run = functools.partial(_chained, each, func, run)
        return listeners[-1].aten(func, run, args, kwargs or {})


def _chained(listener: Listener, func: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return listener.aten(func, run, args, kwargs)


def hear_aten(listener: Listener) -> AbstractContextManager[None]:
    """Return a context manager in which the listener gets this thread's ATen ops."""
    return _in_mode("aten", _Aten, (listener,))


@contextmanager
def _in_mode(name: str, kind: Any, added: Sequence[Listener]) -> Iterator[None]:
    """Return a context manager in which this thread's mode `here.NAME`, which is entered if it is missing, reports to `added`, too."""
    mode = getattr(here, name)
    if mode is None:
        mode = kind()
        setattr(here, name, mode)
        mode.__enter__()
    mode.report_to((*mode.listeners, *added))
    try:
        yield
    finally:
        mode.report_to([each for each in mode.listeners if each not in added])
        if not mode.listeners:
            setattr(here, name, None)
            mode.__exit__(None, None, None)
