"""A run: start, session, loop, hooks, resume, record, import."""
