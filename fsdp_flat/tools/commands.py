"""Defines the commands of ``fsdp-flat``: each parses its arguments, calls one function, and shows the result."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

# Modules that import torch are imported by the commands that need them: --help and --version need none.
import typer
from typer.exceptions import TyperException

from fsdp_flat.errors import FsdpFlatError
from fsdp_flat.sizes import nbytes_of
from fsdp_flat.version import __version__

app = typer.Typer(
    no_args_is_help=False,
    pretty_exceptions_enable=False,
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


def _path(text: str) -> Path:
    """Return the path of an argument, which may be a URL that fsspec knows."""
    if "://" not in text:
        return Path(text)
    from fsdp_flat.checkpoint.files import path_of_user

    try:
        return path_of_user(text, "PATH")
    except FsdpFlatError as error:
        raise typer.BadParameter(str(error)) from error


Checkpoint = Annotated[Path, typer.Argument(metavar="PATH", parser=_path, help="A checkpoint: a file or a folder.")]
Source = Annotated[Path, typer.Argument(metavar="A", parser=_path, help="A checkpoint of any kind.")]
Target = Annotated[Path, typer.Argument(metavar="B", help="The file or folder to make.")]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="Number of ranks to write files for.")]
ModelOnly = Annotated[bool, typer.Option("--model-only", help="Leave out the optimizer and everything else.")]
MaxFile = Annotated[str, typer.Option("--max-file", help="Size of the largest safetensors file.")]
Key = Annotated[str | None, typer.Option("--key", help="Name under which the checkpoint has the model.")]


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
    as_json: Json = False,
) -> int:
    if version:
        print(json.dumps({"version": __version__}) if as_json else f"fsdp-flat {__version__}")
    elif as_json:
        raise typer.BadParameter("--json comes after the command, or with --version")
    elif context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)
    return 0


# These two are run by ``command.py``, which needs no extra, and print their own help; here they are listed.
@app.command("run")
def _run() -> None:
    """Run an FSDP1 script on fsdp_flat, unchanged."""


@app.command("migrate")
def _migrate() -> None:
    """Rewrite a codebase's imports of FSDP1."""


@app.command("ls", epilog="Example: fsdp-flat ls run")
def _ls(
    folder: Annotated[Path, typer.Argument(metavar="DIR", parser=_path, help="A folder.")],
    allow_pickle: Pickle = False,
    as_json: Json = False,
) -> int:
    """List the checkpoints in a folder."""
    from fsdp_flat.tools.ls import show_folder

    return show_folder(folder, allow_pickle=allow_pickle, as_json=as_json)


@app.command("show", epilog="Example: fsdp-flat show run/step-00000100")
def _show(path: Checkpoint, allow_pickle: Pickle = False, as_json: Json = False) -> int:
    """Show what a checkpoint holds."""
    from fsdp_flat.tools.show import show_checkpoint

    return show_checkpoint(path, allow_pickle=allow_pickle, as_json=as_json)


@app.command("verify", epilog="Example: fsdp-flat verify run/step-00000100")
def _verify(path: Checkpoint, allow_pickle: Pickle = False, as_json: Json = False) -> int:
    """Check that a checkpoint is complete and undamaged."""
    from fsdp_flat.tools.verify import show_problems

    return show_problems(path, allow_pickle=allow_pickle, as_json=as_json)


@app.command("diff", epilog="Example: fsdp-flat diff run/step-00000100 model.safetensors")
def _diff(
    a: Source,
    b: Annotated[Path, typer.Argument(metavar="B", parser=_path, help="Another one, of any format.")],
    key: Key = None,
    atol: Annotated[float, typer.Option("--atol", min=0, help="Absolute difference of values that is none.")] = 0.0,
    rtol: Annotated[float, typer.Option("--rtol", min=0, help="The same, as a factor of the value in B.")] = 0.0,
    allow_pickle: Pickle = False,
    as_json: Json = False,
) -> int:
    """Compare two checkpoints: names, shapes, values."""
    from fsdp_flat.tools.diff import show_differences

    return show_differences(a, b, key=key, atol=atol, rtol=rtol, allow_pickle=allow_pickle, as_json=as_json)


@app.command("convert", epilog="Example: fsdp-flat convert run/step-00000100 hub --to safetensors")
def _convert(
    a: Source,
    b: Target,
    to: Annotated[
        Literal["full", "dcp", "sharded", "safetensors", "torch"],
        typer.Option(
            "--to",
            help="full: the model in one file of torch.save; torch: all, likewise; safetensors: the model, for hubs; "
            "dcp: for torch.distributed.checkpoint; sharded: for load_checkpoint.",
        ),
    ],
    ranks: Ranks = 1,
    key: Key = None,
    model_only: ModelOnly = False,
    max_file: MaxFile = "5GB",
    dtype: Annotated[str | None, typer.Option("--dtype", help="Floating-point type to write, as bfloat16.")] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="The model's config.json, for safetensors; else that beside the source."),
    ] = None,
    allow_pickle: Pickle = False,
    as_json: Json = False,
) -> int:
    """Write a checkpoint as one of another kind."""
    from fsdp_flat.tools.convert import WriteOptions, convert_checkpoint, named_dtype

    options = WriteOptions(key, model_only, ranks, nbytes_of(max_file, "--max-file"), config, named_dtype(dtype))
    return convert_checkpoint(a, b, to, options, allow_pickle=allow_pickle, as_json=as_json)


