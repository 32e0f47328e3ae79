"""`habana_frameworks.torch.hpu.graphs`: what would capture a model in a graph gives it back as it is."""

from __future__ import annotations

from typing import Any

from .nothing import does_nothing

__all__ = ["ModuleCacher", "make_graphed_callables", "wrap_in_hpu_graph"]

_WHY = "the model runs op by op"


def _first(first: Any, *args: Any, **kwargs: Any) -> Any:
    return first


def _model(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else kwargs["model"]


wrap_in_hpu_graph = does_nothing("wrap_in_hpu_graph", _WHY, lambda *args, **kwargs: args[0] if args else kwargs["module"])
make_graphed_callables = does_nothing("make_graphed_callables", _WHY, _first)


class ModuleCacher:
    """`ModuleCacher(...)(model, ...)` is the model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    __call__ = staticmethod(does_nothing("ModuleCacher", _WHY, _model))
