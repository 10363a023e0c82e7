"""The processes of this machine: supervisor, process group, `verify`, `doctor`."""
