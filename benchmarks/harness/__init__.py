"""How it is timed, checked, compared and written down."""
