"""`python -m dtrain` is `dtrain`."""

from dtrain.cli import main

main()
