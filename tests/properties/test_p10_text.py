"""P10, text and truth: a policy written as text, however untidily, is the same policy when it is read; and what `hmp.explain` says of an op
is what `hmp.record` says ran and what torch shows.

Oracle: the sets that the text was written from, a precedence of four lines, and the dtype of the result. Rule R4, and
"Names in a list file".
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hmp

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
X = torch.randn(4, 4)
# op: (a call, its spellings in a list)
OPS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "matmul": (lambda x: x @ x, ("matmul", "linalg.matmul")),
    "mul": (lambda x: torch.mul(x, x), ("mul", "multiply")),
    "truediv": (lambda x: x / x, ("truediv", "div", "divide", "true_divide")),
    "softmax": (lambda x: F.softmax(x, -1), ("softmax", "special.softmax")),
    "conv_transpose2d": (lambda x: F.conv_transpose2d(x[None, None], x[None, None]), ("conv_transpose2d", "conv_transpose2d.input")),
    "pow": (lambda x: x.pow(2), ("pow", "pow.Tensor_Scalar")),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(4)), ("cross_entropy", "cross_entropy_loss")),
    "linear": (lambda x: F.linear(x, x), ("linear",)),
    "tanh": (lambda x: x.tanh(), ("tanh",)),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), ("layer_norm",)),
}
LISTS = st.fixed_dictionaries({}, optional={op: st.sampled_from(["bf16", "fp32"]) for op in OPS})


def untidy(lines: list[str], how: random.Random) -> bytes:
    """The same entries with comments, blank lines, commas, CRLF, a byte-order mark, no last newline."""
    how.shuffle(lines)
    text = how.choice(["", "\ufeff"]) + how.choice(["", "# a comment\n", "\n\n"])
    for number, line in enumerate(lines):
        text += " " * how.randrange(3) + line + how.choice(["", ",", " # why", "  "])
        text += "" if number == len(lines) - 1 and how.random() < 0.5 else how.choice(["\n", "\r\n", "\n\n"])
    return text.encode("utf-8")


@settings(max_examples=2 * settings.default.max_examples)
@given(lists=LISTS, star=st.sampled_from([None, None, "bf16", "fp32"]), low=st.sampled_from([BF16, BF16, F16]), seed=st.integers(0, 10**6))
def test_p10_what_is_written_is_what_is_read_told_and_run(
    lists: dict[str, str], star: str | None, low: torch.dtype, seed: int, tmp_path_factory: Any
) -> None:
    how = random.Random(seed)
    folder: Path = tmp_path_factory.mktemp("lists")
    written = {op: how.choice(OPS[op][1]) for op in lists}
    for kind in ("bf16", "fp32"):
        lines = [written[op] for op, of in lists.items() if of == kind] + ["*"] * (star == kind)
        (folder / f"{kind}.txt").write_bytes(untidy(lines, how))
    if low is F16:
        (folder / "dtype.txt").write_text("# the low dtype\r\n\nfloat16  # half\n")
    read = hmp.Policy.load(folder)
    tidy = folder / "tidy"
    tidy.mkdir()
    for kind in ("bf16", "fp32"):
        lines = sorted(written[op] for op, of in lists.items() if of == kind) + ["*"] * (star == kind)
        (tidy / f"{kind}.txt").write_text("".join(f"{line}\n" for line in lines))
    again = hmp.Policy.load(tidy).replace(dtype=low)
    assert read == again and read.fingerprint == again.fingerprint
    for copied in (hmp.Policy.load(read.save(folder / "saved")), hmp.Policy.from_dict(json.loads(json.dumps(read.to_dict())))):
        assert copied == read and copied.fingerprint == read.fingerprint
    assert (folder / "saved" / "dtype.txt").exists() == (low is F16)
    with hmp.casts(read):
        for op, (call, spellings) in OPS.items():
            wanted = lists.get(op, star)
            assert hmp.explain(how.choice(spellings), policy=read).cast == wanted, (op, wanted)
            for given, kept in ((X, F32), (X.to(BF16), BF16)):
                dtype = {"bf16": low, "fp32": F32, None: kept}[wanted]
                assert call(given).dtype is dtype, (op, wanted, given.dtype)


@settings(max_examples=settings.default.max_examples)
@given(lists=LISTS)
def test_p10_what_is_recorded_is_what_ran(lists: dict[str, str]) -> None:
    policy = hmp.Policy("drawn", **{kind: {op for op, of in lists.items() if of == kind} for kind in ("bf16", "fp32")})
    with hmp.casts(policy), hmp.record() as report:
        for call, _ in OPS.values():
            call(X)
    assert report.violations() == []
    rows = {row.op: row for row in report.rows}
    for op, kind in lists.items():
        assert op in rows, f"{op} ran under {kind}, and no row says so: {sorted(rows)}"


STEMS = ("bf16", "fp32", "promote", "fp8", "saved", "base", "dtype", "recipe", "kernel", "saved_recipe")
FAR = ("README.md", ".gitignore", "notes.txt", "base.py", "bf16.txt~", ".fp32.txt.swp", "vocab.txt")


@st.composite
def misspelt(draw: st.DrawFn) -> str:
    """The name of a policy's file with one letter wrong, missing, more or swapped, or written as people write names."""
    stem = draw(st.sampled_from(STEMS))
    at, letter = draw(st.integers(0, len(stem) - 1)), draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz0123456789"))
    before, here, after = stem[:at], stem[at], stem[at + 1 :]
    letters = (f"{before}{letter}{after}", f"{before}{after}", f"{before}{letter}{here}{after}", f"{before}{after[:1]}{here}{after[1:]}")
    ends = ("", ".text", ".TXT", ".txt.txt", "txt", "_list.txt", " (1).txt", "_old.txt", ".txt.bak")
    parted = f"{before}{draw(st.sampled_from('_- .'))}{here}{after}.txt".lstrip(".")
    names = (*(f"{each}.txt" for each in letters), parted, f"{before}{here.upper()}{after}.txt", *(stem + end for end in ends))
    return draw(st.sampled_from(names))


@settings(max_examples=2 * settings.default.max_examples)
@given(lists=LISTS, near=st.sets(misspelt(), max_size=3), far=st.sets(st.sampled_from(FAR)))
@example(lists={"tanh": "fp32"}, near={"fg8.txt", "saved_recipe"}, far=set())  # a third of a short name
def test_p10_no_file_that_is_nearly_a_list_is_left_out(lists: dict[str, str], near: set[str], far: set[str], tmp_path_factory: Any) -> None:
    folder: Path = tmp_path_factory.mktemp("lists")
    near -= {f"{stem}.txt" for stem in STEMS}  # a letter that stayed
    for name in (*near, *far):
        (folder / name).write_text("")
    expected = {kind: {op for op, of in lists.items() if of == kind} for kind in ("bf16", "fp32")}
    for kind, ops in expected.items():
        (folder / f"{kind}.txt").write_text("\n".join(ops))
    if not near:
        assert hmp.Policy.load(folder) == hmp.Policy(**expected)
        return
    with pytest.raises(hmp.errors.OpListError) as error:
        hmp.Policy.load(folder)
    told = str(error.value)
    assert {name for name in (*near, *far) if f"{folder / name}:" in told or repr(name) in told} == near
