"""The same run for hardware that is not there: compiled, read, timed and priced."""
