"""On which stream ops on a tensor are queued."""

from __future__ import annotations

import torch

from ..torch_private import raw_cuda_stream

Tensor = torch.Tensor


def stream_of(tensor: Tensor) -> int | None:
    """Return the stream of this thread that ops on the tensor are queued on, None on the CPU and where a device has no streams."""
    if tensor.is_cuda:
        return int(raw_cuda_stream(tensor.device.index))
    if tensor.is_cpu or tensor.device.type == "xla":
        return None
    try:
        return int(torch.accelerator.current_stream(tensor.device).stream_id)
    except (RuntimeError, AttributeError, ValueError):  # another device is torch.accelerator's, or this one has none
        return None
