"""Habana's counts of what its graph compiler did, which are 0 here."""

from __future__ import annotations

from .nothing import does_nothing

__all__ = ["metric_global", "metric_localcontext"]


class _Metric:
    """What is counted."""

    def __init__(self, name: str) -> None:
        self.name = name

    def stats(self) -> list[tuple[str, int]]:
        """How often it happened and how long it took: never and not at all."""
        return [("TotalNumber", 0), ("TotalTime", 0), ("AvgTime", 0)]

    def reset(self) -> None:
        """Nothing."""

    def __enter__(self) -> _Metric:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


_WHY = "no graph is compiled, so that all counts are 0"
metric_global = does_nothing("metric_global", _WHY, _Metric)
metric_localcontext = does_nothing("metric_localcontext", _WHY, _Metric)
