"""The Python client: `Client` (blocking) and `AsyncClient` (asyncio)."""
