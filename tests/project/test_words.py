"""The texts for readers use the field's words: each one on the left is a word of this project's alone, or says little."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import doc_blocks
from doc_blocks import DEV_FILES, FILES, ROOT, prose

# A pattern, and what to write instead.
AVOID = {
    r"\bstands?\b|\bstood\b": "is, is written, holds",
    r"\bin the place of\b": "instead of",
    r"\bstand-ins?\b": "import shim, fake package",
    r"\bbeside\b": "compared with, next to",
    r"\bbehind\b": "after",
    r"\bin force\b": "active",
    r"\bthe last word\b": "wins, overrides; precedence",
    r"\bregions?\b": "context, block",
    r"\bislands?\b": "autocast-disabled block",
    r"\bspeaks? of\b|\bscoped lines?\b": "entry with a scope",
    r"\bis none\b|\bare none\b|\bthere (?:is|are) none\b": "missing, invalid",
    r"\b(?:is|are) no\b(?! longer)": "isn't a, expected a",
    r"\bproducts?\b": "matrix multiplications",
    r"\blow dtypes?\b": "low-precision dtype, bfloat16 or float16",
    r"\bdispatchers?\b": "patched op (the dispatcher is torch's)",
    r"\bcompiled policy\b": "policy table",
    r"\btells?\b|\btold\b": "shows, prints, reports",
    r"\bmarks?\b|\bmarked\b": "module policy, write watch",
}
# Where a word is the right one, each with its reason.
ALLOWED = {
    ("docs/pages/how-to/see-what-ran.md", "region"): "a kind of violation that hmp prints and takes",
    ("docs/pages/how-to/see-what-ran.md", "island"): "the same",
    ("docs/pages/start/comparison.md", "dispatcher"): "PyTorch's own",
}
# In hmp's own text and on the maintainers' pages these are ordinary words: a product of matrices, a mark on memory, "there is no such
# file", "X stands for Y".
IN_CODE = {
    {
        r"\bstands?\b|\bstood\b": r"\b(?:stands?|stood)\b(?! for)",
        r"\b(?:is|are) no\b(?! longer)": r"(?<!there )\b(?:is|are) no\b(?! longer| more)",
        r"\bthe last word\b": r"\blast word\b",
    }.get(pattern, pattern): instead
    for pattern, instead in AVOID.items()
    if pattern not in (r"\bproducts?\b", r"\bmarks?\b|\bmarked\b")
} | {r"\blines? of (?:a|the|its|these) lists?\b": "entry"}
ALLOWED_IN_CODE = {
    ("compat/habana/device_arguments.py", "dispatcher"): "torch's own",
    ("core/torch_patches/uncast.py", "dispatcher"): "torch's own",
    ("core/torch_private.py", "dispatcher"): "torch's own",
    **{(f"tools/record/{path}.py", word): "a kind of violation" for path in ("overrides", "report") for word in ("island", "region")},
}
MOST = 40  # what is allowed above is counted, too
LOGS = {"debug", "info", "warning", "error", "warn"}


def hits(path: Path) -> Counter[str]:
    text = prose(path.read_text(encoding="utf-8"))
    return Counter(match[0].lower() for pattern in AVOID for match in re.finditer(pattern, text, re.IGNORECASE))


def test_the_pages_use_the_fields_words() -> None:
    found = {(str(path.relative_to(ROOT)), word): count for path in [*FILES, ROOT / "CHANGELOG.md"] for word, count in hits(path).items()}
    unexplained = {
        (page, word): next(said for pattern, said in AVOID.items() if re.fullmatch(pattern, word, re.IGNORECASE))
        for page, word in found
        if (page, word.removesuffix("s")) not in ALLOWED and (page, word) not in ALLOWED
    }
    assert unexplained == {}, "write instead what is shown, or give a reason in ALLOWED"
    assert sum(found.values()) <= MOST


def strings(node: ast.AST) -> Iterator[str]:
    return (each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str))


def comments(code: str) -> Iterator[str]:
    """Yield the comments of a module, those of several lines as one."""
    text, last = "", 0
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield text
                text = ""
            text, last = text + token.string[1:], token.start[0]
    yield text


def said(code: str) -> Iterator[str]:
    """Yield the docstrings and comments of a module, the strings of what it raises, warns of and logs, and the sentences of rules."""
    yield from comments(code)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.Raise) and node.exc is not None:
            yield from strings(node.exc)
        elif isinstance(node, ast.Call):
            is_log = getattr(node.func, "attr", "") in LOGS
            for each in [node] if is_log else [keyword.value for keyword in node.keywords if keyword.arg == "sentence"]:  # a rule's
                yield from strings(each)


def plain(text: str) -> str:
    """Return a text on one line, without code in backticks."""
    return re.sub(r"`[^`]*`|\bNone\b", "``", re.sub(r"\s+", " ", text))


def hits_in_code(code: str) -> Counter[str]:
    texts = [plain(text) for text in said(code)]
    return Counter(match[0].lower() for text in texts for pattern in IN_CODE for match in re.finditer(pattern, text, re.IGNORECASE))


@pytest.mark.parametrize("page", DEV_FILES, ids=lambda page: page.stem)
def test_the_maintainers_pages_use_the_fields_words(page: Path) -> None:
    text = plain(prose(page.read_text(encoding="utf-8")))
    assert sorted(match[0] for pattern in IN_CODE for match in re.finditer(pattern, text, re.IGNORECASE)) == []


def test_docstrings_comments_and_messages_use_the_fields_words() -> None:
    source = ROOT / "hmp"
    found = {
        (path.relative_to(source).as_posix(), word): count
        for path in sorted(source.rglob("*.py"))
        for word, count in hits_in_code(path.read_text(encoding="utf-8")).items()
    }
    assert sorted(found.keys() - ALLOWED_IN_CODE.keys()) == [], "write what AVOID has instead, or give a reason in ALLOWED_IN_CODE"
    assert sorted(ALLOWED_IN_CODE.keys() - found.keys()) == []
    assert sum(found.values()) <= MOST


# A figure in prose: a ratio or a percentage.
FIGURE = re.compile(r"(?<![\w.@-])\d+(?:\.\d+)? ?%|(?<![\w.@/-])[01]\.\d\d+(?![\w.])")
# Sections whose figures were measured once, by the code of the page.
MEASURED_ONCE = {"Usual causes"}


def test_a_section_with_figures_has_a_source_or_a_block_of_code() -> None:
    """A link to a file of results, or to the section that has it; or code that prints the figure."""
    lost = []
    for path in FILES:
        parts = re.split(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        for heading, section in zip(parts[::2], parts[1::2], strict=True):
            has_source = "```" in section or re.search(r"\]\((?:[\w./-]+\.md|#)", section)
            if heading not in MEASURED_ONCE and (figure := FIGURE.search(prose(section))) and not has_source:
                lost.append(f"{path.name}, {heading}: {figure[0]}")
    assert lost == []


def columns(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table after `heading` that begins with a column of models."""
    text = (doc_blocks.PAGES / page).read_text(encoding="utf-8").partition(heading)[2]
    table = re.search(r"^\| model \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table
    return [[cell.strip() for cell in row.strip("|\n").split("|")] for row in table[1].splitlines()]


def test_the_readmes_figures_are_those_of_their_pages() -> None:
    """One claim, one figure, one source: a page's table, or a file that a benchmark wrote."""
    readme = FILES[0].read_text(encoding="utf-8")
    results = ROOT / "benchmarks" / "results"
    packed = columns("how-to/activation-memory.md", "## Store activations")
    ratios = [float(cell) for row in packed for cell in row[1:3]]
    times = [float(row[3]) for row in packed]
    bytes_ = f"[{min(ratios):.2f} to {max(ratios):.2f}](docs/pages/how-to/activation-memory.md) of torch.autocast's bytes"
    assert f"{bytes_}, for {min(times):.2f} to {max(times):.2f} of its time" in readme
    for row in packed:
        assert f"| {' | '.join(row)} |" in (results / "SAVED.md").read_text(encoding="utf-8")
    slow = columns("how-to/benchmark.md", "**Without bfloat16 instructions**")
    ours, theirs = ([float(row[at]) for row in slow if row[at] != "raises"] for at in (1, 3))
    without = f"[{min(ours)} to {max(ours)}](docs/pages/how-to/benchmark.md#what-was-measured) times as long as in float32"
    assert f"{without}, under torch.autocast {min(theirs):.0f} to {max(theirs):.0f} times" in readme
    row = r"^\| training step, same lists, hmp / torch.autocast: geometric mean of \d+ \| [^|]+ \| ([\d.]+)"
    (mean,) = re.findall(row, (results / "RESULTS.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert f"| [{float(mean):.2f} on average](benchmarks/results/RESULTS.md)" in readme
    table = (doc_blocks.PAGES / "how-to" / "benchmark.md").read_text(encoding="utf-8")
    assert f"| {float(mean):.2f} |" in table
