"""The search of all objects asks none of them anything, leaves alone what other threads are making, and the garbage collector on."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import hmp
from hmp.core.patching import references
from process_kit import run_in_another_process

pytestmark = pytest.mark.usefixtures("libraries_are_searched")


@pytest.mark.slow
def test_a_proxy_is_not_asked_for_its_class_and_a_class_for_no_hash() -> None:
    run_in_another_process(
        """
        import functools
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.act = torch.tanh
        class Unhashable(type):  # a metaclass that says which classes are equal, and no more
            def __eq__(cls, other):
                return cls is other
        class OddModel(Model, metaclass=Unhashable):
            pass
        class Asked(metaclass=Unhashable):
            @property
            def __class__(self):
                raise AssertionError("asked for its class")
        class Claims:
            __class__ = property(lambda self: torch.nn.Module)
        proxies = Asked(), Claims()
        model, odd, held, x = Model(), OddModel(), functools.partial(torch.tanh), torch.ones(2)
        with hmp.convert(policy=hmp.Policy(name="low", bf16=frozenset(["tanh"]))):
            assert model.act(x).dtype is odd.act(x).dtype is held(x).dtype is torch.bfloat16
        assert model.act is odd.act is held.func is torch.tanh
        """
    )


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
        found = [references.partials_and_modules() for _ in range(5)]
    finally:
        done.set()
        for thread in threads:
            thread.join()
        gc.enable()
    assert all(any(o is model for o in each.modules) for each in found)
    assert errors == []


@pytest.mark.slow
@pytest.mark.parametrize("verbose", [False, True])
def test_an_interrupted_conversion_leaves_the_garbage_collector_on(verbose: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("disable", "enable"):
        done = getattr(gc, name)
        with monkeypatch.context() as patch:
            patch.setattr(gc, name, lambda done=done: (done(), interrupted()))
            with pytest.raises(KeyboardInterrupt):
                hmp.convert(policy=hmp.Policy(name="low", bf16=frozenset(["linear"])), verbose=verbose)
        assert gc.isenabled()
        hmp.revert()
