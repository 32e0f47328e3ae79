"""torch's ops: what hmp knows of each (`table`), where torch holds their names (`sites`), torch's Python functions (`python_ops`)."""
