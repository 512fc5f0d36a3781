"""Provides tests with warm worker ranks, comparisons that can fail, and references to compare with."""

from .compare import assert_close, assert_equal
from .pool import RankFailure, Ranks
from .rank_tests import on_ranks

__all__ = ["RankFailure", "Ranks", "assert_close", "assert_equal", "on_ranks"]
