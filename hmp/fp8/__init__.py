"""Matrix products in FP8: quantisation with scales from the tensor itself, the product, and its gradients as products in FP8 too.

It knows no policies: a caller asks `why_not` whether a call can run in FP8, and runs `PRODUCTS[op]` with the call's own arguments and a
recipe.
"""

from .kernels import kernel_for
from .products import PRODUCTS
from .quantising import Layout, Quantised, quantise
from .recipes import RECIPES, Recipe
from .refusals import why_not
from .statistics import Statistics

__all__ = ["PRODUCTS", "RECIPES", "Layout", "Quantised", "Recipe", "Statistics", "kernel_for", "quantise", "why_not"]
