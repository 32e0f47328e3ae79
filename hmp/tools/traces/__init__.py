"""The outputs of two programs' modules, recorded and compared: capture() and compare_captures()."""
