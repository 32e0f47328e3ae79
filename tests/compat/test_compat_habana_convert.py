"""The shim and convert() in every order: casts happen, devices are mapped, and either goes without the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

import hmp
from hmp.compat import habana


@pytest.fixture(autouse=True)
def no_shim_is_left() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # hmp and the shim say so where they stand in each other's way
        if torch.__version__ < (2, 13):
            warnings.filterwarnings("ignore", r"hmp does not know the torch\.compile", RuntimeWarning)
        yield
        habana.uninstall()


def is_mapped() -> bool:
    try:
        made = (
            torch.zeros(1, device="hpu"),
            torch.tensor([1.0], device="hpu"),
            torch.ones(1).to("hpu"),
            torch.full_like(made_of, 1.0, device="hpu"),
            torch.take(made_of, torch.zeros(1, dtype=torch.int32)),
            made_of.index_fill(0, index=torch.zeros(1, dtype=torch.int32), value=0.0),
        )
    except (RuntimeError, ImportError, IndexError):
        return False
    return all(each.device.type == "cpu" for each in made)


made_of = torch.ones(2, 2)


def is_cast(policy: str) -> bool:
    index, low = torch.zeros(1, dtype=torch.int64), made_of.bfloat16()
    # of O2 also what stands where the shim has its own functions
    indexed = {each.dtype for each in (torch.take(low, index), low.take(index), low.index_fill(0, index, 0.0))}
    cast = F.linear(made_of, made_of).dtype is torch.bfloat16
    assert indexed == {torch.float32 if cast and policy == "habana-o2" else torch.bfloat16}
    return cast


@pytest.mark.parametrize("order", ["install convert uninstall revert", "convert install revert uninstall"])
def test_r16_in_every_order(order: str, torch_differences: Callable[[], list[str]]) -> None:
    policy = "habana-o2"
    mapped = cast = False
    for step in order.split():
        if step == "install":
            mapped, _ = True, habana.install("cpu")
        elif step == "convert":
            cast, _ = True, hmp.convert(policy=policy)
        elif step == "uninstall":
            mapped, _ = False, habana.uninstall()
        else:
            cast, _ = False, hmp.revert()
        assert (is_mapped(), is_cast(policy)) == (mapped, cast), step
    assert torch_differences() == []


def test_autocast_means_gaudis_list_under_the_shim_and_torchs_again_behind_it() -> None:
    x = torch.ones(2, 2)

    def dtypes() -> tuple[torch.dtype, torch.dtype]:
        with hmp.casts("autocast"):
            return (x * x).dtype, (x @ x).dtype

    with habana.install("cpu"):
        with hmp.casts(hmp.Policy.load("gaudi")):
            gaudis = (x * x).dtype, (x @ x).dtype
        assert dtypes() == gaudis
    assert dtypes() == (torch.float32, torch.bfloat16) != gaudis
