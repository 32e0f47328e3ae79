"""mkdocs's hooks: the pages and files that are made from the code, so that nothing of it is typed by hand a second time, and no network."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from making import made

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

# What the plugin `offline` takes from the network, so that the search works on pages that a folder holds.
_SHIM = "https://unpkg.com/iframe-worker/shim"
_FROM_NETWORK = re.compile(r"""<(?:script|img|iframe|source|link rel="?stylesheet"?)\b[^>]*\b(?:src|href)=["']?https?://[^>]*>""")
_made = cache(made)  # a server that builds again after a change of a page makes them once


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation, with every tutorial that there is behind the page that lists them."""
    (section,) = [entry for entry in config.nav or () if "Tutorials" in entry]
    found = sorted(name for name in _made() if name.startswith("tutorials/") and name != section["Tutorials"])
    section["Tutorials"] = [section["Tutorials"], *found]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of docs/pages and those that are made."""
    from mkdocs.structure.files import File

    for target, content in _made().items():
        if isinstance(content, Path):
            files.append(File.generated(config, target, abs_src_path=str(content)))
        else:
            files.append(File.generated(config, target, content=content))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The page with the shim that stands among the site's own files. Whatever else a browser would fetch from elsewhere is an error."""
    up = "../" * page.file.dest_uri.count("/")
    output = output.replace(_SHIM, f"{up}assets/iframe-worker.js")
    if fetched := _FROM_NETWORK.findall(output):
        raise RuntimeError(f"{page.file.src_uri} needs a network, for {fetched[0]}; put the file into docs/pages/assets")
    return output
