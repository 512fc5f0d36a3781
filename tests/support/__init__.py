"""Provides warm worker ranks, comparisons, and reference implementations for tests."""

from .compare import assert_close, assert_equal
from .pool import RankFailure, Ranks
from .rank_tests import OWN_PARAMETERS, OWN_STATISTICS, on_ranks

__all__ = ["OWN_PARAMETERS", "OWN_STATISTICS", "RankFailure", "Ranks", "assert_close", "assert_equal", "on_ranks"]
