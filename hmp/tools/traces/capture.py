"""capture(): what each module returned, noted when it returns, and written into a file when the context ends."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...core import locks
from ...core.active.state import current_state
from ...core.casting import dtype_name, has_values
from ...core.observe import Listener, listen, modules
from ...core.torch_private import graph_task, in_plain_autograd, trace_here
from ...errors import HmpError
from ..formatting import count, provenance, size, some
from ..model_call import check_module, compiled_in, named_arguments
from ..model_state import untracked
from . import file
from .file import INPUTS, MASK, TOKENS, Capture, ModuleCall, Output, bits, values_of

Tensor = torch.Tensor
MOST_BYTES = 4 * 2**20  # of an output whose values are kept
_PLACES = (TOKENS, MASK)  # what rows and places are: always kept whole
# Wrapper's class → the attribute that it holds the wrapped module in, which has the wrapper's place in the model.
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
_COMPILED = "_orig_mod"  # of what torch.compile(module) gives


class NothingCalled(HmpError):
    """No module was called in the context of a capture."""


@contextmanager
def capture(
    path: str | Path,
    model: torch.nn.Module | None = None,
    *,
    calls: int | None = None,
) -> Iterator[Capture]:
    """Record what each module returns inside the `with` block in a file, for `hmp.compare_captures()` and `hmp diff`.

    The model computes the same bits as without it, under any policy, torch.autocast or torch.no_grad(). No graph is kept alive, and no hook
    remains. A model that torch.compile() made runs compiled, so only its output is recorded; a note in the capture says so. The file is
    written when the block ends, also after an exception. This needs the extra `capture` (safetensors, numpy).

    Args:
        path: the file to write. Ranks other than 0 write `trainer.rank1.capture` and so on.
        model: the model to record. Default: every module that runs.
        calls: the number of calls of the model to record, None for all.

    Yields:
        The capture, which can be read after the block. It has the shape, dtype and a hash of every output, the values of outputs
        up to 4 MiB, and the model's inputs.

    Raises:
        HmpError: no module was called, or the file cannot be written.

    Example:
        >>> net, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
        >>> with hmp.capture("trainer.capture", net):
        ...     y = net(x)
    """
    target = file.of_rank(Path(path))
    if model is not None:
        check_module(model, "capture()", "a file and a torch.nn.Module")
    if calls is not None and calls < 1:
        raise HmpError(f"calls= expected a number of calls >= 1, or None for all, got {calls}")
    file.check(target)
    watcher = _TraceRecorder(model, calls)
    found = Capture(target)
    found.is_written = False
    failed = True
    try:
        with watcher.watch():
            yield found
        failed = False
    finally:
        found.is_written = True
        if watcher.calls:
            found.path = target = file.of_rank(Path(path), watcher.rank)
            file.write(target, watcher.about(), watcher.notes(), [asdict(call) for call in watcher.calls], watcher.tensors)
        elif not failed:
            named = "the program" if model is None else type(model).__name__
            raise NothingCalled(
                f"{target} was not written: no module of {named} was called inside capture(); call the model as model(...), "
                'and one that is compiled by model.compile() under torch.compiler.set_stance("force_eager")'
            )


# --- what the modules of a program are called, whatever is wrapped around them


@dataclass
class Root:
    """A model: the prefix of its modules' names, and how many of its calls have returned."""

    prefix: str
    calls: int = 0


@dataclass(frozen=True)
class ModulePath:
    """A module's name in its model, and whether it is compiled."""

    name: str
    root: Root
    is_compiled: bool


