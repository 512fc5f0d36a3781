"""Cleans parameter FQNs of wrapper components, joins them, and names flat parameters."""

from __future__ import annotations

import re
from collections.abc import Collection

# The attribute under which a wrapper keeps its module (FSDP1's name), and the prefix that a level of wrapping adds.
FSDP_WRAPPED_MODULE = "_fsdp_wrapped_module"
FSDP_PREFIX = FSDP_WRAPPED_MODULE + "."
# The name of a unit's first flat parameter (FSDP1's name).
FLAT_PARAM = "_flat_param"
# The attributes of torch's activation-checkpoint and offload wrappers, and of the result of ``torch.compile(module)``.
CHECKPOINT_WRAPPED_MODULE = "_checkpoint_wrapped_module"
COMPILED_MODULE = "_orig_mod"

_WRAPPER_COMPONENTS = frozenset({FSDP_WRAPPED_MODULE, CHECKPOINT_WRAPPED_MODULE, COMPILED_MODULE})
_COMPONENTS_IN_TEXT = re.compile(rf"(?<!\w)(?:{'|'.join(sorted(_WRAPPER_COMPONENTS))})\.")
_FLAT_PARAM_NAME = re.compile(rf"{FLAT_PARAM}(_\d+)?")


def clean_fqn(name: str) -> str:
    """Return the dotted ``name`` without the components that wrappers add.

    Only complete components match, so a module named ``x_orig_mod`` keeps its name.

    >>> clean_fqn("_orig_mod.block._fsdp_wrapped_module.fc._checkpoint_wrapped_module.weight")
    'block.fc.weight'
    """
    if "_wrapped_module" not in name and COMPILED_MODULE not in name:
        return name  # most names; wrapping asks for thousands
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_COMPONENTS)


def clean_text(text: str) -> str:
    """Return ``text``, of a torch error for instance, with :func:`clean_fqn` applied to every dotted name in it.

    >>> clean_text("size mismatch for _fsdp_wrapped_module.fc._checkpoint_wrapped_module.weight: copying ...")
    'size mismatch for fc.weight: copying ...'
    """
    return _COMPONENTS_IN_TEXT.sub("", text)


def owners_of_constants(names: Collection[str]) -> dict[str, str]:
    """Return the names of tensors that are below that of another one, the constants of a quantized parameter, with it.

    >>> owners_of_constants(["fc.weight", "fc.weight.absmax", "fc.bias"])
    {'fc.weight.absmax': 'fc.weight'}
    """
    known = set(names)
    parents = ((name, name[: dot.start()]) for name in names for dot in re.finditer(r"\.", name))
    return {name: parent for name, parent in parents if parent in known}


def join_fqn(*parts: str) -> str:
    """Return the non-empty ``parts`` joined by dots; an empty string if there are none.

    >>> join_fqn("", "block", "fc", "weight")
    'block.fc.weight'
    """
    return ".".join(filter(None, parts))


def flat_param_name(position: int) -> str:
    """Return the name of the flat parameter at a position among those of its unit.

    >>> flat_param_name(0), flat_param_name(1)
    ('_flat_param', '_flat_param_1')
    """
    return f"{FLAT_PARAM}_{position}" if position else FLAT_PARAM


def is_flat_param_name(name: str) -> bool:
    """Return whether ``name``, without a prefix, is that of a flat parameter; see :func:`flat_param_name`."""
    return _FLAT_PARAM_NAME.fullmatch(name) is not None
