"""An accelerator made of Python: a device with a backward thread of its own, whose kernels are those of the CPU.

torch gives backends that are not part of it the device type PrivateUse1. Here it is named "pydev": its tensors are real ones (of type
torch.Tensor, with gradients), every op goes through one fallback that runs it on the CPU tensors behind them, and autograd runs
their backward on the device's own thread, as it does on every accelerator. Registered for the life of the process: to be
used in a process of its own.
"""

from __future__ import annotations

import functools
import threading
import types
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

NAME = "pydev"
# torch 2.10 and later can register a backend from Python
AVAILABLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
MAIN = threading.get_ident()

# the CPU memory behind each storage of the device; the storage is kept, so that its address is not given out again
_behind: dict[int, tuple[torch.Tensor, Any]] = {}
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_aten = torch.ops.aten
_library: Any = None
_aten_library: Any = None


def set_up() -> None:
    """Registers the device."""
    global _library, _aten_library
    module: Any = types.SimpleNamespace(
        is_initialized=lambda: True,
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        get_rng_state=lambda *device: torch.get_rng_state(),
        set_rng_state=lambda state, *device: torch.set_rng_state(state),
    )
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=module)
    _library, _aten_library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _library.fallback(_run, "PrivateUse1")
    for op, kernel in _OWN_KERNELS.items():
        _aten_library.impl(op, kernel, "PrivateUse1")


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf on the device with the values of `tensor`, which wants a gradient where that does."""
    return _wrapped(tensor.detach()).requires_grad_(tensor.requires_grad)


def to_cpu(value: Any) -> Any:
    """What is behind a tensor of the device, as a view of the same memory; other values as they are."""
    if isinstance(value, torch.Tensor) and value.device.type == NAME:
        memory, _ = _behind[value.untyped_storage()._cdata]
        return memory.as_strided(value.size(), value.stride(), value.storage_offset())
    return torch.device("cpu") if isinstance(value, torch.device) else value


def on_main_thread() -> bool:
    return threading.get_ident() == MAIN


def _wrapped(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    tensor = torch._C._acc.create_empty_tensor(tuple(value.shape), value.dtype)
    storage = tensor.untyped_storage()
    _behind[storage._cdata] = value.clone(memory_format=torch.contiguous_format), storage
    return tensor


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Every kernel of the device."""
    if op is _aten._copy_from.default:
        to_cpu(args[1]).copy_(to_cpu(args[0]))
        return args[1]
    if any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns):
        return op.redispatch(_META, *args, **kwargs)  # a view: nothing but sizes and strides
    cpu_args, cpu_kwargs = pytree.tree_map(to_cpu, (args, kwargs))
    result = op(*cpu_args, **cpu_kwargs)
    if not any(r.alias_info is not None for r in op._schema.returns):
        return pytree.tree_map(_wrapped, result)
    # autograd and the version counter stay as they are when a tensor takes over another one's memory
    for tensor, memory in zip(pytree.tree_leaves((args, kwargs)), pytree.tree_leaves((cpu_args, cpu_kwargs)), strict=True):
        if isinstance(tensor, torch.Tensor) and tensor.shape != memory.shape:  # an empty out= was resized
            tensor.data = _wrapped(memory)
    written = [
        kwargs[argument.name] if argument.name in kwargs else args[index]
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return written[0] if len(written) == 1 else tuple(written)


def _convolution_backward(grad: Any, x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, *rest: Any) -> Any:
    return _run(_aten.convolution_backward.default, grad, x, weight, [grad.shape[1]], stride, padding, dilation, *rest)


# An error that passes through these is the refusal of a kernel, and a kernel is no user's Python (R11).
_run = types.FunctionType(_run.__code__, {**globals(), "__name__": "torch.python_device"}, "_run")

# torch has kernels of its own for every backend here, which refuse, decompose or resize
_OWN_KERNELS = {
    _aten.convolution_overrideable.default: functools.partial(_run, _aten.convolution.default),
    _aten.convolution_backward_overrideable.default: _convolution_backward,
    **{op: functools.partial(_run, op) for op in (
        _aten.native_layer_norm.default, _aten.native_group_norm.default,
    )},
}  # fmt: skip
