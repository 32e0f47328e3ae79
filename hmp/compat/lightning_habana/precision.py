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
    """HMPPrecision under Habana's name: `Trainer(plugins=[HPUPrecisionPlugin(device="hpu", precision="bf16-mixed")])`.

    `Trainer(accelerator="hpu", precision="bf16-mixed")` is the same.

    Args:
        precision: "bf16-mixed": the lists in the environment variables LOWER_LIST and FP32_LIST, else the policy "habana". "16-mixed": the
            same in float16, with a scaled loss. "32-true": no casts.
        device: Accepted for Habana's scripts; has no effect.

    Raises:
        HmpError: For any other precision.
    """

    def __init__(self, precision: str = "32-true", device: str = "hpu") -> None:
        if precision not in (*_FLOAT32, *_LOW):
            raise HmpError(
                f"precision= expected one of {', '.join((*_LOW, *_FLOAT32))}, got {precision!r}; for lists of your own use "
                "plugins=[HMPPrecision(policy)]"
            )
        self.device = device
        self._casts = precision in _LOW
        super().__init__(Policy.from_env().replace(dtype=_LOW[precision]) if self._casts else Policy.load("habana"))
        if not self._casts:
            self.precision = "32-true"

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Return a context in which the policy is active; with "32-true" it does nothing."""
        with super().forward_context() if self._casts else contextlib.nullcontext():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the policy and the state of the loss scaler, if there is one; {} with "32-true"."""
        return super().state_dict() if self._casts else {}
