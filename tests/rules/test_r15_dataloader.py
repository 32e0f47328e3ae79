"""R15: datasets, collate functions and workers run without casts: the same batches with 0 workers, by fork and by spawn."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import hmp
from trap_kit import same


class Images(Dataset):
    """Items that are computed with listed ops; the dtype of each says whether casts were on."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        image = torch.arange(3.0) * 1.001 + index
        return torch.relu(image) / 255, torch.mm(image[None], image[:, None])[0, 0]

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Stream(IterableDataset):
    """The same items as a stream."""

    def __iter__(self):
        images = Images()
        for index in range(4):
            yield images[index]


class Plain(Dataset):
    """Items without __getitems__, which torch fetches one by one."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Images()[index]


def collate(items):
    """A user's collate function that computes."""
    images, products = zip(*items, strict=True)
    return torch.stack(images) * 1.003, torch.stack(products) / 3


def _batches(dataset, **options):
    found = []
    for batch in DataLoader(dataset, batch_size=2, **options):
        found.append(batch)
        if hmp.is_converted():
            assert torch.relu(torch.ones(1)).dtype == torch.bfloat16  # the loop's own code is cast
    return found


def _assert_same(ours, theirs):
    assert len(ours) == len(theirs) == 2
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip(a, b, strict=True):
            same(x, y)


WORKERS = {
    "0 workers": {},
    "fork": {"num_workers": 1, "multiprocessing_context": "fork"},
    "spawn": {"num_workers": 1, "multiprocessing_context": "spawn"},
}


@pytest.mark.parametrize("workers", ["0 workers", "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_r15_the_batches_are_those_without_hmp(workers):
    plain = _batches(Images(), collate_fn=collate)
    hmp.convert()
    _assert_same(_batches(Images(), collate_fn=collate, **WORKERS[workers]), plain)


def test_r15_every_kind_of_dataset_and_collate():
    cases = [(dataset, options) for dataset in (Stream, Plain) for options in ({}, {"collate_fn": collate})]
    plain = [_batches(dataset(), **options) for dataset, options in cases]
    hmp.convert()
    for (dataset, options), wanted in zip(cases, plain, strict=True):
        _assert_same(_batches(dataset(), **options), wanted)
    _assert_same(_batches(Stream(), **WORKERS["fork"]), plain[0])


def test_r15_in_a_region_and_for_a_loader_made_before():
    plain = _batches(Images(), collate_fn=collate)
    loader = DataLoader(Images(), batch_size=2, collate_fn=collate)
    persistent = DataLoader(
        Images(), batch_size=2, collate_fn=collate, num_workers=1, multiprocessing_context="fork", persistent_workers=True
    )
    with hmp.casts("habana"):
        _assert_same(list(loader), plain)
        _assert_same(list(persistent), plain)
    _assert_same(list(loader), plain)
    hmp.convert()
    _assert_same(list(loader), plain)
    _assert_same(list(persistent), plain)


class ByScore(torch.utils.data.Sampler):
    """A user's sampler that computes: its order is another one when the scores are rounded."""

    def __iter__(self):
        return iter(torch.argsort(torch.tensor([1.003, 1.002, 1.001, 1.0]) * 1.0, stable=True).tolist())


class Batches(ByScore):
    """The same as a batch sampler."""

    def __iter__(self):
        order = list(super().__iter__())
        yield from (order[:2], order[2:])


def test_r15_a_users_sampler_gives_the_same_order():
    plain = list(DataLoader(Images(), batch_size=2, sampler=ByScore()))
    hmp.convert()
    _assert_same(list(DataLoader(Images(), batch_size=2, sampler=ByScore(), **WORKERS["fork"])), plain)
    for options in ({"batch_size": 2, "sampler": ByScore()}, {"batch_sampler": Batches()}):
        _assert_same(list(DataLoader(Images(), **options)), plain)


def test_r15_an_exception_in_a_dataset_leaves_no_trace():
    class Broken(Plain):
        def __getitem__(self, index):
            raise KeyError(index)

    hmp.convert()
    with pytest.raises(KeyError):
        list(DataLoader(Broken()))
    assert hmp.casts_enabled()
    with hmp.disable_casts():
        with pytest.raises(KeyError):
            list(DataLoader(Broken()))
        assert not hmp.casts_enabled()
