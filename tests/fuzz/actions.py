"""All actions of programs; importing the modules registers them, in this order."""

from __future__ import annotations

from . import alone_actions, param_actions, row_actions, state_actions, step_actions, unit_actions  # noqa: F401
from .action_kinds import ACTIONS as ACTIONS
from .session import Session


def close_session(session: Session) -> None:
    """Compare at the end of a program."""
    session.drop_pending()
    if not session.unsynced:
        session.compare_all()
    session.compare_optimizers()
