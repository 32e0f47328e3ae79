"""Matrix products of inputs rounded to the low-precision dtype, with a result that stays in float32.

`why_not` says whether a call can run so, and `PRODUCTS[op]` takes the call's own arguments. The list that brings them to policies is
`listed.py`, which is imported when somebody asks for the kinds of lists.
"""

from .products import PRODUCTS, needs_casts
from .refusals import why_not

__all__ = ["PRODUCTS", "needs_casts", "why_not"]
