"""`habana_dataloader`: torch's DataLoader, in the place of the one that decodes on Gaudi."""

from __future__ import annotations

from typing import Any

import torch.utils.data

__all__ = ["HabanaDataLoader"]


class HabanaDataLoader(torch.utils.data.DataLoader[Any]):
    """torch's DataLoader."""
