"""``python -m hmp``: the same as the console script ``hmp``."""

from .cli import main

raise SystemExit(main())
