"""A model with a policy in another process: multiprocessing takes the policy along, a file does not and says so."""

from __future__ import annotations

import copy
import pickle
import textwrap
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from torch import nn

import hmp
from command_kit import python
from innermost_kit import BF16, F32, Head, X
from process_kit import ROOT, run_in_another_process

LISTS = hmp.Policy(bf16={"linear"}, fp32={"linear @ lm_head"}, name="head")


class OwnState(Head):
    def __setstate__(self, state):
        self.__dict__.update(state)


KINDS = {
    "own __setstate__": OwnState,
    "torch.compile": lambda: torch.compile(Head(), backend="eager"),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)),
}


def sent(model: nn.Module) -> nn.Module:
    """The model as another process gets it from multiprocessing."""
    return pickle.loads(ForkingPickler.dumps(model))


@pytest.mark.parametrize(
    "make", [pytest.param(make, marks=[pytest.mark.slow] * (name == "torch.compile"), id=name) for name, make in KINDS.items()]
)
def test_what_multiprocessing_sends_and_copies_have_the_policy(make, fresh_compiler):
    """Of modules of every make: some have their own idea of what a pickle or a copy holds."""
    model = hmp.apply(make(), hmp.Policy(bf16={"linear"}))
    arrived = sent(model)  # a lazy one before its first call, too
    for made in (model, arrived, sent(model), sent(arrived), copy.deepcopy(model), copy.copy(copy.deepcopy(model))):
        assert made(X).dtype is BF16
        assert hmp.remove(made)(X).dtype is F32
    assert sent(model)(X).dtype is F32  # removed
    hmp.revert()
    assert type(model) not in ForkingPickler._extra_reducers


def test_a_graph_of_torch_fx_is_not_sent():
    model = hmp.apply(torch.fx.symbolic_trace(Head()), hmp.Policy(bf16={"linear"}))
    with pytest.raises(hmp.HmpError, match=r"torch.fx.GraphModule with one; send it first"):
        ForkingPickler.dumps(model)
    assert model(X).dtype is BF16


def test_scoped_lines_hold_where_the_model_arrives():
    dtypes = []
    model = hmp.apply(Head(), LISTS)
    for made in (sent(model), sent(nn.Sequential(model))):
        made.get_submodule("body" if made.__class__ is Head else "0.body").register_forward_hook(lambda m, a, out: dtypes.append(out.dtype))
        assert made(X).dtype is F32
    assert dtypes == [BF16, BF16]
    assert sent(model.lm_head)(X).dtype is F32  # a part alone has no policy, as here
    hmp.revert()
    assert "_hmp_applied" not in {name for made in (model, *model.modules()) for name in vars(made)}


@pytest.mark.slow
def test_a_file_has_no_policy_and_says_so_once(tmp_path):
    file = tmp_path / "model.pt"
    torch.save(nn.Sequential(hmp.apply(nn.Linear(3, 3), hmp.Policy(bf16={"linear"}, name="mine"))), file)
    loading = """if True:
        import sys, torch
        for _ in range(2):
            print(torch.load(sys.argv[1], weights_only=False)(torch.ones(1, 3)).dtype)
    """
    done = python("-c", textwrap.dedent(loading), file, cwd=tmp_path)
    assert done.stdout.split() == ["torch.float32"] * 2
    assert done.stderr.count("the policy 'mine' was applied to this model when it was saved, but the file does not contain it") == 1
    run_in_another_process("torch.load(sys.argv[1], weights_only=False)", file, with_hmp=False)


SPAWNED = """
import concurrent.futures, multiprocessing, sys
import torch, hmp
from innermost_kit import Head, X

def run(rank, model, seen):
    model.body.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    seen.append(model(X).dtype)

def call(model, x):
    return model, model(x).detach()

if __name__ == "__main__":
    model = hmp.apply(Head(), hmp.Policy(bf16={"linear"}, fp32={"linear @ lm_head"}))
    expected = model(X)
    seen = multiprocessing.Manager().list()
    torch.multiprocessing.spawn(run, (model, seen))
    print(*seen)
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        back, result = pool.submit(call, model, X).result()
    print(torch.equal(result, expected), torch.equal(back(X), expected))
"""


@pytest.mark.slow
def test_spawned_processes_run_under_the_policy(tmp_path: Path):
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    done = python(script, cwd=tmp_path, before=ROOT / "tests" / "support")
    assert done.stdout.splitlines() == ["torch.bfloat16 torch.float32", "True True"], done.stderr
