"""How a CPU without instructions for a low-precision dtype multiplies."""

from .core import tables
from .core.rules import emulation

__all__ = ["set_low_kernels"]


def set_low_kernels(choice: str) -> str:
    """Choose how the CPU computes matrix products, convolutions and recurrent ops in bfloat16 and float16. Return the choice before.

    Where a processor has no instructions for a low-precision dtype, torch's kernels for it take 10 to 90 times float32's time. hmp then
    rounds the inputs to the low-precision dtype, computes in float32 and rounds the result: the numbers of an accelerator, at about
    float32's speed. Gradients are computed likewise. The choice holds for the process, and policies in use follow it at once; it overrides
    HMP_LOW_KERNELS.

    Args:
        choice: "auto", the default, does so for each dtype that the processor has no instructions for. "native" always uses torch's
            kernels, bit for bit as torch.autocast does. "float32" never does, whatever the processor has.

    Returns:
        The choice that was in effect before.

    Raises:
        HmpError: `choice` isn't one of the three.

    Example:
        >>> before = hmp.low_kernels.set_low_kernels("native")
        >>> hmp.low_kernels.set_low_kernels(before)
        'native'
    """
    with tables.lock:
        computed_before = emulation.computed_in_float32()
        before = emulation.choose(choice)
        if emulation.computed_in_float32() != computed_before:
            tables.decide_anew()
        return before
