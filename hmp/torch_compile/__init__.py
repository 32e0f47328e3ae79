"""torch.compile and strict export see what hmp has decided."""

from . import bridge

__all__ = [
    "bridge",
]
