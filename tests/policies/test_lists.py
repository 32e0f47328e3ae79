"""List files: their grammar, the names that they may use, and what bad input does: an error with path:line, torch untouched."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
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
        with pytest.raises(hmp.errors.OpListError) as error:
            hmp.Policy.from_files(bf16=tmp_path / "low.txt", fp32=tmp_path / "wide.txt", promote=empty)
        assert all(
            part in str(error.value) for part in (f"{tmp_path / 'low.txt'}:2: ", repr(low), repr(wide), f"{tmp_path / 'wide.txt'}:3")
        )
        with pytest.raises(hmp.errors.OpListError, match="are the same op"):
            hmp.Policy(bf16={f"{low} @ a.*"}, fp32={f"{wide} @ a.*"})
        hmp.Policy(bf16={f"{low} @ a.*"}, fp32={f"{wide} @ b.*"})
        kept = hmp.Policy.from_env({"LOWER_LIST": str(tmp_path / "low.txt"), "FP32_LIST": str(tmp_path / "wide.txt")})
        assert low in kept.bf16 and wide not in kept.fp32 and "log" in kept.fp32


def test_lists_a_given_list_wins_over_a_default_one_by_another_name_of_the_function(write, empty) -> None:
    given = hmp.Policy.from_files(fp32=write("dsmm"), promote=empty)  # mm is on Habana's BF16 list
    assert "mm" not in given.bf16 and "dsmm" in given.fp32
    with hmp.casts(given):
        assert ran_in(lambda a, b: torch.mm(a, b), (2, 2), (2, 2), dtype=BF16) is F32


def test_lists_a_dotted_name_that_cannot_be_imported_is_an_error(write) -> None:
    for name in ("fractions.fracton", "no_such_package_at_all.ops.f"):
        path = write(f"mm\n{name}\n")
        with pytest.raises(hmp.errors.OpListError) as error:
            hmp.convert(bf16_file_path=str(path))
        assert f"{path}:2" in str(error.value) and name in str(error.value)
        assert (str(error.value.path), error.value.line) == (str(path), 2)


def test_lists_a_dotted_name_is_imported_and_may_be_a_static_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels_of_the_user.py").write_text("class Kernels:\n    @staticmethod\n    def static(q):\n        return q.dtype\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with hmp.casts(hmp.Policy(bf16={"kernels_of_the_user.Kernels.static"})):
        assert sys.modules.pop("kernels_of_the_user").Kernels.static(torch.ones(2)) is BF16


# `*`


def test_lists_a_star_leaves_dtype_ops_apart(write, empty) -> None:
    base = torch.ones(2, 3).to(BF16)
    with hmp.casts(hmp.Policy.from_files(bf16=empty, fp32=write("*"), promote=empty)):
        assert torch.ones(2).to(BF16).dtype is BF16
        assert torch.ones(2).type_as(base).dtype is BF16
        assert torch.ones(2, dtype=F64).exp().dtype is F64
        assert torch.result_type(base, base) is BF16
        assert (base[0].dtype, base.expand_as(base).dtype) == (BF16, BF16)


# --- bad input


def refused(torch_differences, *args, kind: type[Exception] = hmp.errors.OpListError, **kwargs) -> Exception:
    """The error of a convert() call, after which torch is as it was and no policy is in force."""
    hmp.revert()  # torch stays patched by the tests before
    with pytest.raises(kind) as error:
        hmp.convert(*args, **kwargs)
    assert torch_differences() == []
    assert not hmp.is_converted()
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is F32
    return error.value


def test_lists_an_unknown_name_is_an_error_with_its_place_and_the_nearest_name(write, torch_differences) -> None:
    for wrong, right in (("liner", "linear"), ("sofmax", "softmax"), ("conv2", "conv2d"), ("cross_entropi", "cross_entropy")):
        path = write(f"# mine\nmm\n\n{wrong}\nrelu\n")
        error = refused(torch_differences, bf16_file_path=str(path))
        assert str(error).startswith(f"{path}:4: ")
        assert repr(wrong) in str(error) and repr(right) in str(error)
        assert (error.path, error.line) == (str(path), 4)


@pytest.mark.parametrize("content", ["mm relu", "mm; relu", "1mm", "mm()", "a..b", "[mm]", "*mm"])
def test_lists_what_is_no_name_is_an_error_with_its_place(content: str, write, torch_differences) -> None:
    path = write(f"linear\n{content}\n")
    error = refused(torch_differences, bf16_file_path=str(path))
    assert f"{path}:2" in str(error) and (error.path, error.line) == (str(path), 2)


BAD_FILES = {
    "missing": lambda folder, write: folder / "nowhere.txt",
    "a folder": lambda folder, write: folder,
    "binary": lambda folder, write: write(bytes(range(256)) * 4),
    "latin-1": lambda folder, write: write("mm\n# gel\u00fc\n".encode("latin-1")),
    "utf-16": lambda folder, write: write("mm\nrelu\n".encode("utf-16")),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_lists_a_file_that_is_no_list_is_an_error_that_names_it(kind: str, tmp_path: Path, write, torch_differences) -> None:
    path = BAD_FILES[kind](tmp_path, write)
    error = refused(torch_differences, fp32_file_path=str(path))
    assert str(path) in str(error) and error.path == str(path)
    assert "\n" not in str(error) and len(str(error)) > len(str(path)) + 10


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"opt_level": "O3"}, "O1"),
        ({"opt_level": None}, "O1"),
        (
            {"opt_level": "o2".upper(), "policy": "habana"},
            "policy= and opt_level='O2', which is the policy 'habana-o2', exclude each other",
        ),
        ({"opt_level": "O2", "fp8_file_path": "fp8.txt"}, "fp8_file_path= and opt_level='O2', whose FP8 list is empty, exclude"),
        ({"fp32_file_path": 3}, "the fp32 list: expected a string or a path, got 3"),
        ({"policy": "habanna"}, "did you mean 'habana'"),
        ({"policy": "torch-cpu@1.0"}, "torch-cpu@2."),
        ({"policy": "habana", "bf16_file_path": "a.txt"}, "exclude each other"),
    ],
)
def test_lists_what_convert_cannot_take_is_an_error_that_says_what_it_takes(given, said: str, torch_differences) -> None:
    assert said in str(refused(torch_differences, **given, kind=hmp.HmpError))


def test_lists_convert_replaces_the_policy_in_force_and_a_failed_one_does_not(write, torch_differences) -> None:
    square = torch.ones(2, 2)
    hmp.convert(bf16_file_path=str(write("relu\n")))
    assert torch.relu(square).dtype is BF16 and torch.mm(square, square).dtype is F32
    hmp.convert(bf16_file_path=str(write("mm\n")))
    assert torch.relu(square).dtype is F32 and torch.mm(square, square).dtype is BF16
    patched = set(torch_differences())
    with pytest.raises(hmp.errors.OpListError):
        hmp.convert(bf16_file_path=str(write("reluu\n")))
    assert set(torch_differences()) == patched
    assert torch.relu(square).dtype is F32 and torch.mm(square, square).dtype is BF16
    assert hmp.is_converted()
    hmp.revert()
    assert torch.mm(square, square).dtype is F32


@pytest.mark.parametrize("name", ["embedding_bag_sum_fwd"])
def test_lists_a_name_that_another_release_knows_is_skipped_with_one_warning(name: str, write, caplog: pytest.LogCaptureFixture) -> None:
    path = write(f"mm\n{name}\nrelu\n")
    with warnings.catch_warnings(record=True) as raised, caplog.at_level(logging.WARNING, "hmp"):
        warnings.simplefilter("always")
        hmp.convert(bf16_file_path=str(path))
    told = [r.getMessage() for r in caplog.records if name in r.getMessage()] + [str(w.message) for w in raised if name in str(w.message)]
    assert len(told) == 1, told
    assert torch.relu(torch.ones(2)).dtype is BF16


@pytest.fixture
def my_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder my_lists, in the working directory, with a BF16 list."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_lists").mkdir()
    (tmp_path / "my_lists" / "bf16.txt").write_text("linear\n")
    return tmp_path / "my_lists"


def told_by_all(given: str) -> str:
    """The error of everything that takes a policy's name or folder, which is one sentence."""
    calls = (
        hmp.Policy.load,
        lambda given: hmp.convert(policy=given),
        lambda given: hmp.apply(torch.nn.Linear(2, 2), given),
        hmp.casts,
        lambda given: hmp.explain("mul", given),
    )
    told = set()
    for call in calls:
        with pytest.raises(hmp.errors.OpListError) as error:
            call(given)
        told.add(str(error.value))
    (sentence,) = told
    return sentence


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("TORCH-CPU", "did you mean 'torch-cpu' or"),
        ("torch-cpu@2.99", "did you mean 'torch-cpu@2.9' or"),
        (
            "my_lists/bf16.txt",
            "my_lists/bf16.txt: this is a file; pass its folder, 'my_lists', or for one list alone "
            "policy=hmp.Policy.from_files(bf16='my_lists/bf16.txt')",
        ),
        ("my_list", "unknown policy 'my_list'; did you mean 'my_lists'?"),
        ("./mylists", "unknown policy './mylists'; did you mean 'my_lists'?"),
    ],
)
def test_lists_a_mistyped_policy_is_told_alike_by_all_that_take_one(given: str, said: str, my_lists: Path, torch_differences) -> None:
    hmp.revert()
    assert said in told_by_all(given)
    assert torch_differences() == []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: (folder / "base").write_text("autocast"), "my_lists/base: did you mean 'base.txt'?"),
        (
            lambda folder: (folder / "todo.txt").write_text("softmax  # and\nlog @ head"),
            "my_lists/todo.txt: no kind of list 'todo' is installed",
        ),
        (lambda folder: (folder / "fp32.txt").symlink_to("/moved/a.txt"), "my_lists/fp32.txt: cannot be read: No such file"),
        (lambda folder: (folder / "ops_bf16_bert.txt").write_text("mm"), "my_lists/ops_bf16_bert.txt: did you mean 'bf16.txt'?"),
        (lambda folder: (folder / "BF_16.old.text").write_text("mm"), "my_lists/BF_16.old.text: did you mean 'bf16.txt'?"),
        (lambda folder: (folder / "recipe.txt").mkdir(), "my_lists/recipe.txt: expected a text file, got a folder"),
        (lambda folder: (folder / "bf16.tx").write_text("mm"), "my_lists/bf16.tx: did you mean 'bf16.txt'?"),
        (lambda folder: (folder / "dtype.txt").write_bytes(b"\n#\n\xff"), "my_lists/dtype.txt:3: is not UTF-8 text"),
    ],
    ids=["nearly base.txt", "ops alone", "link", "Habana's name", "nearly bf16.txt", "folder", "nearly .txt", "UTF-8"],
)
def test_lists_a_folder_with_a_file_that_would_be_left_out_is_told_alike_by_all(
    make: Callable[[Path], object], said: str, my_lists: Path
) -> None:
    make(my_lists)
    assert told_by_all("my_lists").startswith(said)


def test_lists_a_folder_where_a_list_file_is_expected_says_what_to_give(my_lists: Path) -> None:
    said = "my_lists: expected a text file, got a folder; give a file, or for a folder of lists policy="
    with pytest.raises(hmp.errors.OpListError) as error:
        hmp.convert(bf16_file_path="my_lists")
    assert str(error.value) == said
    with pytest.raises(hmp.errors.OpListError, match="expected a text file, got a folder"):
        hmp.Policy.from_env({"LOWER_LIST": "my_lists"})
