"""Compares what a fixed set of programs does in two checkouts: ``python -m tests.trace --against REVISION``."""
