"""Functions of torch that take a device accept "hpu".

`torch.randn(..., device="hpu")` and its like, from Python, from C++ and under names that were taken before, end in a few kernels of the
device type. These are registered for "hpu": no Python function is patched, and a call without "hpu" costs nothing. Functions that refuse
"hpu" before torch's dispatcher get the mapped device from a patch. None of them is an op that a list can name, so hmp's patches are
elsewhere.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.utils._device
from torch import serialization
from torch.amp import autocast_mode
from torch.jit import _builtins

from .device_map import SOURCE, actual_device, mapped, named
from .replacements import AttributeReplacements

_Function = Callable[..., Any]


def install(replaced: AttributeReplacements) -> None:
    """Accept "hpu" until `replaced.undo()`."""
    _register_factories(replaced, "HPU")
    # a set of torch's own functions, filled at its first use
    torch.utils._device._device_constructors()
    for owner, name, position in _PATCHED:
        if hasattr(owner, name):
            original = getattr(owner, name)
            replaced.put(owner, name, scripted_as(original, _mapping(original, position), replaced))
    replaced.put(torch.Tensor, "pin_memory", _pin_memory(torch.Tensor.pin_memory))
    replaced.put(torch.Tensor, "hpu", _moving(SOURCE))
    replaced.put(torch.Tensor, "is_hpu", property(_is_hpu))
    replaced.put(torch.nn.Module, "hpu", _module_hpu)
    replaced.put(torch, "Generator", scripted_as(torch.Generator, _mapping_type(torch.Generator), replaced))
    replaced.put(autocast_mode.autocast, "__init__", _autocast(autocast_mode.autocast.__init__))
    for name in ("custom_fwd", "custom_bwd"):
        decorator = _mapping(getattr(autocast_mode, name), None, "device_type", to=_mapped_type)
        replaced.put(autocast_mode, name, decorator)
        replaced.put(torch.amp, name, decorator)
    _install_loading(replaced)


def install_cuda(replaced: AttributeReplacements) -> None:
    """Accept "cuda" too until `replaced.undo()`: the patches map it by now, torch's kernels and methods for it do not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a torch with CUDA has such kernels
        _register_factories(replaced, "CUDA")
    replaced.put(torch.Tensor, "cuda", _moving("cuda"))
    replaced.put(torch._C._nn, "_parse_to", _mapping(torch._C._nn._parse_to, 0))  # Module.to(0) refuses an index without an accelerator
    replaced.put(torch.amp.GradScaler, "__init__", _scaler(torch.amp.GradScaler.__init__))


def _register_factories(replaced: AttributeReplacements, key: str) -> None:
    # the overloads, not torch.empty and its like: under some policies those are patched
    aten = torch.ops.aten
    library = torch.library.Library("aten", "IMPL")
    replaced.on_undo(library._destroy)
    for name, overload in (
        ("empty.memory_format", aten.empty.memory_format),
        ("empty_strided", aten.empty_strided.default),
        ("tril_indices", aten.tril_indices.default),
        ("triu_indices", aten.triu_indices.default),
    ):
        library.impl(name, _on_mapped_device(overload), key)


def _on_mapped_device(overload: Any) -> Any:
    """Return a kernel for "hpu" that calls `overload` on the mapped device, without pinned memory."""

    def kernel(*args: Any, device: Any = None, pin_memory: Any = None, **options: Any) -> Any:
        return overload(*args, device=actual_device(device), **options)

    return kernel


# owner, function, position of the device (None: keyword-only)
_PATCHED: tuple[tuple[Any, str, int | None], ...] = (
    (torch, "tensor", None),
    (torch, "as_tensor", None),
    (torch, "asarray", None),
    (torch, "sparse_coo_tensor", None),
    (torch, "sparse_compressed_tensor", None),
    (torch, "sparse_csr_tensor", None),
    (torch, "sparse_csc_tensor", None),
    (torch, "sparse_bsr_tensor", None),
    (torch, "sparse_bsc_tensor", None),
    (torch.nested, "nested_tensor", None),
    (torch.nested, "as_nested_tensor", 2),
    (torch.Tensor, "new_tensor", None),
    (torch.Tensor, "to", 1),
    (torch.Tensor, "is_pinned", 1),
    # called by torch.set_default_device and `with torch.device(...)`
    (torch.utils._device.DeviceContext, "__init__", 1),
    # called by the storages' .hpu()
    (torch.storage._StorageBase, "to", None),
)


