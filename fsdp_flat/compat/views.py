"""Defines the base class of objects that present units and parameters under names of torch's FSDPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class View:
    """Presents an object of this library under torch's names; a name that it lacks raises an error that says so.

    Two views of one class with the same arguments are equal.
    """

    # Attributes of torch's class by what to use instead.
    _INSTEAD: ClassVar[Mapping[str, str]] = {}

    def __init__(self, *viewed: Any) -> None:
        self.__dict__["_viewed"] = viewed

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._viewed == self._viewed

    def __hash__(self) -> int:
        return hash((type(self), self._viewed))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{self._hint(name)}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what has an effect; raise for any other name, which the library would never read."""
        own = getattr(type(self), name, None)
        if not isinstance(own, property) or own.fset is None:
            raise AttributeError(
                f"{name!r} of a {type(self).__name__} was assigned, which would have no effect{self._hint(name)}"
            )
        own.fset(self, value)

    def _hint(self, name: str) -> str:
        if name.startswith("__"):
            return "."
        shown = ", ".join(sorted(key for key in dir(type(self)) if key not in dir(View)))
        advice = self._INSTEAD.get(name, "call a method of the sharded module")
        return f": fsdp_flat shows an object of its own in the place of torch's, with {shown}. Instead: {advice}."
