"""What is computed. No model knows a device."""
