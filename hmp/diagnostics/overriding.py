"""Who has the last word on an op here and now, in the place of the lists of the policy around it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..context import InBackward, Off, is_by_user, state
from ..torch_hooks import autocast, module_calls
from ..torch_private import is_any_autocast_enabled


class Overrider(NamedTuple):
    """`kind` is "region" (an enabled region of torch.autocast), "island" (a disabled one), "disable_casts" or "backward"; `words` say
    which, with the line that opened a region."""

    kind: str
    words: str


def over_casts() -> Overrider | None:
    """Who casts once more what hmp has cast: a region of torch.autocast; None for nobody."""
    return Overrider("region", f"torch.autocast, enabled{_opened(enabled=True)}") if is_any_autocast_enabled() else None


def overridden(running: Iterable[torch.nn.Module]) -> Any:
    """The policy in whose place casts are off here, inside calls of the modules `running`, outermost first; None for none."""
    here = state.current_state()
    return module_calls.policy_if_casts_were_on(here, running) if isinstance(here, Off) else None


def in_place_of_casts() -> Overrider | None:
    """Who has switched casts off; None where they are on, and where hmp did for torch's own code (R8, R15): no list speaks of that."""
    here = state.current_state()
    if isinstance(here, autocast.Paused):
        return Overrider("island", f"torch.autocast(enabled=False){_opened(enabled=False)}") if here.disabled else None
    if isinstance(here, InBackward):
        return Overrider("backward", "autograd's backward: no list applies to Python that it calls (R13)")
    return Overrider("disable_casts", "disable_casts()") if here.disabled and is_by_user() else None


def _opened(enabled: bool) -> str:
    place = autocast.opened_at(enabled)
    return f" at {place}" if place else ""
