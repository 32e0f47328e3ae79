"""The page of the public names, each from its docstring, in groups."""

from __future__ import annotations

import hmp

_GROUPS = {
    "Cast": "apply remove casts convert revert Handle is_converted disable_casts enable_casts casts_enabled set_low_kernels",
    "Lists": "Policy policies explain Rule unreachable Unreachable fallbacks",
    "Your own functions": "bf16_function fp32_function promote_function register",
    "See what ran": "record Report summary",
    "Numbers": "compare verify detect_nonfinite",
    "Weights": "cast_weights",
    "Two programs": "capture Capture compare_captures",
    "Time and lists of your own": "benchmark tune",
    "Caches and memory": "cache_info set_cache_limit set_sharing clear_cache memory_stats",
    "Errors": "HmpError OpListError NonFiniteError ViolationError",
}
_BRIDGES = {
    "Lightning": "hmp.compat.lightning.HMPPrecision hmp.compat.lightning.DeviceStats",
    "transformers": "hmp.compat.transformers.HMPCallback",
    "Habana": "hmp.compat.habana.install hmp.compat.habana.uninstall hmp.compat.gaudi_config.apply",
}


def page() -> str:
    """A heading for each group, and under it each name with its signature and docstring."""
    grouped = [name for names in _GROUPS.values() for name in names.split()]
    if sorted(grouped) != sorted(set(hmp.__all__) - {"hmp"}):
        raise RuntimeError(f"the groups of the API page are not hmp's names: {set(grouped) ^ set(hmp.__all__) - {'hmp'}}")
    groups = {title: [_place(name) for name in names.split()] for title, names in _GROUPS.items()}
    groups |= {f"Bridge: {title}": names.split() for title, names in _BRIDGES.items()}
    parts = ["# API\n\nAll names of the first groups are `hmp.NAME`; the bridges stand in modules of their own.\n"]
    for title, places in groups.items():
        parts.append(f"## {title}\n")
        parts += [f"::: {place}\n" for place in places]
    return "\n".join(parts)


def _place(name: str) -> str:
    """Where the name is defined: mkdocstrings reads the source there."""
    found = getattr(hmp, name)
    module = found.__module__
    if module == f"hmp.{name}":  # hmp.tune and hmp.benchmark are functions and packages of one name
        return f"{module}.{name}"
    return f"{module}.{found.__qualname__}"
