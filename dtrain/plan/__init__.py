"""Plan a run for hardware that is not present: compile its step, read the program, predict memory, time and price."""
