"""What casts: from torch's ops and the text of a policy to `convert()`. Imports nothing of the tools."""
