"""`lightning_habana.pytorch.plugins.precision`: mixed precision by hmp's casts, under Habana's name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ... import HmpError, Policy
from ..lightning import HMPPrecision

_FLOAT32 = ("32-true", "32")
_LOW = {"bf16-mixed": torch.bfloat16, "bf16": torch.bfloat16, "16-mixed": torch.float16}


class HPUPrecisionPlugin(HMPPrecision):
    """`Trainer(plugins=[HPUPrecisionPlugin(device="hpu", precision="bf16-mixed")])`, and what `precision="bf16-mixed"` is on "hpu".

    "bf16-mixed" is HMPPrecision() with the policy of Habana's plugin: what LOWER_LIST and FP32_LIST name, else "habana". "16-mixed" is
    the same in float16, with a scaled loss. "32-true", the default, casts nothing. HmpError for any other precision.
    """

    def __init__(self, precision: str = "32-true", device: str = "hpu") -> None:
        if precision not in (*_FLOAT32, *_LOW):
            raise HmpError(
                f"precision={precision!r} is not one of those on 'hpu' here: {', '.join((*_LOW, *_FLOAT32))}; "
                "give one of them, or plugins=[HMPPrecision(policy)] for lists of your own"
            )
        self.device = device
        self._casts = precision in _LOW
        super().__init__(Policy.from_env().replace(dtype=_LOW[precision]) if self._casts else Policy.load("habana"))
        if not self._casts:
            self.precision = "32-true"

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """A region in which the policy is in force, and with "32-true" a region like any other."""
        with super().forward_context() if self._casts else contextlib.nullcontext():
            yield

    def state_dict(self) -> dict[str, Any]:
        """The policy, and the scaler's state where there is one; nothing with "32-true"."""
        return super().state_dict() if self._casts else {}
