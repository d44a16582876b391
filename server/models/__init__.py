"""Finding and fetching models: local folders, the hub, and the demo model. Nothing here loads MLX."""