def scripted_as(original: Any, patch: Any, replaced: AttributeReplacements) -> Any:
    """Have torch.jit.script compile `patch` to the op of `original`, and return it: it knows ops by their functions."""
    ops: dict[int, str] = _builtins._get_builtin_table()
    op = ops.get(id(original))
    if op is not None:
        ops[id(patch)] = op
        replaced.on_undo(lambda: ops.pop(id(patch), None))
    return patch


def _mapping(original: _Function, position: int | None, name: str = "device", to: _Function = mapped) -> _Function:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if name in kwargs:
            kwargs[name] = to(kwargs[name])
        elif position is not None and len(args) > position:
            args = (*args[:position], to(args[position]), *args[position + 1 :])
        return original(*args, **kwargs)

    return call


def _pin_memory(original: _Function) -> _Function:
    @functools.wraps(original)
    def pin_memory(self: Any, device: Any = None) -> Any:
        pinning = mapped("cuda" if device is None else device)  # without a device it is CUDA's, in scripts that mean it
        if not isinstance(pinning, torch.device) or pinning is device:
            return original(self) if device is None else original(self, device)
        # memory on the CPU needs no pinned pages for a copy to the CPU
        return self if pinning.type == "cpu" else original(self)

    return pin_memory


def _moving(source: str) -> _Function:
    """Return the method of tensors that moves them to the device that `source` is mapped to."""

    def move(
        self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
    ) -> torch.Tensor:
        return self.to(_on(source, device), non_blocking=non_blocking, memory_format=memory_format)

    return cast(_Function, named(move, source, f'Return the tensor on the device that "{source}" is mapped to.'))


def _is_hpu(self: torch.Tensor) -> bool:
    """Return True if the tensor's device is an "hpu": False for one of the mapped device."""
    return self.device.type == SOURCE


def _module_hpu(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    """Move the module to the device that "hpu" is mapped to, and return it."""
    return self.to(_on(SOURCE, device))


def _on(source: str, device: Any) -> torch.device:
    return torch.device(source, device) if isinstance(device, int) else torch.device(source if device is None else device)


def _mapping_type(original: type[torch.Generator]) -> type:
    """Return a type that makes generators on the mapped device; isinstance() takes torch's own for its own."""

    class MappingType(type(original)):  # type: ignore[misc]  # some releases of torch give Generator a metaclass
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    def make(cls: type, device: Any = "cpu") -> torch.Generator:
        return original(mapped(device))

    return MappingType("Generator", (original,), {"__doc__": original.__doc__, "__module__": original.__module__, "__new__": make})


def _autocast(original: _Function) -> _Function:
    @functools.wraps(original)
    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None) -> None:
        device = mapped(device_type)
        if device is not device_type:
            # the default dtype of "hpu" is bfloat16, CUDA's is float16
            device_type, dtype = device.type, torch.bfloat16 if dtype is None else dtype
        original(self, device_type, dtype, enabled, cache_enabled)

    return init


def _scaler(original: _Function) -> _Function:
    @functools.wraps(original)
    def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        original(self, _mapped_type(device), *args, **kwargs)

    return init


def _mapped_type(kind: Any) -> Any:
    """Return the type of the device that "hpu" is mapped to, and any other value as it is."""
    device = mapped(kind)
    return device.type if isinstance(device, torch.device) else kind


def _install_loading(replaced: AttributeReplacements) -> None:
    """Have torch.load map "hpu", in map_location and in checkpoints that were saved on Gaudi."""
    registry: list[Any] = serialization._package_registry
    before = list(registry)

    def restore(storage: Any, location: str) -> Any:
        device = mapped(location)
        return None if device is location else serialization.default_restore_location(storage, str(device))

    serialization.register_package(0, lambda storage: None, restore)
    (entry,) = [each for each in registry if each not in before]
    replaced.on_undo(lambda: registry.remove(entry))