@app.command("consolidate", epilog="Example: fsdp-flat consolidate run/step-00000100 model.safetensors")
def _consolidate(
    a: Source,
    b: Annotated[Path, typer.Argument(metavar="FILE", help="The file to make: .safetensors, or of torch.save.")],
    key: Key = None,
    allow_pickle: Pickle = False,
    as_json: Json = False,
) -> int:
    """Merge the model of a checkpoint into one file."""
    from fsdp_flat.tools.convert import WriteOptions, convert_checkpoint

    kind = "safetensors" if b.suffix == ".safetensors" else "full"
    options = WriteOptions(key, model_only=True, max_file_bytes=sys.maxsize)
    return convert_checkpoint(a, b, kind, options, allow_pickle=allow_pickle, as_json=as_json)


@app.command("reshard", epilog="Example: fsdp-flat reshard run/step-00000100 run_of_8 --ranks 8")
def _reshard(
    a: Source,
    b: Target,
    ranks: Ranks,
    key: Key = None,
    model_only: ModelOnly = False,
    allow_pickle: Pickle = False,
    as_json: Json = False,
) -> int:
    """Write a checkpoint as that of another number of ranks."""
    from fsdp_flat.tools.convert import WriteOptions, convert_checkpoint

    options = WriteOptions(key, model_only, ranks)
    return convert_checkpoint(a, b, None, options, allow_pickle=allow_pickle, as_json=as_json)


Model = Annotated[str, typer.Argument(metavar="MODEL", help="module:function, a config.json, or a saved model.")]
NumRanks = Annotated[int, typer.Option("--ranks", min=1, help="Number of ranks.")]
Wrap = Annotated[list[str], typer.Option("--wrap", help="Class of modules to make units of; may be repeated.")]
Strategy = Annotated[str | None, typer.Option("--strategy", help="Name of the sharding strategy.")]
Replicas = Annotated[int, typer.Option("--replicas", min=1, help="Ranks that hold the same shard; hybrid strategies.")]
Api = Annotated[Literal["wrapper", "fully_shard"], typer.Option("--api", help="What will shard the model.")]
Precision = Annotated[
    Literal["bf16", "fp16", "fp32", "pure-bf16", "as-built"] | None,
    typer.Option(
        "--precision",
        help="bf16, fp16: compute in it, with parameters and optimizer in fp32; pure-bf16: everything in it. "
        "Without the flag bf16 for a config.json, and otherwise as the model is built.",
    ),
]
ReduceDtype = Annotated[
    Literal["fp32", "bf16"], typer.Option("--reduce-dtype", help="Reduce gradients in it, with --precision bf16, fp16.")
]


@app.command("plan", epilog="Example: fsdp-flat plan train:build --ranks 8 --batch 4x2048 --tokens --fit 80GB")
def _plan(
    context: typer.Context,
    model: Model,
    ranks: NumRanks,
    batch: Annotated[str | None, typer.Option("--batch", help="Shape of a rank's input, as 4x2048, or auto.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="The input is of integers, not floating-point.")] = False,
    wrap: Wrap = [],  # noqa: B006 (typer copies it)
    strategy: Strategy = None,
    replicas: Replicas = 1,
    api: Api = "wrapper",
    precision: Precision = None,
    reduce_dtype: ReduceDtype = "fp32",
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="Class of torch.optim, none, or module:function.")
    ] = "AdamW",
    fused: Annotated[bool, typer.Option("--fused", help="Take the optimizer's fused implementation.")] = False,
    loss: Annotated[
        str | None, typer.Option("--loss", help="module:function, called with the model and the batch.")
    ] = None,
    recompute: Annotated[
        bool | None, typer.Option("--recompute/--no-recompute", help="Recompute the forwards of units in backward.")
    ] = None,
    offload: Annotated[
        bool | None, typer.Option("--offload/--no-offload", help="Keep shards, gradients and states on the host.")
    ] = None,
    offload_optimizer: Annotated[
        bool, typer.Option("--offload-optimizer", help="Keep optimizer states on the host between steps.")
    ] = False,
    offload_activations: Annotated[
        bool, typer.Option("--offload-activations", help="Keep activations on the host until backward.")
    ] = False,
    accumulate: Annotated[
        bool, typer.Option("--accumulate", help="Reduced gradients of an earlier backward exist in the step.")
    ] = False,
    device: Annotated[str, typer.Option("--device", help="Kind of device to train on.")] = "cuda",
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", help="What a rank sends a second, as 50GB/s or 400Gbit/s.")
    ] = None,
    flops: Annotated[str | None, typer.Option("--flops", help="What a rank computes a second, as 400TFLOPS.")] = None,
    fit: Annotated[str | None, typer.Option("--fit", help="Search for a plan that fits, as 80GB.")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw the memory of the step into a file.")] = None,
    allow_pickle: Pickle = False,
    as_json: Json = False,
) -> int:
    """Answer whether training fits: bytes of a rank."""
    from fsdp_flat.tools.plan_command import PlanFlags, show_plan

    flags = PlanFlags.of(context.params)
    return show_plan(model, ranks, flags, allow_pickle=allow_pickle, as_json=as_json, picture=picture)


@app.command("describe", epilog="Example: fsdp-flat describe train:build --ranks 8 --wrap Block")
def _describe(
    context: typer.Context,
    model: Model,
    ranks: NumRanks,
    wrap: Wrap = [],  # noqa: B006 (typer copies it)
    strategy: Strategy = None,
    replicas: Replicas = 1,
    api: Api = "wrapper",
    precision: Precision = None,
    reduce_dtype: ReduceDtype = "fp32",
    allow_pickle: Pickle = False,
    as_json: Json = False,
) -> int:
    """Show the units that wrapping would make."""
    from fsdp_flat.tools.plan_command import PlanFlags, show_plan

    flags = PlanFlags.of(context.params)
    return show_plan(model, ranks, flags, allow_pickle=allow_pickle, as_json=as_json)
