"""Mixed precision that you decide, op by op, from text files: Habana's op-casting model for PyTorch on any device."""

import gc
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from .core import lists as _lists
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .core.active.regions import disable_casts as disable_casts, enable_casts as enable_casts
    from .core.active.state import casts_enabled as casts_enabled
    from .core.apply import apply as apply, remove as remove
    from .core.convert import casts as casts, convert as convert, is_converted as is_converted, revert as revert
    from .core.copies import clear_cache as clear_cache
    from .core.policy.policy import Policy as Policy
    from .core.policy.presets import policies as policies
    from .core.rules.kernels import fallbacks as fallbacks
    from .core.user_ops import (
        bf16_function as bf16_function,
        fp32_function as fp32_function,
        promote_function as promote_function,
        register as register,
    )
    from .errors import HmpError as HmpError, NonFiniteError as NonFiniteError
    from .tools.benchmark import benchmark as benchmark
    from .tools.cast_weights import cast_weights as cast_weights
    from .tools.compare.compare import compare as compare
    from .tools.explain import explain as explain
    from .tools.nonfinite.detect import detect_nonfinite as detect_nonfinite
    from .tools.record.recorder import record as record, verify as verify
    from .tools.summary import summary as summary
    from .tools.traces.capture import capture as capture
    from .tools.traces.compare import compare_captures as compare_captures
    from .tools.tune.search import tune as tune
    from .tools.unreachable import unreachable as unreachable

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    from .errors import HmpError

    raise HmpError(
        "expected a Python with a global interpreter lock (GIL), got a free-threaded one that runs without it, which hmp is not tested "
        "with; set PYTHON_GIL=1 in the environment, start python -X gil=1, or use a Python that is not free-threaded"
    )

# Habana's scripts write `from habana_frameworks.torch.hpex import hmp`; `from hmp import hmp` works in the same way
hmp = sys.modules[__name__]

_lists.provide("hmp.core.rules.registry", "hmp.fp8.listed", "hmp.fp32_result.listed", "hmp.packing.listed")

# The module of each public name, imported when one of its names is used: `hmp -h` and pytest need not wait for torch.
_NAMES = {
    ".core.active.regions": "disable_casts enable_casts",
    ".core.active.state": "casts_enabled",
    ".core.apply": "apply remove",
    ".core.copies": "clear_cache",
    ".core.convert": "casts convert is_converted revert",
    ".core.policy.policy": "Policy",
    ".core.policy.presets": "policies",
    ".core.rules.kernels": "fallbacks",
    ".core.user_ops": "bf16_function fp32_function promote_function register",
    ".errors": "HmpError NonFiniteError",
    ".tools.benchmark": "benchmark",
    ".tools.cast_weights": "cast_weights",
    ".tools.compare.compare": "compare",
    ".tools.explain": "explain",
    ".tools.nonfinite.detect": "detect_nonfinite",
    ".tools.record.recorder": "record verify",
    ".tools.summary": "summary",
    ".tools.traces.capture": "capture",
    ".tools.traces.compare": "compare_captures",
    ".tools.tune.search": "tune",
    ".tools.unreachable": "unreachable",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [name for name in _MODULE_OF if name != "clear_cache"]  # listed in hmp.memory, and found here, too


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is not None:
        found = _imported(module)
        globals().update({each: getattr(found, each) for each in _NAMES[module].split()})
        return globals()[name]
    if name.startswith("__") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)  # a subpackage: `from .. import core`


def _imported(module: str) -> Any:
    """Return the module, imported without a garbage collection: that of all torch's objects takes twice as long as the import."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module, __name__)
    finally:
        if was_enabled:
            gc.enable()


def __dir__() -> list[str]:
    return sorted(__all__)
