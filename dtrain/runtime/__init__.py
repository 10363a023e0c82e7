"""Processes of this machine: the supervisor, its process group, `verify`, `doctor`."""
