"""Where the printer of a result is found. A result is data and imports no printer; each printer imports the data that it prints."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

# The method of a result → the module and the function that do its work. None is imported before it is asked for: some need an extra.
PRINTERS = {
    "Benchmark.__str__": "hmp.tools.benchmark.table:table",
    "CaptureComparison.to_html": "hmp.tools.traces.page:captures_page",
    "Comparison.to_html": "hmp.tools.compare.page:comparison_page",
    "Report.__str__": "hmp.tools.record.text:text",
    "Report.table": "hmp.tools.record.text:table",
    "Report.to_html": "hmp.tools.record.page:report_page",
    "TuneResult.__str__": "hmp.tools.tune.table:table",
    "TuneResult.save": "hmp.tools.tune.files:write",
    "TuneResult.to_html": "hmp.tools.tune.page:tuning_page",
}


def printer(method: str) -> Callable[..., Any]:
    """The function that does the work of that method of a result."""
    found: Callable[..., Any] = resolve_name(PRINTERS[method])
    return found
