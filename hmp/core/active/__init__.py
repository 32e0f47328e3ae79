"""The policy that is active in this thread or asyncio task, and the contexts that change it."""
