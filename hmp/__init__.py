"""Mixed precision that you decide, op by op, from text files: Habana's op-casting model for PyTorch on any device."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from .benchmark import benchmark
from .caches import cache_info, clear_cache, set_cache_limit
from .context import casts_enabled, disable_casts, enable_casts
from .diagnostics import Rule, Unreachable, explain, fallbacks, memory_stats, unreachable
from .dispatch import bf16_function, fp32_function, promote_function
from .errors import HmpError, NonFiniteError, OpListError
from .lists import Policy, policies
from .report.record import record
from .report.report import Report
from .session import Handle, apply, casts, convert, is_converted, register, remove, revert
from .tune import tune
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .numerics.compare import compare
    from .numerics.nonfinite import detect_nonfinite

__all__ = [
    "Handle",
    "HmpError",
    "NonFiniteError",
    "OpListError",
    "Policy",
    "Report",
    "Rule",
    "Unreachable",
    "apply",
    "benchmark",
    "bf16_function",
    "cache_info",
    "casts",
    "casts_enabled",
    "clear_cache",
    "compare",
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
    "tune",
    "unreachable",
]

# Habana's scripts say `from habana_frameworks.torch.hpex import hmp`; `from hmp import hmp` reads the same
hmp = sys.modules[__name__]

# imported when they are first asked for: scripts that look at no numbers do not wait for them
_LATER = {"compare": ".numerics.compare", "detect_nonfinite": ".numerics.nonfinite"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_LATER[name], __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
