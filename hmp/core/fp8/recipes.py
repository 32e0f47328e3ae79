"""The recipes: which format, which scales, and which of the three products of a training step run in FP8."""

from __future__ import annotations

from typing import NamedTuple

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 32  # elements that share a scale in MXFP8


class Recipe(NamedTuple):
    """How the three products of `left @ right` run: the result, the gradient of left, and the gradient of right.

    `scaling` says what shares one scale: "tensor", "row" (a row of a product's left operand, a column of its right operand) or "block"
    (32 elements of such a row or column). `scaling_of_right` is that of the right operand in the gradient of left. `power_of_two` rounds
    scales up to powers of two, `gradient` is the format of the result's gradient (left and right are float8_e4m3fn), and
    `right_gradient_low` leaves the gradient of right, the weight in most products, to the low dtype.
    """

    name: str
    scaling: str
    scaling_of_right: str
    power_of_two: bool
    gradient: torch.dtype
    right_gradient_low: bool = False

    @property
    def multiple(self) -> int:
        """What the inner and the outer dimension must be multiples of: kernels ask for 16, and both are cut into blocks in turn."""
        return BLOCK if self.scaling == "block" else 16


# The first three are torchao's of these names (Float8LinearConfig.from_recipe_name), the fourth is its MXFP8Linear.
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("tensorwise", "tensor", "tensor", power_of_two=False, gradient=E5M2),
        Recipe("rowwise", "row", "row", power_of_two=True, gradient=E4M3),
        Recipe("rowwise_with_gw_hp", "row", "tensor", power_of_two=True, gradient=E4M3, right_gradient_low=True),
        Recipe("mxfp8", "block", "block", power_of_two=True, gradient=E4M3),
    )
}
