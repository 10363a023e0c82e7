"""From YAML to a Recipe, and what can be said of it without a device."""
