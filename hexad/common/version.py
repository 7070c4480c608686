"""The version, on the lowest floor so that every floor may name it."""

__version__ = "0.1.0"
