"""What each extra brings: whether it is installed, new enough and importable, in a sentence that says which."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterator

from ..errors import to_install

# Extra → what it brings, as it is imported, and the oldest release that will do ("" for any). pyproject.toml says the same.
EXTRAS = {
    "report": {"jinja2": "3.1", "matplotlib": "3.8"},
    "demo": {"sklearn": "1.3", "numpy": "", "jinja2": "3.1", "matplotlib": "3.8"},
    "capture": {"safetensors": "0.4.5", "numpy": ""},
    "weights": {"safetensors": "0.4.5"},
    "lightning": {"lightning": "1.8"},
    "transformers": {"transformers": "4.57", "accelerate": "0.26"},
}
_DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # where it is not the name of the import


def lacking(extra: str, *packages: str) -> str:
    """Return what of an extra, or of those packages of it, is missing or too old, as words after "needs"; "" for nothing."""
    oldest = EXTRAS[extra]
    absent = [name for name in packages or oldest if importlib.util.find_spec(name) is None]
    old = [too_old(name, oldest[name]) for name in packages or oldest if name not in absent]
    return "; ".join(filter(None, [", ".join([*absent, "not installed here"]) if absent else "", *old]))


def too_old(package: str, oldest: str) -> str:
    """Return the needed and the installed release of a package, as words after "needs"; "" if the installed one will do."""
    there = _release(package)
    return f"{package} {oldest} or later, and {there} is installed" if there and _numbers(there) < _numbers(oldest) else ""


@contextlib.contextmanager
def needed(who_needs: str, extra: str, *packages: str) -> Iterator[None]:
    """Import these packages of an extra, within.

    Raise ImportError where one is not installed or too old: it says which.
    """
    if lacks := lacking(extra, *packages):
        raise ImportError(f"{who_needs} {lacks}: {to_install(extra)}")
    yield


def _release(package: str) -> str:
    """Return the release that is installed; "" for what no installer put there."""
    from importlib import metadata  # slow to import

    try:
        return metadata.version(_DISTRIBUTIONS.get(package, package))
    except metadata.PackageNotFoundError:
        return ""


def _numbers(release: str) -> list[int]:
    """4, 25, 1 of `4.25.1.dev0`."""
    return [int(each) for each in re.findall(r"\d+", re.match(r"[\d.]*", release)[0])]  # type: ignore[index]  # it matches any text
