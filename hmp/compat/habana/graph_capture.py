"""The capture of an HPUGraph: records every kernel that a step calls, in forward, backward and optimizer.

It raises where a replay would compute something else: Python reads values, random numbers are seeded, processes communicate.
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
from ...core.compiler_stance import running_uncompiled
from .device_map import actual_device
from .graph_replay import Captured, OptimizerSteps, RecordedKernel, Tensors, place, same_memory
from .replacements import AttributeReplacements

_aten = torch.ops.aten
# their results have no values yet
_UNFILLED = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty, _aten.new_empty_strided}
# besides those with a tag: the only kernel of `if tensor` in inference mode, and ops whose C++ reads lengths
_READING = {_aten.is_nonzero, _aten._pack_padded_sequence, _aten._ctc_loss}
# functions that read a tensor's values without a kernel: owner, name, and a test of the arguments
_READERS: tuple[tuple[Any, str, Callable[..., bool]], ...] = (
    *((torch.Tensor, name, lambda *given: True) for name in ("tolist", "numpy", "__array__", "__dlpack__")),
    *((owner, "tensor_split", lambda *given: next(each_tensor(given), None) is not None) for owner in (torch, torch.Tensor)),
)


class GraphCapture(TorchDispatchMode):
    """Records the calls between `open()` and `close()`, in this thread and in that of backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[RecordedKernel] = []
        self._made: set[int] = set()
        self._tensors = Tensors()
        self._optimizers = OptimizerSteps()
        self._random = _Random()
        self._open = contextlib.ExitStack()

    def open(self) -> None:
        """Begin to record."""
        # a replay would not repeat casts that were cached before
        hmp.clear_cache()
        torch.clear_autocast_cache()
        with contextlib.ExitStack() as stack:
            if "torch._dynamo" in sys.modules:
                stack.enter_context(running_uncompiled())  # compiled kernels bypass the dispatcher
            stack.enter_context(_no_readers())
            stack.callback(register_optimizer_step_pre_hook(lambda optimizer, *_: self._optimizers.begins(optimizer)).remove)
            stack.callback(register_optimizer_step_post_hook(lambda optimizer, *_: self._optimizers.ended(optimizer)).remove)
            stack.enter_context(self)
            self._open = stack.pop_all()

    def close(self) -> None:
        """End the recording."""
        self._open.close()
        torch.clear_autocast_cache()

    def captured(self) -> Captured:
        """Return the recorded step. Raise HmpError if a replay could not repeat it."""
        self._tensors.close()
        self._optimizers.close()
        return Captured(self._calls, self._tensors, self._optimizers)

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the kernel and record the call."""
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
                raise HmpError(
                    f"HPUGraph: expected strided tensors, got one of layout {tensor.layout} in {func}; leave it out of the graph"
                )
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
            self._calls.append(RecordedKernel(func, *taken, tuple(same_memory(new)), torch.is_inference_mode_enabled()))

    def _note_constant(self, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().resizable():  # memory of NumPy's is not resizable
            self._made.add(place(tensor))
            # a later call may write to it: a replay begins with these numbers
            numbers = (tensor.clone(),)
            self._calls.append(RecordedKernel(_aten.alias.default, numbers, {}, (same_memory(tensor),), torch.is_inference_mode_enabled()))


class _Random:
    """Checks that no generator is seeded between two draws, which a replay would not do."""

    def __init__(self) -> None:
        self._states = {device: _random_state(device) for device in {torch.device("cpu"), actual_device()}}

    @contextlib.contextmanager
    def drawing(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Run a kernel inside the context. Raise HmpError if a replay would draw other numbers."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            yield
            return
        if any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
            raise HmpError(f"HPUGraph: {func} expected torch's default generator, got another one; draw these numbers before replay()")
        for device, state in self._states.items():
            if not torch.equal(state, _random_state(device)):
                raise HmpError(
                    f"HPUGraph: the generator of {str(device)!r} was seeded in the capture (gradient checkpointing does that, too), and a "
                    "replay seeds nothing; seed before replay(), and use checkpointing without dropout or with preserve_rng_state=False"
                )
        yield
        self._states = {device: _random_state(device) for device in self._states}


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _check(func: Any, types: tuple[Any, ...], args: tuple[Any, ...]) -> None:
    """Raise HmpError for a kernel that a replay could not call in the same way."""
    own = [each for each in types if each.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__]
    if own:
        raise HmpError(
            f"HPUGraph: expected plain tensors, got a {own[0].__name__} in {func}, whose Python a replay does not run; leave it out of "
            "the graph"
        )
    if func.namespace in {"c10d", "_c10d_functional"}:
        raise HmpError(f"HPUGraph: {func} communicates with other processes, which a replay does not do; reduce gradients after replay()")
    if torch.Tag.data_dependent_output in func.tags or func.overloadpacket in _READING:
        _refuse_reading(func)
    by_numbers = func is _aten.index.Tensor and not any(each.dtype in (torch.bool, torch.uint8) for each in each_tensor(args[1]))
    if torch.Tag.dynamic_output_shape in func.tags and not by_numbers:
        raise HmpError(
            f"HPUGraph: the output shape of {func} depends on values, which change in a replay; multiply by the mask, use torch.where(), "
            "or leave that part of the step out of the graph"
        )


def _written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a kernel writes to, as its schema declares."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from each_tensor((args[number] if number < len(args) else kwargs.get(argument.name),))


def _refuse_reading(func: Any) -> NoReturn:
    raise HmpError(
        f"HPUGraph: {func} gives a tensor's values to Python (.item(), if, print()), and a replay runs no Python; leave that out of the "
        "graph. For an optimizer that reads its step count use fused=True, or on accelerators capturable=True"
    )


@contextlib.contextmanager
def _no_readers() -> Iterator[None]:
    """Raise for functions of this thread that read a tensor without the dispatcher, inside the context."""
    thread, replaced = threading.get_ident(), AttributeReplacements()

    def refusing(name: str, original: Callable[..., Any], reads: Callable[..., bool]) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and reads(*args, *kwargs.values()):
                _refuse_reading(name)
            return original(self, *args, **kwargs)

        return function

    for owner, name, reads in _READERS:
        replaced.put(owner, name, refusing(name, getattr(owner, name), reads))
    try:
        yield
    finally:
        replaced.undo()
