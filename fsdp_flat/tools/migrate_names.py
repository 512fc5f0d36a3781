"""Maps names of torch's FSDP1 to names of fsdp_flat, as strings; torch's FSDP is not imported."""

from __future__ import annotations

from fsdp_flat.compat.torch_names import FSDP2_NAMES, MIRRORED_MODULES, OURS, PEER, SUBSTITUTES, home_of


def is_inside(name: str, package: str = PEER) -> bool:
    """Return whether a dotted name is ``package`` or below it."""
    return name == package or name.startswith(package + ".")


def is_fsdp2(name: str) -> bool:
    """Return whether a dotted name inside ``torch.distributed.fsdp`` belongs to FSDP2."""
    return symbol_of(name).rpartition(".")[2] in FSDP2_NAMES or is_inside(name, f"{PEER}._fully_shard")


def is_module(name: str) -> bool:
    """Return whether a dotted name inside ``torch.distributed.fsdp`` is a module rather than a name in a module."""
    tail = name.removeprefix(PEER).removeprefix(".")
    return "." not in tail and (tail in MIRRORED_MODULES or tail.startswith("_"))


def symbol_of(name: str) -> str:
    """Return the module, or the name in a module, that a dotted name inside ``torch.distributed.fsdp`` begins with.

    ``torch.distributed.fsdp.ShardingStrategy.NO_SHARD`` begins with ``torch.distributed.fsdp.ShardingStrategy``.
    """
    symbol = PEER
    for part in name.removeprefix(PEER).split(".")[1:]:
        if not is_module(symbol):
            break
        symbol = f"{symbol}.{part}"
    return symbol


def counterpart(name: str) -> str | None:
    """Return the dotted name in fsdp_flat for a module or name inside ``torch.distributed.fsdp``, or None.

    Args:
        name: dotted name, as returned by :func:`symbol_of`.
    """
    tail = name.removeprefix(PEER).removeprefix(".")
    if tail in MIRRORED_MODULES:
        return OURS + name.removeprefix(PEER)
    module, _, last = tail.rpartition(".")
    home = home_of(module, last)
    return None if home in (None, SUBSTITUTES) else f"{home}.{last}"


def is_installed_only(name: str) -> bool:
    """Return whether a name inside ``torch.distributed.fsdp`` is a function that knows our wrappers after install()."""
    module, _, last = name.removeprefix(PEER).removeprefix(".").rpartition(".")
    return last.startswith("_") and home_of(module, last) == SUBSTITUTES
