"""The models. A model refers to no device, mesh axis or engine: its `Context` places the work."""
