"""Defines the commands of ``fsdp-flat``: each parses its arguments, calls one function, and shows the result."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from fsdp_flat.errors import FsdpFlatError
from fsdp_flat.tools.checkpoint_commands import (
    diff_checkpoints,
    list_checkpoints,
    show_checkpoint,
    verify_checkpoint,
)
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
Pickle = Annotated[
    bool,
    typer.Option("--allow-pickle", help="Make any object that the files name. Runs their code: trust them first."),
]
Checkpoint = Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint: a file or a folder.")]
Key = Annotated[str | None, typer.Option("--key", help="Name under which the checkpoint has the model.")]


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


@app.command("ls", epilog="Example: fsdp-flat ls run")
def _ls(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder.")],
    allow_pickle: Pickle = False,
    as_json: Json = False,
) -> int:
    """List the checkpoints in a folder."""
    return list_checkpoints(folder, allow_pickle=allow_pickle, as_json=as_json)


@app.command("show", epilog="Example: fsdp-flat show run/step-00000100")
def _show(path: Checkpoint, allow_pickle: Pickle = False, as_json: Json = False) -> int:
    """Show what a checkpoint holds."""
    return show_checkpoint(path, allow_pickle=allow_pickle, as_json=as_json)


@app.command("verify", epilog="Example: fsdp-flat verify run/step-00000100")
def _verify(path: Checkpoint, allow_pickle: Pickle = False, as_json: Json = False) -> int:
    """Check that a checkpoint is complete and undamaged."""
    return verify_checkpoint(path, allow_pickle=allow_pickle, as_json=as_json)


@app.command("diff", epilog="Example: fsdp-flat diff run/step-00000100 model.safetensors")
def _diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one, of any format.")],
    key: Key = None,
    allow_pickle: Pickle = False,
    as_json: Json = False,
) -> int:
    """Compare two checkpoints: names, shapes, values."""
    return diff_checkpoints(a, b, key=key, allow_pickle=allow_pickle, as_json=as_json)