class ModuleNames:
    """The places of the modules of `model`.

    Without one, of every module that runs and of those that it holds: the first model with parameters has no prefix, others have that of
    their class.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self.places: weakref.WeakKeyDictionary[torch.nn.Module, ModulePath] = weakref.WeakKeyDictionary()
        self._is_open = model is None
        self._prefixes: set[str] = set()
        if model is not None:
            self._attach(model, Root(""))

    def place(self, module: torch.nn.Module) -> ModulePath | None:
        """Return the module's place; None for a module outside the model and for a wrapper, whose place the wrapped module has."""
        if self._is_open and (inside := _unwrapped(module)) not in self.places:
            self._attach(inside, Root(self._prefix_of(inside)))
        return self.places.get(module)

    def _prefix_of(self, module: torch.nn.Module) -> str:
        is_model = next(module.parameters(), None) is not None
        kind = type(module).__name__
        candidates = ["", *(f"{kind}{'' if number == 1 else number}" for number in range(1, len(self._prefixes) + 2))]
        prefix = next(each for each in candidates[not is_model :] if each not in self._prefixes)
        self._prefixes.add(prefix)
        return prefix

    def _attach(self, module: torch.nn.Module, root: Root) -> None:
        todo = [(module, root.prefix)]
        while todo:
            each, name = todo.pop()
            each = _unwrapped(each)
            if each in self.places:
                continue  # it is held under two names: the first one
            inside = vars(each)["_modules"].get(_COMPILED)
            self.places[each] = ModulePath(name, root, compiled_in(each) is not None)
            children = list((each if inside is None else inside).named_children())
            todo += [(child, f"{name}.{key}" if name else key) for key, child in reversed(children)]


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    while (name := _WRAPPERS.get(type(module).__name__)) is not None and (inside := getattr(module, name, None)) is not None:
        module = inside
    return module


# --- what is noted


