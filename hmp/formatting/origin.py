"""When a result was made, and with what."""

from __future__ import annotations

from datetime import datetime

import torch

from ..version import __version__


def provenance() -> dict[str, str]:
    """The date to the minute, in the time of this machine, and the versions of hmp and torch."""
    return {"date": f"{datetime.now():%Y-%m-%d %H:%M}", "hmp": __version__, "torch": torch.__version__}
