"""Where parameters come from and go to: a start's sources, files, checkpoints of other runs, exports, adapters."""
