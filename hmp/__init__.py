"""Mixed precision that you decide, op by op, from text files: Habana's op-casting model for PyTorch on any device."""

import importlib
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .benchmark import benchmark
    from .caches import cache_info, clear_cache, set_cache_limit, set_sharing
    from .captures.capture import Capture
    from .captures.compare import compare_captures
    from .captures.watching import capture
    from .context import casts_enabled, disable_casts, enable_casts
    from .diagnostics import Rule, Unreachable, explain, fallbacks, memory_stats, unreachable
    from .dispatch import bf16_function, fp32_function, promote_function
    from .errors import HmpError, NonFiniteError, OpListError, ViolationError
    from .lists import Policy, policies
    from .numerics.compare import compare
    from .numerics.nonfinite import detect_nonfinite
    from .numerics.summary import summary
    from .numerics.verify import verify
    from .numerics.weights import cast_weights
    from .report.record import record
    from .report.report import Report
    from .session import Handle, apply, casts, convert, is_converted, register, remove, revert, set_low_kernels
    from .tune import tune

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    from .errors import HmpError

    raise HmpError(
        "hmp needs Python's global interpreter lock, which this free-threaded Python runs without, and was not tried without it: start it "
        "with PYTHON_GIL=1 in the environment, or as python -X gil=1, or take a Python that is not free-threaded"
    )

__all__ = [
    "Capture",
    "Handle",
    "HmpError",
    "NonFiniteError",
    "OpListError",
    "Policy",
    "Report",
    "Rule",
    "Unreachable",
    "ViolationError",
    "apply",
    "benchmark",
    "bf16_function",
    "cache_info",
    "capture",
    "cast_weights",
    "casts",
    "casts_enabled",
    "clear_cache",
    "compare",
    "compare_captures",
    "convert",
    "detect_nonfinite",
    "disable_casts",
    "enable_casts",
    "explain",
    "fallbacks",
    "fp32_function",
    "hmp",
    "is_converted",
    "memory_stats",
    "policies",
    "promote_function",
    "record",
    "register",
    "remove",
    "revert",
    "set_cache_limit",
    "set_low_kernels",
    "set_sharing",
    "summary",
    "tune",
    "unreachable",
    "verify",
]

# Habana's scripts say `from habana_frameworks.torch.hpex import hmp`; `from hmp import hmp` reads the same
hmp = sys.modules[__name__]

# Where the names are. Nothing of this is imported before a name is asked for, so that `hmp -h` and pytest need not wait for torch; the
# first name brings all others but those that stand alone. The packages hmp.benchmark and hmp.tune come with it, for the functions whose
# names they share: each holds the function alone, and a call imports the rest.
_TOGETHER = {
    ".benchmark": "benchmark",
    ".caches": "cache_info clear_cache set_cache_limit set_sharing",
    ".context": "casts_enabled disable_casts enable_casts",
    ".diagnostics": "Rule Unreachable explain fallbacks memory_stats unreachable",
    ".dispatch": "bf16_function fp32_function promote_function",
    ".lists": "Policy policies",
    ".report.record": "record",
    ".report.report": "Report",
    ".session": "Handle apply casts convert is_converted register remove revert set_low_kernels",
    ".tune": "tune",
}
_ALONE = {
    ".captures.capture": "Capture",
    ".captures.compare": "compare_captures",
    ".captures.watching": "capture",
    ".errors": "HmpError NonFiniteError OpListError ViolationError",
    ".numerics.compare": "compare",
    ".numerics.nonfinite": "detect_nonfinite",
    ".numerics.summary": "summary",
    ".numerics.verify": "verify",
    ".numerics.weights": "cast_weights",
}
_HOME_OF = {name: module for module, names in (_TOGETHER | _ALONE).items() for name in names.split()}


class _BeforeItsNames(types.ModuleType):
    """hmp until its names are there. Importing hmp.tune or hmp.benchmark binds the package here: the name stays the function's."""

    def __setattr__(self, name: str, value: Any) -> None:
        taken = isinstance(value, types.ModuleType) and _HOME_OF.get(name) == f".{name}"
        super().__setattr__(name, getattr(value, name) if taken else value)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)  # what pickles modules by their type does not know this one


hmp.__class__ = _BeforeItsNames


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:  # a subpackage, as `from .. import fork_safe` asks for one
        if name.startswith("__") or importlib.util.find_spec(f"{__name__}.{name}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f".{name}", __name__)
    if module in _ALONE:
        _import(module)
    elif type(hmp) is types.ModuleType:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r} any more")
    else:
        for each in _TOGETHER:
            _import(each)
        hmp.__class__ = types.ModuleType
    return getattr(hmp, name)


def _import(module: str) -> None:
    """Imports the module and binds its public names here."""
    found = importlib.import_module(module, __name__)
    globals().update({name: getattr(found, name) for name in (_TOGETHER | _ALONE)[module].split()})


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
