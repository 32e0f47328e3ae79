"""What the site has beyond the files of docs/pages: made from the code, and taken from elsewhere in the repository."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "pages"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # hmp of this checkout, installed or not

_INSERT = re.compile(r"^<!-- (made|docstrings): (.+) -->$", re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((\.\.?/[^)#]+)(#[^)]*)?\)")


@cache
def made() -> dict[str, str | bytes | Path]:
    """Return the files of the site that docs/pages does not have: text, bytes, or a file of the repository."""
    from . import samples

    pages = samples.run()
    return {
        **{f"images/{picture.name}": picture for picture in (ROOT / "docs" / "images").glob("*.png")},
        **{f"samples/{name}.html": pages[f"{name}.html"] for name in ("report", "comparison", "captures", "tuning")},
    }


def completed(text: str, source: str) -> str:
    """Return the text of the page `source` as the site has it: with what is made, and without links to files that the site lacks."""
    from . import api, command_line, front, habana_names, presets, samples

    makers = {each.__name__.rpartition(".")[2]: each.inserted for each in (command_line, front, habana_names, presets, samples)}

    def insert(found: re.Match[str]) -> str:
        return api.inserted(found[2].split()) if found[1] == "docstrings" else makers[found[2]]()

    return linked(_INSERT.sub(insert, text), source)


def linked(text: str, source: str) -> str:
    """Return the text with links out of docs/pages mended: to the site's own copy where it has one, else the words and the path."""

    def mended(found: re.Match[str]) -> str:
        is_picture, words, target = found[1], found[2], found[3]
        path = (PAGES / source).parent.joinpath(target).resolve()
        if path.is_relative_to(PAGES) or not path.is_relative_to(ROOT):
            return found[0]
        up = "../" * source.count("/")
        inside = path.relative_to(ROOT).as_posix()
        if is_picture:
            return f"![{words}]({up}images/{path.name})"
        return f"`{inside}`" if inside.endswith(words) else f"{words} (`{inside}`)"

    return _LINK.sub(mended, text)
