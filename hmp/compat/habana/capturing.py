"""A step is captured while it runs: every kernel that it calls, in forward, backward and optimizer, is noted.

What a replay could not do right is an error here: values that Python reads, random numbers that were seeded, collectives.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import hmp

from ... import HmpError
from ...core.casting import each_tensor
from ...core.uncompiled import running_uncompiled
from .captured import Call, Captured, StepsOfOptimizers, Tensors, place, same_memory
from .device_map import standing
from .replacements import Replacements

_aten = torch.ops.aten
# what they give has no values yet
_UNFILLED = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty, _aten.new_empty_strided}
# besides those with a tag: what the whole of `if tensor` is in inference mode, and out of which torch's C++ reads lengths
_READING = {_aten.is_nonzero, _aten._pack_padded_sequence, _aten._ctc_loss}
# what gives a tensor's values to Python, or reads sizes out of it, without a kernel: owner, name, and whether a call does
_TELLING: tuple[tuple[Any, str, Callable[..., bool]], ...] = (
    *((torch.Tensor, name, lambda *given: True) for name in ("tolist", "numpy", "__array__", "__dlpack__")),
    *((owner, "tensor_split", lambda *given: next(each_tensor(given), None) is not None) for owner in (torch, torch.Tensor)),
)


class Capture(TorchDispatchMode):
    """The calls between `open()` and `close()` in this thread, and in backward's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[Call] = []
        self._made: set[int] = set()
        self._tensors = Tensors()
        self._optimizers = StepsOfOptimizers()
        self._random = _Random()
        self._open = contextlib.ExitStack()

    def open(self) -> None:
        """From here on everything is noted."""
        # casts that were made before would not be made again by a replay
        hmp.clear_cache()
        torch.clear_autocast_cache()
        with contextlib.ExitStack() as stack:
            if "torch._dynamo" in sys.modules:
                stack.enter_context(running_uncompiled())  # compiled kernels are called past the dispatcher
            stack.enter_context(_telling_no_values())
            stack.callback(register_optimizer_step_pre_hook(lambda optimizer, *_: self._optimizers.begins(optimizer)).remove)
            stack.callback(register_optimizer_step_post_hook(lambda optimizer, *_: self._optimizers.ended(optimizer)).remove)
            stack.enter_context(self)
            self._open = stack.pop_all()

    def close(self) -> None:
        """From here on nothing is."""
        self._open.close()
        torch.clear_autocast_cache()

    def captured(self) -> Captured:
        """What was noted. HmpError where a replay could not do the same."""
        self._tensors.close()
        self._optimizers.close()
        return Captured(self._calls, self._tensors, self._optimizers)

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the kernel and notes the call."""
        kwargs = dict(kwargs or {})
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        _check(func, types, args)
        taken = same_memory(args), same_memory(kwargs)
        with self._random.drawing(func, args, kwargs):
            result = func(*args, **kwargs)
        self._note(func, args, kwargs, taken, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, taken: tuple[Any, Any], result: Any) -> None:
        before, given = list(each_tensor((args, kwargs))), list(each_tensor((result,)))
        for tensor in (*before, *given):
            if tensor.layout is not torch.strided:
                raise HmpError(f"HPUGraph: {func} has a tensor of layout {tensor.layout}, and a replay fills strided ones alone")
        if func is _aten.lift_fresh.default:
            self._note_constant(given[0])
            return
        theirs = {place(tensor) for tensor in before}
        new = [tensor if tensor.numel() and place(tensor) not in theirs else None for tensor in given]
        self._made.update(place(tensor) for tensor in new if tensor is not None)
        for tensor in (*before, *given):
            if place(tensor):
                self._tensors.add(tensor, is_made=place(tensor) in self._made)
        for tensor in (*_written_by(func, args, kwargs), *each_tensor(new)):
            self._tensors.write(tensor)
        changes_nothing = func.is_view and not any(tensor is not None for tensor in new)
        if not (changes_nothing or func.overloadpacket in _UNFILLED or torch.Tag.inplace_view in func.tags):
            self._calls.append(Call(func, *taken, tuple(same_memory(new)), torch.is_inference_mode_enabled()))

    def _note_constant(self, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().resizable():  # else it is memory of NumPy's, and not of torch's making
            self._made.add(place(tensor))
            # a call may have written to it since: it gets its numbers again
            numbers = (tensor.clone(),)
            self._calls.append(Call(_aten.alias.default, numbers, {}, (same_memory(tensor),), torch.is_inference_mode_enabled()))


class _Random:
    """Whether the random numbers of a replay will be those that follow: between two draws nobody has set a generator."""

    def __init__(self) -> None:
        self._states = {device: _random_state(device) for device in {torch.device("cpu"), standing()}}

    @contextlib.contextmanager
    def drawing(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """The stretch in which a kernel runs. HmpError for one that draws other numbers than a replay would."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            yield
            return
        if any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
            raise HmpError(
                f"HPUGraph: {func} draws from a generator of its own, which a replay cannot know to be seeded; draw before replay()"
            )
        for device, state in self._states.items():
            if not torch.equal(state, _random_state(device)):
                raise HmpError(
                    f"HPUGraph: random numbers of {str(device)!r} were seeded in the capture (activation checkpoints do that, too), and a "
                    "replay seeds nothing; seed before replay(), and checkpoint without dropout or with preserve_rng_state=False"
                )
        yield
        self._states = {device: _random_state(device) for device in self._states}


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _check(func: Any, types: tuple[Any, ...], args: tuple[Any, ...]) -> None:
    """HmpError for a kernel whose call says nothing of what a replay would have to do."""
    own = [each for each in types if each.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__]
    if own:
        raise HmpError(
            f"HPUGraph: {func} has a {own[0].__name__}, whose own Python a replay would not run; capture a step on plain tensors"
        )
    if func.namespace in {"c10d", "_c10d_functional"}:
        raise HmpError(f"HPUGraph: {func} waits for other processes, which a replay does not; reduce gradients behind replay()")
    if torch.Tag.data_dependent_output in func.tags or func.overloadpacket in _READING:
        _refuse_reading(func)
    by_numbers = func is _aten.index.Tensor and not any(each.dtype in (torch.bool, torch.uint8) for each in each_tensor(args[1]))
    if torch.Tag.dynamic_output_shape in func.tags and not by_numbers:
        raise HmpError(
            f"HPUGraph: the shape of what {func} gives follows from values, which are others in a replay; multiply by the mask or use "
            "torch.where(), or leave that part of the step out of the graph"
        )


def _written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a kernel says that it writes to."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from each_tensor((args[number] if number < len(args) else kwargs.get(argument.name),))


def _refuse_reading(func: Any) -> NoReturn:
    raise HmpError(
        f"HPUGraph: {func} gives values to Python (.item(), if, print() and the like), and a replay runs no Python; leave that out of the "
        "graph. An optimizer that reads its number of steps is captured with fused=True, or on accelerators with capturable=True"
    )


@contextlib.contextmanager
def _telling_no_values() -> Iterator[None]:
    """A stretch in which what reads the memory of a tensor past the dispatcher is an error in this thread."""
    thread, replaced = threading.get_ident(), Replacements()

    def refusing(name: str, original: Callable[..., Any], reads: Callable[..., bool]) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and reads(*args, *kwargs.values()):
                _refuse_reading(name)
            return original(self, *args, **kwargs)

        return function

    for owner, name, reads in _TELLING:
        replaced.put(owner, name, refusing(name, getattr(owner, name), reads))
    try:
        yield
    finally:
        replaced.undo()
