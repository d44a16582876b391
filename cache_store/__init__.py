"""Prefix blocks: keys, the memory pool, the SSD store with its index, and the facade the engine uses."""
