"""What tells, in a recording, a tensor that hmp has rounded to a low dtype from one that came so: from the caller, a hook or a wrapper."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..casting import castable, each_castable, each_tensor
from ..diagnostics import overriding
from ..formatting import dtype_name

LOW = frozenset(("bfloat16", "float16"))
_CASTS = frozenset(("to", "type", "type_as", "bfloat16", "half"))


class RoundedBefore:
    """Which inputs of a recorded op were rounded by somebody else than hmp.

    Until an op has first made a low dtype of float32, every tensor in a low dtype came so. From then on such a tensor may be of hmp's
    making; what a module's hook or a wrapper around a model (FSDP2, DeepSpeed) casts is not, and is noted.
    """

    def __init__(self) -> None:
        self._any_by_hmp = False
        self._others = WeakTensorKeyDictionary()

    def notice(self, given: tuple[Any, ...], result: Any) -> None:
        """Note a call that hmp decided."""
        if not self._any_by_hmp and _is_any_low(result):
            self._any_by_hmp = any(tensor.dtype is torch.float32 for tensor in each_castable(given))

    def notice_cast(self, name: str, given: tuple[Any, ...], result: Any) -> None:
        """Note a call of torch's function `name` where no list decides."""
        is_cast = name in _CASTS and given and _is_any_low(result) and castable(given[0]) and given[0].dtype is torch.float32
        if is_cast and overriding.is_around_a_forward():
            self._others[result] = True

    def before(self, given: tuple[Any, ...], result: Any) -> tuple[str, str]:
        """The low dtype that a weight or an input of the call came in, and which of them it was in words; "" for none."""
        results = list(each_tensor((result,)))
        lows = [each for each in each_castable(given) if dtype_name(each.dtype) in LOW and all(each is not one for one in results)]
        for tensor in lows:
            if isinstance(tensor, torch.nn.Parameter):
                return dtype_name(tensor.dtype), f"a weight that is stored in {dtype_name(tensor.dtype)}"
        for tensor in lows:
            if tensor in self._others:
                return dtype_name(tensor.dtype), f"a hook or a wrapper that casts its input to {dtype_name(tensor.dtype)}"
            if not self._any_by_hmp:
                return dtype_name(tensor.dtype), f"an input that came in {dtype_name(tensor.dtype)}"
        return "", ""


def _is_any_low(result: Any) -> bool:
    return any(dtype_name(tensor.dtype) in LOW for tensor in each_castable((result,)))
