"""``hmp run --verify``: the first steps of a script are recorded, and every call in them must run as the line of its list says."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import hmp

STEPS = 3


@contextlib.contextmanager
def verified_steps() -> Iterator[None]:
    """Records until an optimizer has made `STEPS` steps, or until the end; raises ViolationError there, in the script's own step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook  # here: other runs need not wait for torch

    from ..core.torch_private import function_modes

    with contextlib.ExitStack() as recording:
        report = recording.enter_context(hmp.record())
        steps, modes = 0, function_modes()

        def finish() -> None:
            hook.remove()
            recording.close()
            report.verify()
            calls = sum(row.calls for row in report.rows if row.source)
            print(f"hmp run: verified: {calls} calls in {steps} steps followed their lists{report.never_called_notice}", file=sys.stderr)

        def stepped(*_: Any) -> None:
            nonlocal steps
            steps += 1
            if steps >= STEPS and function_modes() == modes:  # else a mode of the script's is in the way
                finish()

        hook = register_optimizer_step_post_hook(stepped)
        recording.callback(hook.remove)
        yield
        if report.is_recording:
            finish()
