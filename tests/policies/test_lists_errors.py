"""Bad input gets a clear error with path and line, and torch stays as it was."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hmp
from oracle import BF16, F32


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    count = iter(range(99))

    def write(content: str | bytes) -> Path:
        path = tmp_path / f"list{next(count)}.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def refused(torch_differences, *args, kind: type[Exception] = hmp.OpListError, **kwargs) -> Exception:
    """The error of a convert() call, after which torch is as it was and no policy is in force."""
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
        ({"policy": "habanna"}, "did you mean 'habana'"),
        ({"policy": "torch-cpu@1.0"}, "torch-cpu@2."),
        ({"dtype": torch.int8}, "float16"),
        ({"dtype": "bf17"}, "float16"),
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
    with pytest.raises(hmp.OpListError):
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
        with pytest.raises(hmp.OpListError) as error:
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
def test_lists_a_mistyped_policy_is_told_alike_by_all_that_take_one(given: str, said: str, my_lists: Path) -> None:
    assert said in told_by_all(given)


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
        (lambda folder: (folder / "dtype.txt").write_bytes(b"\xff"), "my_lists/dtype.txt:1: is not UTF-8 text"),
    ],
    ids=["nearly base.txt", "ops alone", "link", "Habana's name", "nearly bf16.txt", "folder", "UTF-8"],
)
def test_lists_a_folder_with_a_file_that_would_be_left_out_is_told_alike_by_all(
    make: Callable[[Path], object], said: str, my_lists: Path
) -> None:
    make(my_lists)
    assert told_by_all("my_lists").startswith(said)


def test_lists_a_folder_where_a_list_file_is_expected_says_what_to_give(my_lists: Path) -> None:
    said = "my_lists: expected a text file, got a folder; give a file, or for a folder of lists policy="
    with pytest.raises(hmp.OpListError) as error:
        hmp.convert(bf16_file_path="my_lists")
    assert str(error.value) == said
    with pytest.raises(hmp.OpListError, match="expected a text file, got a folder"):
        hmp.Policy.from_env({"LOWER_LIST": "my_lists"})
