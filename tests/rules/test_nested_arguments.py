"""Tensors inside the lists, tuples and dicts of a call are cast as if they stood alone, and what holds them keeps its type."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch

import hmp

BF16 = torch.bfloat16
Pair = namedtuple("Pair", "first second")


class Tensors(list):
    """A list with a constructor of its own."""

    def __init__(self, owner, values):
        super().__init__(values)
        self.owner = owner


class Outputs(OrderedDict):
    """What models give: the values are attributes too, and there is no update()."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args, **kwargs):
        raise TypeError("no update()")


@pytest.mark.parametrize(("cast", "dtype"), [("bf16", BF16), ("fp32", torch.float32), ("promote", torch.float32)])
def test_what_stands_in_a_dict_of_any_class_is_cast_as_it_counts_for_the_dtype(cast, dtype):
    class Mine:
        @staticmethod
        def product(items, other):
            seen.append((items, other))
            return items["x"] @ other

    x, other = torch.randn(4, 4).bfloat16(), torch.randn(4, 4)
    hmp.register(Mine, "product", cast)
    for kind in (dict, OrderedDict, lambda **items: defaultdict(list, items), Outputs):
        given, seen = kind(x=x, words="kept"), []
        with hmp.casts(hmp.Policy("mine")):
            got = Mine.product(given, other)
        # by hand
        assert torch.equal(got, x.to(dtype) @ other.to(dtype)) and got.dtype is dtype
        ((items, _),) = seen
        assert type(items) is type(given) and list(items) == ["x", "words"] and items["words"] == "kept"
        assert getattr(items, "x", items["x"]) is items["x"] and getattr(items, "default_factory", list) is list
        assert given["x"] is x  # what was given is not written into


def test_what_holds_a_tensor_keeps_its_type_and_what_holds_none_is_handed_on_itself():
    class Mine:
        @staticmethod
        def given(tree):
            seen.append(tree)
            return torch.ones(1)

    seen = []
    x, words = torch.ones(2), ["a", "b"]
    tree = [x, (x, 3), Pair(x, None), {"x": x, "words": words}, Tensors("me", [x]), torch.aminmax(x), words]
    hmp.register(Mine, "given", "bf16")
    with hmp.casts(hmp.Policy("mine")):
        Mine.given(tree)
    (got,) = seen
    assert type(got) is list and [type(each) for each in got[1:]] == [type(each) for each in tree[1:]]
    low = [got[0], got[1][0], got[2].first, got[3]["x"], got[4][0], got[5].max]
    assert [each.dtype for each in low] == [BF16] * 6
    assert got[1][1] == 3 and got[2].second is None and got[4].owner == "me" and got[6] is got[3]["words"] is words
    assert tree[0] is x and tree[4][0] is x and tree[3]["x"] is x  # what was given is not written into


def test_a_function_may_write_into_what_holds_no_tensor_to_cast():
    class Mine:
        @staticmethod
        def noting(tensors, notes):
            notes["seen"] = [t.dtype for t in tensors]
            return tensors[0]

    hmp.register(Mine, "noting", "bf16")
    notes = {}
    with hmp.casts(hmp.Policy("mine")):
        Mine.noting([torch.ones(2)], notes)
    assert notes == {"seen": [BF16]}
