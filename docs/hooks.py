"""mkdocs's hooks: what is made from the code, links that work on the site, and no network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from making import completed, made

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

# What the plugin `offline` takes from the network, so that the search works on pages opened from a folder.
_SHIM = "https://unpkg.com/iframe-worker/shim"
_FROM_NETWORK = re.compile(r"""<(?:script|img|iframe|source|link rel="?stylesheet"?)\b[^>]*\b(?:src|href)=["']?https?://[^>]*>""")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of docs/pages and those that are made."""
    from mkdocs.structure.files import File

    for target, content in made().items():
        if isinstance(content, Path):
            files.append(File.generated(config, target, abs_src_path=str(content)))
        else:
            files.append(File.generated(config, target, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page's text with what is made from the code, and with links that work on the site."""
    return completed(markdown, page.file.src_uri)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Return the page with the site's own copy of the shim. Whatever else a browser would fetch from elsewhere is an error."""
    up = "../" * page.file.dest_uri.count("/")
    output = output.replace(_SHIM, f"{up}assets/iframe-worker.js")
    if fetched := _FROM_NETWORK.findall(output):
        raise RuntimeError(f"{page.file.src_uri} needs a network, for {fetched[0]}; put the file into docs/pages/assets")
    return output
