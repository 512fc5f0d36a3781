"""Everything fsdp_flat raises on purpose.

::

    FsdpFlatError
    |-- OptionError            (ValueError)           an argument or a model that cannot be used as given
    |   |-- RankMismatchError                         ranks were given different models, orders or weights
    |   |-- TiedParameterError                        one parameter shared by units that were made separately
    |   `-- MaterializeError   (AttributeError too)   a meta-device module that cannot initialise itself
    |-- OptionTypeError        (TypeError)            an argument of the wrong type
    |-- UsageError             (RuntimeError)         a call in the wrong order or on the wrong object
    |   |-- PhaseError         (AssertionError too)   the same, where FSDP1 raises AssertionError
    |   `-- PeerFailureError                          another rank failed; its message is in the text
    |-- UnsupportedError       (NotImplementedError)  a combination that does not exist
    `-- LoadError              (RuntimeError)         a state dict that does not fit the model

Each class is also the built-in type in brackets, which is the type that FSDP1 raises
for the same condition, so ``except ValueError`` written for FSDP1 goes on working.
"""

from __future__ import annotations

__all__ = [
    "FsdpFlatError",
    "LoadError",
    "MaterializeError",
    "OptionError",
    "OptionTypeError",
    "PeerFailureError",
    "PhaseError",
    "RankMismatchError",
    "TiedParameterError",
    "UnsupportedError",
    "UsageError",
]


class FsdpFlatError(Exception):
    """Base of every error that fsdp_flat raises on purpose."""


class OptionError(FsdpFlatError, ValueError):
    """An argument, or the model itself, cannot be used as given."""


class RankMismatchError(OptionError):
    """Ranks of one group were given different models, unit orders or weights."""


class TiedParameterError(OptionError):
    """One parameter is shared by units that were wrapped separately."""


class MaterializeError(OptionError, AttributeError):
    """A module on the meta device has no way to initialise its parameters."""


class OptionTypeError(FsdpFlatError, TypeError):
    """An argument has the wrong type."""


class UsageError(FsdpFlatError, RuntimeError):
    """A call came in the wrong order or on the wrong object."""


class PhaseError(UsageError, AssertionError):
    """A :class:`UsageError` for which FSDP1 raises ``AssertionError``."""


class PeerFailureError(UsageError):
    """Another rank of the group failed; its rank and message are in the text."""


class UnsupportedError(FsdpFlatError, NotImplementedError):
    """A combination of options that does not exist."""


class LoadError(FsdpFlatError, RuntimeError):
    """A state dict does not fit the model it is loaded into."""
