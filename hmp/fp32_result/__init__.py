"""Matrix products of inputs rounded to the low-precision dtype, with a result that stays in float32.

It knows no policies: a caller asks `why_not` whether a call can run so, and runs `PRODUCTS[op]` with the call's own arguments.
"""

from .products import PRODUCTS, needs_casts
from .refusals import why_not

__all__ = ["PRODUCTS", "needs_casts", "why_not"]
