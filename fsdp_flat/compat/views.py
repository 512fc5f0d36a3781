"""Defines the base class of objects that present units and parameters under names of torch's FSDPs."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from fsdp_flat.compat.inner_names import advice_for


def derived(path: str, kind: type[property] = property) -> Any:
    """Return a property, of a kind, whose value is read at a dotted path below the object."""
    return kind(attrgetter(path), doc=f"Reads ``{path}``.")


def assignable(path: str, convert: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return a property whose value is read at a dotted path below the object, and set there, converted."""
    before, _, last = path.rpartition(".")

    def assign(self: Any, value: Any) -> None:
        setattr(attrgetter(before)(self), last, convert(value))

    return property(attrgetter(path), assign, doc=f"Reads and sets ``{path}``.")


class View:
    """Presents an object of this library under torch's names; a name that it lacks raises an error that says so.

    A subclass has the name of torch's class. Two views of one class with the same arguments are equal.
    """

    def __init__(self, *viewed: Any) -> None:
        self.__dict__["_viewed"] = viewed

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._viewed == self._viewed

    def __hash__(self) -> int:
        # Options are not hashable; the first argument, a unit or a module, is equal to itself alone.
        return hash((type(self), id(self._viewed[0])))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{self._hint(name)}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what has an effect; raise for any other name, which the library would never read."""
        own: Any = getattr(type(self), name, None)
        if not hasattr(own, "__set__") or (isinstance(own, property) and own.fset is None):
            raise AttributeError(
                f"{name!r} of a {type(self).__name__} was assigned, which would have no effect{self._hint(name)}"
            )
        own.__set__(self, value)

    def _hint(self, name: str) -> str:
        if name.startswith("__"):
            return "."
        advice = advice_for(type(self).__name__, name)
        return f": fsdp_flat shows an object of its own in the place of torch's. Instead: {advice}."
