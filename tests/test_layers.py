"""Each file of fsdp_flat imports its own folder and lower layers only."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "fsdp_flat"
TOP = 7

# Every folder or module below the package that is not named here is on layer 6.
LAYERS = {
    "errors": 0,
    "api": 0,
    "layout": 0,
    "sizes": 0,
    "user_warnings": 0,
    "comm": 1,
    "wrap": 1,
    "core": 2,
    "runtime": 3,
    "guards": 4,
    "state": 5,
    "checkpoint": TOP,
    "compat": TOP,
    "composable": TOP,
    "fully_sharded_data_parallel": TOP,
    "run": TOP,
    "migrate": TOP,
    "__main__": TOP,
    "tools": TOP,
    # The package's own names are for its users: no file imports them.
    "": TOP + 1,
}
DEFAULT_LAYER = 6
# Packages of one layer may not know each other, but these are open: the errors to all, and the top two layers inside.
SHARED_PACKAGES = {"errors"}
OPEN_LAYERS = {DEFAULT_LAYER, TOP}
# Integers and strings: these must be usable, and testable, without any process group.
WITHOUT_DISTRIBUTED = {"errors", "api", "layout"}


def violations(sources: Mapping[str, str]) -> list[str]:
    """What the files import that they must not, one line each.

    Args:
        sources: ``{path: source}`` of the package's files; paths start with the package's name and use ``/``.
    """
    modules = {module_of(path) for path in sources}
    found = []
    for path, source in sources.items():
        package = package_of(module_of(path))
        for line, imported in imports_of(source, path, modules):
            problem = problem_of(package, imported)
            if problem:
                found.append(f"{path}:{line}: {problem}")
    return found


def module_of(path: str) -> str:
    """The dotted name of a file."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def package_of(module: str) -> str:
    """The folder or top-level module that a module belongs to; empty for the package's own ``__init__``."""
    return module.removeprefix(PACKAGE).removeprefix(".").partition(".")[0]


def layer_of(package: str) -> int:
    """The layer of a package."""
    return LAYERS.get(package, DEFAULT_LAYER)


def problem_of(package: str, imported: str) -> str | None:
    """Why files of ``package`` must not import the module ``imported``, or None if they may."""
    if is_inside(imported, "torch.distributed") and package in WITHOUT_DISTRIBUTED:
        return f"imports {imported}, but {package} has to work without torch.distributed"
    if is_inside(imported, "torch.distributed.fsdp") and package != "compat":
        return f"imports {imported}, which only {PACKAGE}/compat/ may"
    if package == "errors" and imported != "__future__":
        return f"imports {imported}, but errors.py imports nothing"
    if not is_inside(imported, PACKAGE):
        return None
    other = package_of(imported)
    if other == package:
        return None
    here, there = layer_of(package), layer_of(other)
    if there < here or other in SHARED_PACKAGES or (there == here and here in OPEN_LAYERS):
        return None
    return f"imports {imported} of layer {there}, but is on layer {here}"


def is_inside(module: str, package: str) -> bool:
    """Whether ``module`` is ``package`` or below it."""
    return module == package or module.startswith(package + ".")


@functools.cache
def parsed(source: str) -> ast.Module:
    """Parse a file once for all tests."""
    return ast.parse(source)


def imports_of(source: str, path: str, modules: set[str]) -> Iterator[tuple[int, str]]:
    """``(line, module)`` of every import in a file, inside functions and for type checkers too.

    The names torch.distributed and torch.distributed.fsdp also count when they are only spelled out.
    """
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(node, path)
            for alias in node.names:
                # `from package import name` means the module of that name where there is one.
                name = f"{base}.{alias.name}"
                is_module = name in modules or any(is_inside(module, name) for module in modules)
                outside = is_inside(base, "torch")
                yield node.lineno, name if is_module or outside else base
        elif isinstance(node, ast.Call) and is_import_call(node.func) and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node.lineno, argument.value
        elif isinstance(node, ast.Attribute):
            spelled = ast.unparse(node)
            if spelled in ("torch.distributed", "torch.distributed.fsdp"):
                yield node.lineno, spelled


def absolute_base(node: ast.ImportFrom, path: str) -> str:
    """The module after ``from``, with leading dots resolved."""
    if node.level == 0:
        return node.module or ""
    folders = path.split("/")[:-1]
    parents = folders[: len(folders) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])


def is_import_call(function: ast.expr) -> bool:
    """Whether a call imports: ``importlib.import_module`` or ``__import__``."""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    return name in ("import_module", "__import__")


def package_sources() -> dict[str, str]:
    """Every file of the package."""
    root = Path(__file__).parent.parent
    return {path.relative_to(root).as_posix(): path.read_text() for path in sorted((root / PACKAGE).rglob("*.py"))}


def test_each_file_imports_its_own_folder_and_lower_layers_only() -> None:
    sources = package_sources()
    assert f"{PACKAGE}/errors.py" in sources
    assert violations(sources) == []


def circles(sources: Mapping[str, str], package: str) -> list[set[str]]:
    """Modules of a folder that import each other in a circle, for type checkers too.

    Args:
        sources: ``{path: source}`` of the package's files.
        package: the folder.
    """
    modules = {module_of(path) for path in sources}
    edges = {
        module_of(path): {
            imported
            for _, imported in imports_of(source, path, modules)
            if imported in modules and package_of(imported) == package and not path.endswith("__init__.py")
        }
        for path, source in sources.items()
        if package_of(module_of(path)) == package
    }

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            new = edges.get(left.pop(), set()) - seen
            seen |= new
            left += new
        return seen

    found = {frozenset(other for other in reached(start) if start in reached(other)) for start in edges}
    return [set(circle) for circle in found if circle]


@pytest.mark.parametrize("package", sorted({package_of(module_of(path)) for path in package_sources()} - {""}))
def test_no_module_is_in_a_circle(package: str) -> None:
    assert circles(package_sources(), package) == []


SHARED_MEMORY = f"{PACKAGE}.comm.shm"


def test_one_module_alone_knows_of_shared_memory_and_uses_its_interface() -> None:
    sources = package_sources()
    modules = {module_of(path) for path in sources}
    found = {
        (module_of(path), imported)
        for path, source in sources.items()
        for _, imported in imports_of(source, path, modules)
        if is_inside(imported, SHARED_MEMORY) and not is_inside(module_of(path), SHARED_MEMORY)
    }
    assert found == {(f"{PACKAGE}.comm.routes", SHARED_MEMORY)}


# One file for torch's private names in each package that needs them.
SAME_BASENAMES = {"__init__"}
SAME_NAMES = {"main"}


def repeated(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return names that occur several times, with the files that they occur in."""
    files: dict[str, list[str]] = {}
    for name, path in names:
        files.setdefault(name, []).append(path)
    return {name: paths for name, paths in files.items() if len(paths) > 1}


def test_no_two_modules_have_one_basename() -> None:
    names = [(Path(path).stem, path) for path in package_sources()]
    assert repeated((name, path) for name, path in names if name not in SAME_BASENAMES) == {}


def test_no_two_classes_or_public_functions_have_one_name() -> None:
    names = [
        (node.name, path)
        for path, source in package_sources().items()
        for node in parsed(source).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
        if "overload" not in map(ast.unparse, node.decorator_list)
    ]
    assert repeated((name, path) for name, path in names if name not in SAME_NAMES) == {}
