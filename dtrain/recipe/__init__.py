"""Read YAML into a Recipe and check it, without a device."""
