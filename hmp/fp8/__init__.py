"""The FP8 list: matrix products in FP8, with scales from the tensor itself, whose gradients are products in FP8 too.

`why_not` says whether a call can run in FP8, and `PRODUCTS[op]` takes the call's own arguments and a recipe. The list that brings them to
policies is `listed.py`, which is imported when somebody asks for the kinds of lists.
"""

from . import fused_kernels
from .kernels import is_real
from .products import PRODUCTS
from .quantization import E4M3, RECIPES, Observer, Statistics
from .refusals import why_not

__all__ = ["E4M3", "PRODUCTS", "RECIPES", "Observer", "Statistics", "fused_kernels", "is_real", "why_not"]
