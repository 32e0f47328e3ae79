"""What few numbers tell of an output, and how names of one program are rewritten as another's.

No public call shows a hash or a renamed name alone.
"""

from __future__ import annotations

import hashlib

import pytest
import torch

from hmp.tools.traces.compare import renamer
from hmp.tools.traces.file import bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_the_hash_is_of_each_byte_and_its_place(dtype: torch.dtype) -> None:
    a = (torch.randn(4, 1000) > 0).to(dtype)
    other = a.clone()
    other[-1, -1] = 1 - a[-1, -1].int() if dtype is torch.bool else a[-1, -1] + 1
    assert bits(other) != bits(a) == bits(a.T.contiguous().T), "the order of elements counts, and not that of memory"
    assert bits(torch.empty(0)) and bits(torch.tensor(1.0)) == hashlib.blake2b(b"\0\0\x80\x3f", digest_size=16).hexdigest()


def test_a_prefix_is_put_on_and_taken_away() -> None:
    names = ["", "model", "model.layers.0.mlp", "lm_head", "(inputs)"]
    for rules, wanted in [
        (["model.*=*"], ["", "", "layers.0.mlp", "lm_head", "(inputs)"]),
        (["*=engine.*"], ["engine", "engine.model", "engine.model.layers.0.mlp", "engine.lm_head", "(inputs)"]),
        (["model.layers.*=transformer.h.*", "lm_head=head"], ["", "model", "transformer.h.0.mlp", "head", "(inputs)"]),
        (["model.*=*", "layers.*.mlp=h.*.ffn"], ["", "", "h.0.ffn", "lm_head", "(inputs)"]),
    ]:
        assert list(map(renamer(rules, names), names)) == wanted
