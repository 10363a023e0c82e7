"""What everything else stands on: errors, field types, chips, the run folder and its lock. No JAX."""
