"""The ranks of a region with detect_nonfinite(), which stop together: a rank that raised alone would leave the others in a collective."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import NonFiniteError
from ..observing import log
from .collectives import default_store
from .finding import Finding

_regions = itertools.count()
# Seconds that a rank waits at the end of a region: until it says so, and until it goes on.
SAYS, GOES_ON = 10.0, 300.0


def rank_of_several() -> int | None:
    """The rank of this process, None where there is no other."""
    return torch.distributed.get_rank() if default_store() is not None else None


class Ranks:
    """One region on this rank. What it finds is in the default store at once, before any collective that brings it to others; all ranks
    then run on to the end of the next step, so that nobody waits for them, and stop there or at the end of the region.

    A step ends where the optimizer that stepped first in the region steps. Every rank comes through at least one collective with the rank
    that found something between two of its steps, so all of them know by then.
    """

    def __init__(self) -> None:
        self._key = ""
        self._steps = 0
        self._optimizer: weakref.ref[Any] | None = None
        self._published: Finding | None = None

    @contextlib.contextmanager
    def watch(self, stop: Callable[[Finding], None]) -> Iterator[None]:
        """The region. `stop`, which raises, is called on every rank with the finding that was first."""
        self._join()

        def step(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._optimizer = self._optimizer or weakref.ref(optimizer)
            if self._optimizer() is optimizer:
                found = self._first()
                if found is not None and self._steps >= found[0]:
                    stop(found[1])
                self._steps += 1

        hook = register_optimizer_step_pre_hook(step)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            hook.remove()
            # of a collective that another rank has left, or an assertion on what is NaN; an interrupt is the user's
            found = self._ended(waits=error is None) if error is None or isinstance(error, (Exception, SystemExit)) else None
            if found is not None and not isinstance(error, NonFiniteError):
                stop(found)

    def publish(self, finding: Finding) -> None:
        """Tells the other ranks, unless one of them was first."""
        store = self._join()
        self._published = finding
        if store is not None:
            message = pickle.dumps((self._steps + 1, finding)).hex()
            first = store.compare_set(f"{self._key}/first", "", message)  # which returns once it is written
            if first.decode() == message:
                log.error("%s; every rank stops at the end of its next step", str(finding).partition("\n")[0])

    def _first(self) -> tuple[int, Finding] | None:
        """The finding that was first on any rank, and after how many steps to stop."""
        store = self._join()
        if store is not None and store.check([f"{self._key}/first"]):
            after, finding = pickle.loads(bytes.fromhex(store.get(f"{self._key}/first").decode()))
            return after, finding
        return None if self._published is None else (self._steps, self._published)

    def _join(self) -> Any:
        """The store, once this rank is counted among those in the region; the group may be made inside of it."""
        store = default_store()
        if store is not None and not self._key:
            self._key = f"hmp/nonfinite/{next(_regions)}"
            store.add(f"{self._key}/entered", 1)
        return store

    def _ended(self, waits: bool) -> Finding | None:
        """The finding that was first, once all ranks have left the region: what they find after the last collective is a finding of all."""
        try:
            self._leave(waits)
            found = self._first()
        except torch.distributed.DistError:  # the process with the store has ended
            return self._published
        return None if found is None else found[1]

    def _leave(self, waits: bool) -> None:
        store = default_store()
        if store is None or not self._key:
            return
        left = store.add(f"{self._key}/left", 1)
        begin, has_said = time.monotonic(), False
        while waits and left < store.add(f"{self._key}/entered", 0):
            waited = time.monotonic() - begin
            if waited > SAYS and not has_said:
                has_said = True
                log.warning("at the end of detect_nonfinite(): waiting for other ranks, which are still inside")
            if waited > GOES_ON:
                log.warning("going on without them: what they find is not told to this rank")
                return
            time.sleep(0.001)
            left = store.add(f"{self._key}/left", 0)
