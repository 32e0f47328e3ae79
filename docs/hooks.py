"""mkdocs's hook: adds the pages and files that are made from the code, so that nothing of it is typed by hand a second time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from making import made

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

_made = cache(made)  # a server that builds again after a change of a page makes them once


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of docs/pages and those that are made."""
    from mkdocs.structure.files import File

    for target, content in _made().items():
        if isinstance(content, Path):
            files.append(File.generated(config, target, abs_src_path=str(content)))
        else:
            files.append(File.generated(config, target, content=content))
    return files
