"""How a CPU without instructions for a low-precision dtype multiplies."""

from .core.convert import set_low_kernels as set_low_kernels

__all__ = ["set_low_kernels"]
