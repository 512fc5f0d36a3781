"""Defines the commands of ``fsdp-flat``: each parses its arguments, calls one function, and shows the result."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from fsdp_flat.errors import FsdpFlatError
from fsdp_flat.version import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="See, plan and convert sharded models and their checkpoints.",
    epilog="Example: fsdp-flat show run/step-00000100. Exit status: 0, done; 1, files differ or are damaged, or "
    "changes are pending; 2, bad input.",
)


def run_command(arguments: Sequence[str]) -> int:
    """Run a command and return its exit status; bad input is one line on the standard error stream, and status 2."""
    # Boxes and colors are for people.
    app.rich_markup_mode = "rich" if sys.stdout.isatty() else None
    name = next((f"fsdp-flat {word}" for word in arguments[:1] if not word.startswith("-")), "fsdp-flat")
    try:
        return int(app(list(arguments), prog_name="fsdp-flat", standalone_mode=False) or 0)
    except (TyperException, FsdpFlatError) as error:
        text = error.format_message() if isinstance(error, TyperException) else str(error)
    except OSError as error:
        text = str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
    print(f"{name}: {' '.join(text.split())}", file=sys.stderr)
    return 2


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
    as_json: Json = False,
) -> int:
    if version:
        print(json.dumps({"version": __version__}) if as_json else f"fsdp-flat {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)
    return 0


_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


# Both are run by ``command.py``, which needs no extra; here they are for the list of commands.
@app.command("run", context_settings=_PASSED_ON, epilog="Example: fsdp-flat run train.py --lr 1e-3")
def _run() -> None:
    """Run an FSDP1 script on fsdp_flat, unchanged."""


@app.command("migrate", context_settings=_PASSED_ON, epilog="Example: fsdp-flat migrate src/")
def _migrate() -> None:
    """Rewrite a codebase's imports of FSDP1."""
