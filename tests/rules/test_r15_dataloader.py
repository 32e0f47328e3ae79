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


class ByScore(torch.utils.data.Sampler):
    """A user's sampler that computes: its order is another one when the scores are rounded."""

    def __iter__(self):
        return iter(torch.argsort(torch.tensor([1.003, 1.002, 1.001, 1.0]) * 1.0, stable=True).tolist())


class Batches(ByScore):
    """The same as a batch sampler."""

    def __iter__(self):
        order = list(super().__iter__())
        yield from (order[:2], order[2:])


KINDS = [
    (Images(), {"collate_fn": collate}),
    *((dataset, options) for dataset in (Stream(), Plain()) for options in ({}, {"collate_fn": collate})),
    (Images(), {"sampler": ByScore()}),
    (Images(), {"batch_sampler": Batches(), "batch_size": 1}),
]


def _batches(dataset, options, workers=None):
    found = []
    more = {"num_workers": 1, "multiprocessing_context": workers} if workers else {}
    for batch in DataLoader(dataset, **{"batch_size": 2, **options, **more}):
        found.append(batch)
        if hmp.is_converted():
            assert torch.relu(torch.ones(1)).dtype == torch.bfloat16  # the loop's own code is cast
    assert len(found) == 2
    return found


@pytest.mark.parametrize("workers", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_r15_the_batches_are_those_without_hmp(workers):
    kinds = KINDS[:1] if workers == "spawn" else KINDS
    plain = [_batches(*kind) for kind in kinds]
    hmp.convert()
    same([_batches(*kind, workers) for kind in kinds], plain)


def test_r15_in_a_region_and_for_a_loader_made_before():
    plain = _batches(*KINDS[0])
    loader = DataLoader(Images(), batch_size=2, collate_fn=collate)
    persistent = DataLoader(
        Images(), batch_size=2, collate_fn=collate, num_workers=1, multiprocessing_context="fork", persistent_workers=True
    )
    with hmp.casts("habana"):
        same(list(loader), plain)
        same(list(persistent), plain)
    same(list(loader), plain)
    hmp.convert()
    same(list(loader), plain)
    same(list(persistent), plain)


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