class _TraceRecorder(Listener):
    """Notes calls while its `watch()` lasts.

    No module has a hook of its own: what looks for one, as the fused path of torch.nn.TransformerEncoderLayer, finds none.
    """

    def __init__(self, model: Any, calls: int | None) -> None:
        self.calls: list[ModuleCall] = []
        self.tensors: dict[str, Tensor] = {}
        self._names = ModuleNames(model)
        self._most_calls = calls
        self._numbers: Counter[str] = Counter()
        self._unkept = self._unread = 0
        self._device = ""
        self.rank = ""  # when the first call returned: a script may join the others in the context, and leave them
        self._hooked: dict[str, None] = {}
        self._opaque: dict[str, None] = {}
        self._lock = locks.RLock()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Make a context in which what modules return is noted."""
        with warnings.catch_warnings(), listen(self):
            # torch's own: that global hooks see the compiled module too, which is what they are for here
            warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks", UserWarning)
            yield

    def entered(self, module: torch.nn.Module) -> None:
        """Find the name of a module that is called."""
        if not _is_unseen():
            with self._lock:
                self._names.place(module)

    def left(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any, raised: bool) -> None:
        """Note what a module returned."""
        if raised or _is_unseen():
            return
        with self._lock:
            place = self._names.place(module)
            if place is None or (self._most_calls is not None and place.root.calls >= self._most_calls):
                return
            running = [each for each in modules.running if each in self._names.places]
            is_outermost = running[0] is module and not any(each is module for each in running[1:])
            if module._forward_hooks:
                self._hooked[place.name] = None
            policy = _policy_here(output)
            with untracked():
                self._note(module, place, (args, kwargs), output, policy)
                if is_outermost:
                    self._note_inputs(module, place.root, args, kwargs, policy)
            place.root.calls += is_outermost

    def _note(self, module: Any, place: ModulePath, given: Any, result: Any, policy: str) -> None:
        weights = tuple(dict.fromkeys(dtype_name(each.dtype) for each in module.parameters(recurse=place.is_compiled)))
        about = place.root.prefix, place.root.calls, 0, not list(module.children()), _floats(given), weights, policy, ()
        self._add(ModuleCall(place.name, type(module).__name__, *about), result)

    def _note_inputs(self, module: Any, root: Root, args: Any, kwargs: Any, policy: str) -> None:
        """Note what the outermost module was given, before what came of it."""
        call = ModuleCall(f"{root.prefix}{INPUTS}", "", root.prefix, root.calls, 0, False, (), (), policy, ())
        self._add(call, named_arguments(module, args, kwargs))

    def _add(self, call: ModuleCall, result: Any) -> None:
        found = list(named_tensors(result))
        if not found and result is not None and call.kind:
            self._opaque[call.module] = None
        at = len(self.calls)
        outputs = tuple(self._output(f"{at}.{number}", path, tensor) for number, (path, tensor) in enumerate(found))
        self.calls.append(replace(call, number=self._numbers[call.module], outputs=outputs))
        self._numbers[call.module] += 1
        self.rank = self.rank or file.rank()
        self._device = self._device or next((tensor.device.type for _, tensor in found), "")

    def _output(self, key: str, path: str, tensor: Tensor) -> Output:
        shape = () if tensor.is_nested else tuple(tensor.shape)
        said = Output(path, shape, dtype_name(tensor.dtype))
        if not _is_readable(tensor):
            self._unread += 1
            return said
        values = values_of(tensor)
        is_whole = values.nbytes <= MOST_BYTES or path in _PLACES
        if is_whole:
            self.tensors[key] = values.to("cpu").clone(memory_format=torch.contiguous_format)
        self._unkept += not is_whole
        return replace(said, bits=bits(values), is_whole=is_whole)

    def about(self) -> dict[str, str]:
        """Return what the file says of the program."""
        kinds = {call.kind: None for call in self.calls if not call.module and call.kind}
        return {"model": ", ".join(kinds) or self.calls[-1].kind, "device": self._device, **provenance()}

    def notes(self) -> list[str]:
        """Return what was not seen, and what was not kept."""
        notes = []
        seen = {call.module for call in self.calls if call.kind}
        places = list(self._names.places.items())
        inside = {place.name: f"{place.name}." if place.name else "" for _, place in places if place.is_compiled}
        inside = {name: begin for name, begin in inside.items() if not any(each != name and each.startswith(begin) for each in seen)}
        if inside:
            compiled = some([name or "the model" for name in inside])
            notes.append(f"{compiled} ran compiled by torch.compile, so only its output was recorded, not the modules inside it")
        others = [place.name for module, place in places if place.name not in seen and list(module.parameters(recurse=False))]
        unseen = [name for name in others if not name.startswith(tuple(inside.values()))]
        uncalled = "with weights not called as module(...): compiled code, a fused kernel or a parent uses the weights itself"
        for names, said in (
            (unseen, uncalled),
            (list(self._hooked), "with forward hooks, recorded before these ran"),
            (list(self._opaque), "returned no tensor, nor a tuple, list, dict or dataclass with one"),
        ):
            notes += [f"{count(len(names), 'module')} {said}: {some([name or 'the model' for name in names])}"] if names else []
        if self._unkept:
            notes.append(f"the values of {count(self._unkept, 'output')} are not stored, because they are larger than {size(MOST_BYTES)}")
        if self._unread:
            why = "on the meta device, sharded, sparse, or under torch.func"
            notes.append(f"the values of {count(self._unread, 'output')} can't be read: {why}")
        return notes


def named_tensors(value: Any, path: str = "", inside: tuple[Any, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in what a module returns or is given, each with its path: keys, fields and positions, with dots between them.

    What holds itself is gone through once; `inside` is what holds `value`.
    """
    if isinstance(value, Tensor):
        yield path, value
        return
    if any(each is value for each in inside):
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = zip(value._fields, value, strict=True)
    elif isinstance(value, (tuple, list)):
        items = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        items = ((each.name, getattr(value, each.name, None)) for each in fields(value))
    for key, item in items:
        yield from named_tensors(item, f"{path}.{key}" if path else str(key), (*inside, value))


def _floats(given: Any) -> tuple[str, ...]:
    """Return the dtypes of the floating tensors; of all where none is floating."""
    found = [tensor for _, tensor in named_tensors(given)]
    floating = [tensor for tensor in found if tensor.is_floating_point() or tensor.is_complex()]
    return tuple(dict.fromkeys(dtype_name(tensor.dtype) for tensor in floating or found))


def _policy_here(result: Any) -> str:
    """Return the policy active, or torch.autocast's context; "" for none."""
    policy = current_state().user_policy
    if policy is not None:
        return str(policy.name)
    device = next((tensor.device.type for _, tensor in named_tensors(result)), "cpu")
    is_autocast = device != "meta" and torch.is_autocast_enabled(device)
    return f"torch.autocast {dtype_name(torch.get_autocast_dtype(device))}" if is_autocast else ""


def _is_readable(tensor: Tensor) -> bool:
    """Return True if torch gives the values here and now."""
    if not has_values(tensor) or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or not in_plain_autograd():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _is_unseen() -> bool:
    """Return True if the call isn't one of the program's: compiled without the hooks, traced, or recomputed by a checkpoint."""
    return torch.compiler.is_compiling() or graph_task() >= 0 or trace_here() is not None
