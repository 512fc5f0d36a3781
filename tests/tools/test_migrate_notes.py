"""What a migrated file is told: differences in behaviour, and what to look at, with lines."""

from __future__ import annotations

import pytest

pytest.importorskip("libcst", reason="the migration tool needs it")

from fsdp_flat.tools.migrate_source import migrate_source

IMPORTS = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy\n"
WRAP = "from torch.distributed.fsdp.wrap import ModuleWrapPolicy, enable_wrap, wrap\n"
QUIET = "sync_module_states=True, device_id=0"


def notes(source: str, kind: str = "differs") -> list[tuple[int, str]]:
    return [(found.line, found.text) for found in migrate_source(source.encode()).findings if found.kind == kind]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (f"FSDP(m, {QUIET})", []),
        ("FSDP(m, None, None, None, None, None, None, None, None, 0, True)", ["stays tied"]),
        ("FSDP(m, device_id=0)", ["start from different weights"]),
        ("FSDP(m, device_id=0, sync_module_states=False)", ["start from different weights"]),
        ("FSDP(m, sync_module_states=True)", ["runs on the CPU"]),
        ("FSDP(m, **options)", []),
        (f"FSDP(m, {QUIET}, use_orig_params=True)", ["keeps .grad None"]),
        (f"FSDP(m, {QUIET}, auto_wrap_policy=f)", ["stays tied"]),
        (f"FSDP(m, {QUIET}, auto_wrap_policy=ModuleWrapPolicy({{A}}))", ["match no module", "stays tied"]),
        (f"FSDP(m, {QUIET}, sharding_strategy=ShardingStrategy.NO_SHARD)", ["NO_SHARD warns"]),
        (f"FSDP(m, {QUIET}, sharding_strategy=ShardingStrategy.HYBRID_SHARD)", ["(N, 1) meshes"]),
        ("with enable_wrap(wrapper_cls=FSDP, device_id=0): wrap(m)", ["TiedParameterError", "different weights"]),
        ("functools.partial(FSDP, device_id=0)", ["start from different weights"]),
        ("with FSDP.state_dict_type(m, k): pass", ["previous type comes back"]),
        ("isinstance(m, FSDP)", []),
    ],
)
def test_differences_are_told_at_the_call(call: str, told: list[str]) -> None:
    found = sorted(notes(f"import functools\n{IMPORTS}{WRAP}{call}\n"), key=lambda note: note[1])
    assert [line for line, _ in found] == [4] * len(told)
    assert all(any(text in note for _, note in found) for text in told), found


def test_a_difference_is_told_once_with_all_its_lines() -> None:
    source = f"{IMPORTS}a = FSDP(m, device_id=0)\nb = FSDP(\n  n, device_id=0)\nc = FSDP(o, device_id=0)\n"
    assert [(line, text.partition("(also")[2]) for line, text in notes(source)] == [(2, " lines 3, 5)")]


@pytest.mark.parametrize("module", ["fsdp_flat", "fairscale.nn", ".wrapper"])
def test_other_wrappers_of_the_name_are_told_nothing(module: str) -> None:
    source = f"from {module} import FullyShardedDataParallel as FSDP\nFSDP(m, use_orig_params=True)\n"
    assert migrate_source(source.encode()).findings == []


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("model._exec_order_data.x = 1  # FSDP\n", "attribute _exec_order_data"),
        ('logging.getLogger("torch.distributed.fsdp._optim_utils")\n', "the string"),
        ("from lightning.pytorch.strategies import FSDPStrategy\n", "FSDPStrategy of lightning.pytorch.strategies"),
        (
            "from accelerate import FullyShardedDataParallelPlugin  # fsdp\n",
            "FullyShardedDataParallelPlugin of accelerate",
        ),
        ("from torch.distributed.checkpoint.state_dict import get_state_dict  # FSDP\n", "knows torch's class only"),
        ("from torch.distributed.checkpoint import state_dict  # FSDP\n", "knows torch's class only"),
    ],
)
def test_what_reaches_fsdp1_in_another_way_is_to_be_checked(source: str, told: str) -> None:
    (found,) = notes(source, "check")
    assert found[0] == 1
    assert told in found[1]


@pytest.mark.parametrize(
    "install", ["import fsdp_flat\nfsdp_flat.install()\n", "from fsdp_flat import install as i\ni()\n"]
)
def test_code_that_only_needs_install_is_settled_by_calling_it(install: str) -> None:
    client = "from lightning.fabric.strategies import FSDPStrategy\n"
    states = "from torch.distributed.checkpoint.state_dict import get_state_dict\n"
    assert len(notes(client + states, "check")) == 2
    assert notes(install + client + states, "check") == []


def test_fsdp2_with_state_dict_functions_is_nothing_to_check() -> None:
    states = "from torch.distributed.checkpoint.state_dict import get_state_dict\n"
    assert notes(f"from torch.distributed.fsdp import fully_shard\n{states}", "check") == []
