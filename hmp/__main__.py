"""``python -m hmp``: the same as the console script ``hmp``."""

from hmp.cli import main

raise SystemExit(main())
