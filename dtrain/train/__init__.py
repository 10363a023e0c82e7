"""Training itself: state, step, loop, hooks, guard."""
