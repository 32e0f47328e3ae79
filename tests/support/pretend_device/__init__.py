"""A pretend accelerator: the devices "pretend:0" and "pretend:1", with memory of their own, whose kernels are those of the CPU.

It has what a real accelerator has: a thread for backward, storages of its own with an allocator, copy-on-write marks (torch._lazy_clone)
that a write clears and a read keeps, autocast of its own lists, two devices, generators, pinned memory. `torch.pretend` is the device
module. It is C++, which set_up() compiles where this has not been done before; unavailable() says where that cannot be. What compiles it is
imported then, as it brings setuptools along.

What CUDA has and it lacks: torch lets no CPU tensor take over its memory, so Module.to("pretend") makes new Parameters, and
`parameter.data = ...` needs one that is on the device already; sparse and quantized tensors, process groups, graphs, concurrent streams.

It stays for the life of the process, and torch makes a thread for backward on each device at the first backward of all: set_up() before
that, in a process of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch

NAME = "pretend"
_MODULE = "pretend_c"
_FOLDER = Path(__file__).parent
_SOURCES = sorted(str(path) for path in _FOLDER.glob("*.cpp"))
_FLAGS = ["-O0", "-g0", "-w"]


def unavailable() -> str:
    """Why the device cannot be made here; "" where it can."""
    from torch.utils import cpp_extension

    if not sys.platform.startswith("linux"):
        return "the pretend device was only tried on Linux"
    if _library().exists():
        return ""
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return f"the pretend device needs a C++ compiler, and there is no {compiler}"
    if not cpp_extension.is_ninja_available():
        return "the pretend device needs ninja to be compiled, and there is none"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"the pretend device needs Python's headers to be compiled, and there is no {header}"


def set_up() -> types.ModuleType:
    """Registers the device, once in a process, and returns `torch.pretend`."""
    registered: types.ModuleType | None = getattr(torch, NAME, None)
    if registered is not None:
        return registered
    torch.utils.rename_privateuse1_backend(NAME)
    module = _device_module(_loaded())
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module


def _library() -> Path:
    """Where the compiled code of these sources is, or will be, for this torch and this Python."""
    from torch.utils import cpp_extension

    digest = hashlib.sha256("\0".join([torch.__version__, sys.version, *_FLAGS]).encode())
    for path in sorted(_FOLDER.glob("*.[ch]*")):
        digest.update(path.read_bytes())
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(root, f"{_MODULE}-{digest.hexdigest()[:16]}", f"{_MODULE}.so")


def _loaded() -> Any:
    """The compiled code. Processes that compile at the same time do so apart, so none waits for one that has been killed."""
    from torch.utils import cpp_extension

    library = _library()
    if library.exists():
        spec = importlib.util.spec_from_file_location(_MODULE, library, loader=ExtensionFileLoader(_MODULE, str(library)))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        module = cpp_extension.load(_MODULE, _SOURCES, extra_cflags=_FLAGS, build_directory=folder)
        os.replace(Path(folder, f"{_MODULE}.so"), library)
    return module


def _index(device: Any = None) -> int:
    """The number of a device: 1 for 1, "pretend:1" or torch.device("pretend", 1); of the current one for None, -1 and "pretend"."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return torch.pretend.current_device() if index is None or index < 0 else index  # type: ignore[attr-defined]


def _device_module(code: Any) -> types.ModuleType:
    """`torch.pretend`: what torch asks the module of a device, and the bytes of its memory under the names of torch.cuda."""

    @contextmanager
    def device(device: Any) -> Iterator[None]:
        before = code.current_device() if isinstance(device, int) and device < 0 else code.exchange_device(_index(device))
        try:
            yield
        finally:
            code.exchange_device(before)

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        code.default_generator(_index(device)).set_state(state)

    def manual_seed_all(seed: int) -> None:
        for index in range(code.device_count()):
            code.default_generator(index).manual_seed(seed)

    module: Any = types.ModuleType(f"torch.{NAME}", "The pretend device, of the tests.")
    module.__dict__.update(
        _initialized=True,
        is_initialized=lambda: True,
        is_available=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        device_count=code.device_count,
        current_device=code.current_device,
        set_device=lambda device: code.exchange_device(_index(device)),
        device=device,
        synchronize=lambda device=None: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        manual_seed=lambda seed: code.default_generator(code.current_device()).manual_seed(seed),
        manual_seed_all=manual_seed_all,
        get_rng_state=lambda device=None: code.default_generator(_index(device)).get_state(),
        set_rng_state=set_rng_state,
        memory_allocated=lambda device=None: code.live(_index(device)),
        max_memory_allocated=lambda device=None: code.peak(_index(device)),
        reset_peak_memory_stats=lambda device=None: code.reset_peak(_index(device)),
    )
    return module
