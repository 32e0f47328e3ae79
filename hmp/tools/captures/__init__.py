"""What each module of a program returned, in a file; and two such files beside each other: where they part, and how the gap grows."""
