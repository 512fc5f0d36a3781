"""Runs an unmodified FSDP1 script on fsdp_flat: ``python -m fsdp_flat.run script.py args...``."""

from __future__ import annotations

import importlib.machinery
import io
import json
import os
import runpy
import sys
from types import ModuleType, TracebackType
from typing import Any, NoReturn

_USAGE = """\
usage: python -m fsdp_flat.run [options] script.py [arguments of the script ...]
       python -m fsdp_flat.run [options] -m module [arguments of the module ...]
       torchrun --nproc-per-node 2 -m fsdp_flat.run script.py [arguments of the script ...]

Run a script that was written for torch.distributed.fsdp's FullyShardedDataParallel on fsdp_flat, as python itself
would run it, with fsdp_flat.install() called first. Processes that it starts with multiprocessing (so with
torch.multiprocessing.spawn) use fsdp_flat too.

options, before the script:
  -m module          run a module or a package, as python -m does
  -f, --fully-shard  take over FSDP2's names too (fully_shard, FSDPModule, ...)
  -v, --verbose      say on stderr which names fsdp_flat takes over
  --json             the same, as JSON
  -h, --help         show this text

Example: torchrun --nproc-per-node 2 -m fsdp_flat.run train.py --lr 1e-3
"""


def main(arguments: list[str]) -> None:
    """Run the script that ``arguments`` name, as ``__main__``.

    Args:
        arguments: the command line after ``python -m fsdp_flat.run``.

    Raises:
        SystemExit: with the exit status of the script; 2 if the command line is wrong or there is no such script.
    """
    rest, given = list(arguments), set()
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        option = rest.pop(0)
        if option not in ("-f", "--fully-shard", "-h", "--help", "--json", "-v", "--verbose"):
            _fail(f"unknown option {option}; options of the script come after it")
        given.add(option.strip("-")[0])
    if "h" in given:
        print(_USAGE, end="")
        raise SystemExit(0)
    fully_shard = "f" in given
    is_module = rest[:1] == ["-m"]
    rest = rest[is_module:]
    if not rest:
        _fail("no module named after -m" if is_module else "no script given")
    from fsdp_flat.compat import client_gates, install  # here: the help needs no torch

    client_gates.start_processes_with(("-m", "fsdp_flat.run", *(["--fully-shard"] if fully_shard else [])))
    done = install(fully_shard)
    if given - {"f"}:
        print(json.dumps(done.replaced) if "j" in given else f"fsdp_flat: {done}", file=sys.stderr)
    sys.argv = rest
    sys.modules["__main__"] = ModuleType("__main__")
    sys.excepthook = _without_our_frames(sys.excepthook)
    if is_module:
        # Python itself calls this for -m; it runs the code in the module that is __main__ and sets sys.argv[0].
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    else:
        _run_script(rest[0])


def _run_script(path: str) -> None:
    absolute = os.path.abspath(path)
    try:
        with io.open_code(absolute) as file:
            source = file.read()
    except OSError as error:
        _fail(f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}")
    if not getattr(sys.flags, "safe_path", False):
        # Under -m this is the working directory; a script expects its own directory there.
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    namespace = vars(sys.modules["__main__"])
    loader = importlib.machinery.SourceFileLoader("__main__", absolute)
    namespace.update(__file__=absolute, __loader__=loader, __builtins__=sys.modules["builtins"], __annotations__={})
    exec(compile(source, absolute, "exec", dont_inherit=True), namespace)


def _without_our_frames(show: Any) -> Any:
    """Return an excepthook whose traceback begins at the script."""

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        last = found = traceback
        while found is not None:
            if found.tb_frame.f_code.co_filename == __file__:
                last = found.tb_next
            found = found.tb_next
        show(kind, error.with_traceback(last), last)

    return hook


def _fail(message: str) -> NoReturn:
    print(f"fsdp_flat.run: {message}; see python -m fsdp_flat.run --help", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
