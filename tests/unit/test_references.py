"""The search of all objects for names that were taken before leaves alone what other threads are making.

No public call shows when Python's objects are looked at.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from hmp.core.patching import names


@pytest.mark.slow
def test_tuples_that_other_threads_are_making_are_left_alone_by_the_search() -> None:
    """Python refuses to finish a tuple that somebody else refers to, and a list of all objects refers to it."""
    errors: list[BaseException] = []
    done = threading.Event()
    model = torch.nn.Identity()

    def work() -> None:
        try:
            while not done.is_set():
                assert len(tuple(x for x in range(40))) == 40
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        found = [names.instances(torch.nn.Module) for _ in range(5)]
    finally:
        done.set()
        for thread in threads:
            thread.join()
        gc.enable()
    assert all(any(o is model for o in each) for each in found)
    assert errors == []
