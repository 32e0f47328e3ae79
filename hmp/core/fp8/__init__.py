"""Matrix products in FP8: quantisation with scales from the tensor itself, the product, and its gradients as products in FP8 too.

It knows no policies: a caller asks `why_not` whether a call can run in FP8, and runs `PRODUCTS[op]` with the call's own arguments and a
recipe.
"""

from . import fused_kernels
from .kernels import is_real
from .products import PRODUCTS
from .quantization import E4M3, RECIPES, Observer, Statistics
from .refusals import why_not

__all__ = ["E4M3", "PRODUCTS", "RECIPES", "Observer", "Statistics", "fused_kernels", "is_real", "why_not"]
