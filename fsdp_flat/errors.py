"""Defines every error that fsdp_flat raises on purpose.

::

    FsdpFlatError
    |-- OptionError            (ValueError)           an argument or a model that cannot be used as given
    |   |-- RankMismatchError                         ranks were given different models, orders or weights
    |   |-- TiedParameterError                        one parameter shared by units that were made separately
    |   |-- ShardingError      (AssertionError too)   a module or dim that fully_shard cannot shard
    |   |-- UnevenDimError     (NotImplementedError too)  a dim other than 0 that the ranks do not divide evenly
    |   `-- MaterializeError   (AttributeError too)   a meta-device module that cannot initialise itself
    |-- OptionTypeError        (TypeError)            an argument of the wrong type
    |-- UsageError             (RuntimeError)         a call in the wrong order or on the wrong object
    |   |-- PhaseError         (AssertionError too)   the same, where torch raises AssertionError
    |   |-- LocalShardError    (ValueError too)       an optimizer that needs full parameters was given local shards
    |   `-- PeerFailureError                          another rank failed; its message is in the text
    |-- UnsupportedError       (NotImplementedError)  a combination that does not exist
    `-- LoadError              (RuntimeError)         a state dict that does not fit the model

Each class is also the built-in type in brackets, which FSDP1 or FSDP2 raises for the same condition, so
``except ValueError`` written for either still works.
"""

from __future__ import annotations


class FsdpFlatError(Exception):
    """Groups all errors that fsdp_flat raises on purpose, as their base class."""


class OptionError(FsdpFlatError, ValueError):
    """Raised if an argument, or the model itself, cannot be used as given."""


class RankMismatchError(OptionError):
    """Raised if ranks of one group were given different models, unit orders or weights."""


class TiedParameterError(OptionError):
    """Raised if one parameter is shared by units that were wrapped separately."""


class ShardingError(OptionError, AssertionError):
    """Raised if ``fully_shard`` gets a module that is sharded already, or a dim that its parameter does not have."""


class UnevenDimError(OptionError, NotImplementedError):
    """Raised if a parameter is to be sharded on a dim other than 0 that the number of ranks does not divide."""


class MaterializeError(OptionError, AttributeError):
    """Raised if a module on the meta device has no way to initialise its parameters."""


class OptionTypeError(FsdpFlatError, TypeError):
    """Raised if an argument has the wrong type."""


class UsageError(FsdpFlatError, RuntimeError):
    """Raised for a call in the wrong order or on the wrong object."""


class PhaseError(UsageError, AssertionError):
    """Raised for a :class:`UsageError` for which FSDP1 or FSDP2 raises ``AssertionError``."""


class LocalShardError(UsageError, ValueError):
    """Raised if an optimizer that computes with full parameters, as Muon does, was given local shards."""


class PeerFailureError(UsageError):
    """Raised if another rank of the group failed; its rank and message are in the text."""


class UnsupportedError(FsdpFlatError, NotImplementedError):
    """Raised for a combination of options that does not exist."""


class LoadError(FsdpFlatError, RuntimeError):
    """Raised if a state dict does not fit the model it is loaded into."""


def counted(num: int, noun: str) -> str:
    """Return a number with a noun, given in its plural ("3 ranks", "1 rank"), which ends in s."""
    one = noun.removesuffix("ies") + "y" if noun.endswith("ies") else noun.removesuffix("s")
    return f"{num:,} {one if num == 1 else noun}"


def phrase(error: object) -> str:
    """Return the text of an error without its full stop, as a part of another sentence."""
    return str(error).rstrip(". ")


def some_of(items: list[str] | tuple[str, ...], most: int, separator: str = ", ") -> str:
    """Join up to ``most`` of the items for an error text, and the number of the rest."""
    shown = separator.join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"
