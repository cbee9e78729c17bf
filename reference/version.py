"""The version of Twin Engine, which `pyproject.toml` reads here."""

__version__ = "0.2.0"
