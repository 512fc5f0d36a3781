"""Provides command-line tools (layer 6). Nothing in the library imports them."""
