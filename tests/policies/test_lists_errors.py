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


def test_lists_a_byte_that_is_not_utf8_is_named_with_its_line(write, torch_differences) -> None:
    path = write(b"mm\nrelu\nlin\xe9ar\n")
    assert f"{path}:3" in str(refused(torch_differences, fp32_file_path=str(path)))


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
