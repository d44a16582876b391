"""What goes wrong before a model can be loaded. Raised by `server.models`, shown to the user by the CLI."""


class ModelError(Exception):
    """The model can't be had. The text says what is wrong and what to change."""
