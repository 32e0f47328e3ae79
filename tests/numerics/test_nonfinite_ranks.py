"""A region of detect_nonfinite() beside others: what two real processes do is in tests/training/test_distributed.py."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

import hmp
from hmp.numerics import ranks


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """A store that this process shares with others, as far as it can tell."""
    found = dist.HashStore()
    monkeypatch.setattr(ranks, "default_store", lambda: found)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(ranks, "SAYS", 0.01)
    monkeypatch.setattr(ranks, "GOES_ON", 0.05)
    return found


def region(store: dist.Store) -> str:
    return f"hmp/nonfinite/{next(ranks._regions) + 1}"  # of the next one


def test_a_rank_that_does_not_come_is_waited_for_and_then_left(store: dist.Store, caplog: pytest.LogCaptureFixture) -> None:
    store.add(f"{region(store)}/entered", 1)
    with caplog.at_level(logging.WARNING, "hmp"), hmp.detect_nonfinite():
        torch.ones(2) + 1
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "at the end of detect_nonfinite(): waiting for other ranks, which are still inside",
        "going on without them: what they find is not told to this rank",
    ]


@hmp.detect_nonfinite()
def ends(by: BaseException) -> None:
    torch.log(-torch.ones(2))
    raise by


@pytest.mark.parametrize("end", [AssertionError("isnan"), SystemExit(0)])
def test_a_finding_is_raised_in_the_place_of_what_came_of_it(store: dist.Store, end: BaseException) -> None:
    with pytest.raises(hmp.NonFiniteError, match=r"^rank 3: `log` made NaN") as raised:
        ends(end)
    assert raised.value.__context__ is end
    assert raised.value.finding.rank == 3
    with pytest.raises(KeyboardInterrupt):  # the user's own
        ends(KeyboardInterrupt())


def test_the_step_that_ends_is_that_of_the_first_optimizer(store: dist.Store) -> None:
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]) for _ in range(2))
    done = 0

    @hmp.detect_nonfinite()
    def loop() -> None:
        nonlocal done
        for _ in range(5):
            first.step()
            second.step()
            done += 1
            if done == 2:
                torch.log(-torch.ones(2))

    with pytest.raises(hmp.NonFiniteError):
        loop()
    assert done == 3  # a whole step more, whose end is the first one's next
