"""List files: their grammar, the names that they may use, and what bad input does (an error with path:line, torch untouched)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hmp
from oracle import BF16, F32, F64


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a list file, bytes or text, and gives its path."""
    count = iter(range(99))

    def write(content: str | bytes, name: str = "") -> Path:
        path = tmp_path / (name or f"list{next(count)}.txt")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def empty(write: Callable[..., Path]) -> Path:
    return write("")


def ran_in(call: Callable[..., torch.Tensor], *shapes: tuple[int, ...], dtype: torch.dtype = F32) -> torch.dtype:
    return call(*(torch.ones(s, dtype=dtype) for s in shapes)).dtype


def mm() -> torch.dtype:
    return ran_in(lambda a, b: torch.mm(a, b), (2, 2), (2, 2))


def relu() -> torch.dtype:
    return ran_in(lambda a: torch.relu(a), (2,))


def test_lists_an_empty_file_is_an_empty_list_and_no_path_is_the_default_one(empty) -> None:
    with hmp.casts(hmp.Policy.from_files(bf16=empty)):
        assert mm() is F32
        assert ran_in(lambda a: torch.softmax(a, 0), (2,), dtype=BF16) is F32  # the default FP32 list
    with hmp.casts(hmp.Policy.from_files(fp32=empty)):
        assert mm() is BF16
        assert ran_in(lambda a: torch.softmax(a, 0), (2,), dtype=BF16) is BF16
    hmp.convert(bf16_file_path=str(empty), fp32_file_path="")
    assert mm() is F32


SPELLINGS = {
    # name in the file: a call that it covers, with its shapes; those of P10 are not repeated
    "cat": (lambda a: torch.concat([a]), [(2,)]),
    "clip": (lambda a: torch.clamp(a, 0), [(2,)]),
    "mul": (lambda a, b: a * b, [(2,), (2,)]),
    "multiply": (lambda a, b: b.__rmul__(a), [(2,), (2,)]),
    "rsub": (lambda a: 1 - a, [(2,)]),
    "nll_loss2d": (lambda a: F.nll_loss(a, torch.zeros(1, 2, 2, dtype=torch.int64)), [(1, 3, 2, 2)]),
    "nll_loss_forward": (lambda a: F.nll_loss(a, torch.tensor([0, 1])), [(2, 3)]),
    "_convolution.deprecated": (lambda a, b: F.conv2d(a, b), [(1, 2, 3, 3), (2, 2, 2, 2)]),
    "max_pool2d_with_indices": (lambda a: F.max_pool2d(a, 2), [(1, 2, 4, 4)]),
    "_softmax": (lambda a: F.softmax(a, 0), [(2,)]),
    "native_layer_norm": (lambda a: F.layer_norm(a, (3,)), [(2, 3)]),
    "addmm.out": (lambda a: torch.addmm(a, a, a), [(2, 2)]),
    "linalg_vector_norm": (lambda a: torch.linalg.vector_norm(a), [(2,)]),
    "special.expit": (lambda a: torch.special.expit(a), [(2,)]),
    "torch.mm": (lambda a, b: torch.mm(a, b), [(2, 2), (2, 2)]),
    "torch.nn.functional.gelu": (lambda a: F.gelu(a), [(2,)]),
    "aten::mm": (lambda a, b: a.mm(b), [(2, 2), (2, 2)]),
}


def test_lists_a_spelling_covers_the_public_op(write, empty) -> None:
    for name, (call, shapes) in SPELLINGS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            policy = hmp.Policy.from_files(bf16=write(name), fp32=empty, promote=empty)
        assert ran_in(call, *shapes) is F32, name
        with hmp.casts(policy):
            assert ran_in(call, *shapes) is BF16, name


def test_lists_two_names_of_one_function_on_two_lists_are_an_error(empty, tmp_path: Path) -> None:
    """No list can tell names apart that are one function object of torch's."""
    for low, wide in (("spmm", "dsmm"), ("logsigmoid", "log_sigmoid"), ("log_sigmoid", "logsigmoid")):
        (tmp_path / "low.txt").write_text(f"relu\n{low}\n")
        (tmp_path / "wide.txt").write_text(f"exp\nlog\n{wide}\n")
        with pytest.raises(hmp.OpListError) as error:
            hmp.Policy.from_files(bf16=tmp_path / "low.txt", fp32=tmp_path / "wide.txt", promote=empty)
        assert all(
            part in str(error.value) for part in (f"{tmp_path / 'low.txt'}:2: ", repr(low), repr(wide), f"{tmp_path / 'wide.txt'}:3")
        )
        with pytest.raises(hmp.OpListError, match="are the same op"):
            hmp.Policy(bf16={f"{low} @ a.*"}, fp32={f"{wide} @ a.*"})
        hmp.Policy(bf16={f"{low} @ a.*"}, fp32={f"{wide} @ b.*"})
        kept = hmp.Policy.from_env({"LOWER_LIST": str(tmp_path / "low.txt"), "FP32_LIST": str(tmp_path / "wide.txt")})
        assert low in kept.bf16 and wide not in kept.fp32 and "log" in kept.fp32


def test_lists_a_given_list_wins_over_a_default_one_by_another_name_of_the_function(write, empty) -> None:
    given = hmp.Policy.from_files(fp32=write("dsmm"), promote=empty)  # mm is on Habana's BF16 list
    assert "mm" not in given.bf16 and "dsmm" in given.fp32
    with hmp.casts(given):
        assert ran_in(lambda a, b: torch.mm(a, b), (2, 2), (2, 2), dtype=BF16) is F32


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`mypkg.ops.fused_attention(q, k, *, scale)`, importable, not imported yet."""
    folder = tmp_path / "mypkg_of_the_user"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "ops.py").write_text(
        "def fused_attention(q, k, *, scale=1.0):\n    return [(q.dtype, k.dtype), scale]\n"
        "class Kernels:\n    @staticmethod\n    def static(q):\n        return q.dtype\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "mypkg_of_the_user.ops"
    hmp.revert()
    for name in [n for n in sys.modules if n.startswith("mypkg_of_the_user")]:
        del sys.modules[name]


def test_lists_a_dotted_name_that_cannot_be_imported_is_an_error(package: str, write) -> None:
    for name in (f"{package}.fused_atention", "no_such_package_at_all.ops.f"):
        path = write(f"mm\n{name}\n")
        with pytest.raises(hmp.OpListError) as error:
            hmp.convert(bf16_file_path=str(path))
        assert f"{path}:2" in str(error.value) and name in str(error.value)
        assert (str(error.value.path), error.value.line) == (str(path), 2)


# `*`


def test_lists_a_star_leaves_views_and_dtype_ops_apart(write, empty) -> None:
    base = torch.ones(2, 3).to(BF16)
    with hmp.casts(hmp.Policy.from_files(bf16=empty, fp32=write("*"), promote=empty)):
        for call in (
            lambda a: a.view(-1),
            lambda a: a.t(),
            lambda a: a[0],
            lambda a: a.unsqueeze(0),
            lambda a: a.detach(),
            lambda a: a.expand(2, 2, 3),
            lambda a: a.chunk(2)[0],
            lambda a: torch.permute(a, (1, 0)),
            lambda a: a.contiguous(),
            lambda a: a.expand_as(a),
        ):
            result = call(base)
            assert result.dtype is BF16 and result.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        assert torch.ones(2).to(BF16).dtype is BF16
        assert torch.ones(2).type_as(base).dtype is BF16
        assert torch.ones(2, dtype=F64).exp().dtype is F64
        assert torch.result_type(base, base) is BF16
