"""Training: assembly, state, step, loop, hooks, resume and the run record."""
