"""Holds the version of the library, for setup.py too, which reads it without torch."""

__version__ = "0.1.0"
