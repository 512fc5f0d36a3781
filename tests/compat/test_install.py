"""install(), uninstall() and installed(): which names resolve to what, before, during and after; and other clients."""

from __future__ import annotations

import ast
import importlib
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import process
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer_library
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint import state_dict as dcp_functions
from torch.distributed.fsdp import FullyShardedDataParallel as PeerFSDP
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

import fsdp_flat
from fsdp_flat.compat import replace_torch_functions, restore_torch_functions
from fsdp_flat.compat.torch_names import FSDP2_NAMES
from fsdp_flat.errors import UnsupportedError, UsageError
from tests.compat.clients import FSDP2, OURS, imported
from tests.support import on_ranks
from tests.support.kit import train_on, wrapped
from tests.support.models import BufferedBlock, Stack
from tests.support.wrapper_models import batch, seeded

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", r"`torch.jit.\w+` is deprecated", DeprecationWarning)
    from torch.distributed.optim import named_optimizer

PEER_CLASS = {"torch's": peer_library.FullyShardedDataParallel}  # in a container, which install() does not look into
PEER_MEMBER = {"torch's": peer_library.ShardingStrategy.SHARD_GRAD_OP}


@pytest.fixture(autouse=True)
def nothing_stays_installed() -> Iterator[None]:
    yield
    fsdp_flat.uninstall()


def bound(client: ModuleType, name: str) -> Any:
    return vars(client)[name]


def assert_ours(client: ModuleType) -> None:
    __tracebackhide__ = True
    for home, names in OURS.items():
        for name in names:
            assert bound(client, name) is getattr(importlib.import_module(home), name), name
    assert bound(client, "FSDP") is fsdp_flat.FullyShardedDataParallel
    assert bound(client, "fsdp").FullyShardedDataParallel is fsdp_flat.FullyShardedDataParallel


def assert_torchs(client: ModuleType) -> None:
    __tracebackhide__ = True
    for names in OURS.values():
        for name in names:
            assert bound(client, name).__module__.startswith("torch.distributed.fsdp"), name
    assert bound(client, "FSDP") is PEER_CLASS["torch's"]
    assert bound(client, "fsdp").FullyShardedDataParallel is PEER_CLASS["torch's"]


def test_a_client_imported_before_gets_our_names_and_torchs_again_afterwards() -> None:
    with imported("client_before") as client:
        assert_torchs(client)
        with fsdp_flat.installed():
            assert_ours(client)
            assert bound(client, "DEFAULT") is fsdp_flat.ShardingStrategy.SHARD_GRAD_OP
        assert_torchs(client)
        assert bound(client, "DEFAULT") is PEER_MEMBER["torch's"]


def test_a_client_imported_afterwards_gets_our_names() -> None:
    with fsdp_flat.installed(), imported("client_after") as client:
        assert_ours(client)


def fsdp2_names() -> list[str]:
    """The names of FSDP2 that the installed torch has."""
    return [name for name in FSDP2_NAMES if hasattr(peer_library, name)]


def test_torchs_own_bindings_of_the_class_are_replaced() -> None:
    with fsdp_flat.installed():
        assert dcp_functions.FSDP is fsdp_flat.FullyShardedDataParallel
        assert named_optimizer.FSDP is fsdp_flat.FullyShardedDataParallel
        assert dcp_functions.StateDictType is fsdp_flat.StateDictType
        hybrid = [fsdp_flat.ShardingStrategy.HYBRID_SHARD, fsdp_flat.ShardingStrategy._HYBRID_SHARD_ZERO2]
        # Older torch has no such name.
        assert getattr(dcp_functions, "HYBRID_SHARDING_STRATEGIES", hybrid) == hybrid
    assert dcp_functions.FSDP is named_optimizer.FSDP is PEER_CLASS["torch's"]


def test_every_public_name_of_fsdp1_is_replaced_and_fsdp2_is_left_alone() -> None:
    fsdp2 = {name: getattr(peer_library, name) for name in fsdp2_names()}
    with fsdp_flat.installed():
        for name in peer_library.__all__:
            expected = None if name in FSDP2_NAMES else getattr(fsdp_flat, name, None)
            assert (getattr(peer_library, name) is expected) is (expected is not None), name
        assert {name: getattr(peer_library, name) for name in fsdp2} == fsdp2


FSDP2_HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed.fsdp._fully_shard",
)


def test_fsdp2s_names_are_replaced_where_asked_and_torchs_again_afterwards() -> None:
    homes = [importlib.import_module(name) for name in FSDP2_HOMES]
    before = [{name: value for name, value in vars(home).items() if name in FSDP2_NAMES} for home in homes]
    assert [len(names) for names in before] == [len(fsdp2_names()), 6, 4, len(fsdp2_names())]
    with imported("client_of_fsdp2") as client:
        with fsdp_flat.installed(fully_shard=True):
            for home, names in zip(homes, before, strict=True):
                assert {name: vars(home)[name] for name in names} == {name: getattr(fsdp_flat, name) for name in names}
            assert_ours(client)
            assert {name: bound(client, name) for name in FSDP2} == {name: getattr(fsdp_flat, name) for name in FSDP2}
            late = {}
            exec("from torch.distributed._composable.fsdp import FSDPModule, fully_shard", late)
            assert late["fully_shard"] is fsdp_flat.fully_shard
        assert [{name: vars(home)[name] for name in names} for home, names in zip(homes, before)] == before
        assert {name: bound(client, name) for name in FSDP2} == {name: before[0][name] for name in FSDP2}


def test_fsdp2s_names_stay_replaced_in_later_calls_and_in_processes_started_with_multiprocessing() -> None:
    fsdp_flat.install()
    assert not fsdp_flat.install().fully_shard
    done = fsdp_flat.install(fully_shard=True)
    assert done.fully_shard
    assert "FSDPModule" in str(done)
    assert fsdp_flat.install() == done
    fsdp_flat.uninstall()
    assert vars(peer_library)["FSDPModule"] is not fsdp_flat.FSDPModule
    again = pickle.loads(pickle.dumps(done))
    assert again.fully_shard
    assert set(again.replaced) == set(done.replaced)
    assert vars(peer_library)["FSDPModule"] is fsdp_flat.FSDPModule


def test_installing_twice_changes_nothing_and_names_what_was_imported_since() -> None:
    first = fsdp_flat.install()
    assert fsdp_flat.install() == first
    with imported("client_late") as timeout_error:
        vars(timeout_error)["kept"] = PEER_CLASS["torch's"]
        again = fsdp_flat.install()
        assert again.replaced[: len(first.replaced)] == first.replaced
        assert again.replaced[len(first.replaced) :] == (("client_late", "kept"),)
        fsdp_flat.uninstall()
        assert bound(timeout_error, "kept") is PEER_CLASS["torch's"]
    fsdp_flat.uninstall()
    assert peer_library.FullyShardedDataParallel is PEER_CLASS["torch's"]


def test_the_context_manager_leaves_an_earlier_installation_in_place() -> None:
    fsdp_flat.install()
    with fsdp_flat.installed():
        pass
    assert peer_library.FullyShardedDataParallel is fsdp_flat.FullyShardedDataParallel


def test_the_context_manager_uninstalls_after_an_error() -> None:
    with pytest.raises(KeyError), fsdp_flat.installed():
        raise KeyError
    assert peer_library.FullyShardedDataParallel is PEER_CLASS["torch's"]


def test_a_name_that_was_changed_meanwhile_is_left_as_it_is() -> None:
    with imported("client_changed") as client:
        with fsdp_flat.installed():
            vars(client)["FSDP"] = "mine"
        assert bound(client, "FSDP") == "mine"


def test_a_module_of_torch_imported_meanwhile_is_torchs_again_afterwards() -> None:
    name = "torch.distributed.algorithms._optimizer_overlap.optimizer_overlap"
    kept = {key: sys.modules.pop(key) for key in list(sys.modules) if key == name}
    try:
        with fsdp_flat.installed():
            module = importlib.import_module(name)
            assert vars(module)["FullyShardedDataParallel"] is fsdp_flat.FullyShardedDataParallel
        assert vars(module)["FullyShardedDataParallel"] is PEER_CLASS["torch's"]
    finally:
        sys.modules.update(kept)


def test_what_was_replaced_can_be_printed() -> None:
    with imported("client_printed"):
        text = str(fsdp_flat.install())
    lines = text.splitlines()
    assert "names in" in lines[0]
    assert "fsdp_flat" in lines[0]
    (own,) = [line for line in lines if line.startswith("  client_printed: ")]
    assert {"FSDP", "MixedPrecision", "DEFAULT", "_lazy_init"} <= set(own.partition(": ")[2].split(", "))
    assert any(line.startswith("  torch.distributed.fsdp.wrap: ") for line in lines)


def test_a_subclass_of_torchs_class_is_named_and_cannot_be_made() -> None:
    class Derived(PEER_CLASS["torch's"]):  # type: ignore[misc, name-defined]
        pass

    with fsdp_flat.installed() as done:
        assert [name for name in done.left if name.endswith("Derived")]
        assert "Derived" in str(done)
        with pytest.raises(UsageError, match=r"Derived is torch's FSDP1.*before importing"):
            Derived(nn.Linear(2, 2))
    del Derived


def test_torchs_class_in_a_default_argument_cannot_be_made_unnoticed() -> None:
    with imported("client_default") as client, fsdp_flat.installed():
        make = bound(client, "make")
        with pytest.raises(UsageError, match=r"default argument"):
            make(nn.Linear(2, 2))


def test_importing_the_library_does_not_import_torchs_fsdp() -> None:
    folder = Path(fsdp_flat.compat.__file__).parent
    imported_at_once = {
        name
        for file in folder.glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        for name in [f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name]
    }
    assert {name for name in imported_at_once if name.startswith("fsdp_flat.compat")}
    assert not {name for name in imported_at_once if name.startswith("torch.distributed.fsdp")}


def test_a_process_started_with_multiprocessing_is_told_to_install() -> None:
    with fsdp_flat.installed() as done:
        handed_on = process.current_process()._config["fsdp_flat"]  # type: ignore[attr-defined]
        function, arguments = handed_on.__reduce__()
        assert (function, arguments) == (fsdp_flat.install, ())
        fsdp_flat.uninstall()
        assert pickle.loads(pickle.dumps(done)).replaced[:10] == done.replaced[:10]
        assert peer_library.FullyShardedDataParallel is fsdp_flat.FullyShardedDataParallel
        fsdp_flat.uninstall()
    assert "fsdp_flat" not in process.current_process()._config  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------ values that torch's enums made


@pytest.mark.parametrize("name", ["BackwardPrefetch", "OptimStateKeyType", "ShardingStrategy", "StateDictType"])
def test_a_member_of_torchs_enum_equals_ours_of_that_name_and_no_other(name: str) -> None:
    ours, theirs = getattr(fsdp_flat, name), getattr(peer_library, name)
    for mine in ours:
        for other in theirs:
            assert (mine == other) is (other == mine) is (mine.name == other.name)
            assert (mine in {other: None}) is (mine.name == other.name)
            assert (mine != other) is (mine.name != other.name)
    assert fsdp_flat.ShardingStrategy.FULL_SHARD != fsdp_flat.StateDictType.FULL_STATE_DICT
    assert fsdp_flat.ShardingStrategy.FULL_SHARD != 1


@on_ranks(2)
def test_torchs_enums_records_and_policies_are_taken_wherever_ours_are(rank: int) -> None:
    from torch.distributed.fsdp.wrap import CustomPolicy

    model = fsdp_flat.FullyShardedDataParallel(
        seeded(),
        sharding_strategy=peer_library.ShardingStrategy.SHARD_GRAD_OP,  # type: ignore[arg-type]
        cpu_offload=peer_library.CPUOffload(offload_params=False),  # type: ignore[arg-type]
        auto_wrap_policy=CustomPolicy(lambda module: isinstance(module, BufferedBlock)),  # type: ignore[arg-type]
        backward_prefetch=peer_library.BackwardPrefetch.BACKWARD_POST,  # type: ignore[arg-type]
        mixed_precision=peer_library.MixedPrecision(param_dtype=torch.float32),  # type: ignore[arg-type]
    )
    assert model.sharding_strategy == peer_library.ShardingStrategy.SHARD_GRAD_OP
    assert len(fsdp_flat.FullyShardedDataParallel.fsdp_modules(model)) == 3
    optimizer = torch.optim.Adam(model.parameters())
    train_on(model, optimizer, [batch(rank)])
    with model.state_dict_type(
        model,
        peer_library.StateDictType.FULL_STATE_DICT,  # type: ignore[arg-type]
        peer_library.FullStateDictConfig(rank0_only=True),  # type: ignore[arg-type]
        peer_library.FullOptimStateDictConfig(rank0_only=True),  # type: ignore[arg-type]
    ):
        settings = model.get_state_dict_type(model)
        assert isinstance(settings.state_dict_config, fsdp_flat.FullStateDictConfig)
        assert isinstance(settings.optim_state_dict_config, fsdp_flat.FullOptimStateDictConfig)
        saved = model.optim_state_dict(model, optimizer)
        assert bool(saved) is (rank == 0)
        # Rank 0 alone has the dict, which only a config that is understood allows.
        model.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)
    ids = model.rekey_optim_state_dict(
        {"state": {}, "param_groups": [{"params": []}]},
        peer_library.OptimStateKeyType.PARAM_ID,  # type: ignore[arg-type]
        model,
    )
    assert ids["state"] == {}


@on_ranks(2)
def test_torchs_policies_of_fsdp2_are_taken_wherever_ours_are(rank: int) -> None:
    from fsdp_flat.core import unit_of

    policy = peer_library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for offload_policy, offloads in ((peer_library.CPUOffloadPolicy(), True), (peer_library.OffloadPolicy(), False)):
        model = fsdp_flat.fully_shard(nn.Linear(4, 4), mp_policy=policy, offload_policy=offload_policy)
        options = unit_of(model).options
        assert options.offload_params is offloads
        assert options.precision.param_dtype is torch.bfloat16
        assert model(torch.ones(2, 4)).dtype is torch.float32


@on_ranks(2)
def test_a_policy_with_a_dtype_for_each_parameter_is_refused(rank: int) -> None:
    # Like that of torch 2.15.
    @dataclass(frozen=True)
    class MixedPrecisionPolicy(fsdp_flat.MixedPrecisionPolicy):
        param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None

    fsdp_flat.fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy())
    with pytest.raises(UnsupportedError, match="another mp_policy on the modules"):
        fsdp_flat.fully_shard(
            nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(param_dtype_override_fn=lambda param: None)
        )


def functions() -> dict[str, Any]:
    """Return what is replaced, by name."""
    owners = [
        *((clip_grad, "clip_grad_norm_"), (torch.nn.utils, "clip_grad_norm_"), (GradScaler, "_unscale_grads_")),
        *((torch.autograd, "grad"), (torch.autograd, "backward"), (torch.optim.Optimizer, "zero_grad")),
        *((DTensor, "full_tensor"), (dist, "barrier"), (DistributedDataParallel, "__init__")),
        *((PeerFSDP, "__init__"), (FSDPParamGroup, "__init__")),
        *((PeerFSDP, "state_dict_type"), (PeerFSDP, "summon_full_params"), (PeerFSDP, "optim_state_dict")),
        *([(torch.optim.Muon, "__init__")] if hasattr(torch.optim, "Muon") else []),  # since torch 2.9
    ]
    return {f"{owner.__name__}.{name}": getattr(owner, name) for owner, name in owners}


@on_ranks(2)
def test_each_function_is_torchs_own_while_they_are_restored() -> None:
    wrapped(Stack())
    replaced = functions()
    restore_torch_functions()
    try:
        own = functions()
        assert [name for name in own if not own[name].__module__.startswith("torch.")] == []
        assert [name for name in own if own[name] is replaced[name]] == []
        wrapped(Stack())  # a new model does not replace them again
        assert functions() == own
    finally:
        replace_torch_functions()
    assert [name for name, each in functions().items() if each is own[name]] == []


SCRIPT = """\
import sys, warnings
import fsdp_flat
fsdp_flat.install()
assert "accelerate" not in sys.modules
import accelerate.state
from accelerate.state import PartialState
print("made", PartialState().made)
fsdp_flat.uninstall()
"""


def output_with(state: str, folder: Path) -> str:
    """Run a script that imports a package named accelerate, whose module ``state`` is given."""
    package = folder / "accelerate"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "state.py").write_text(state)
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, folder / "script.py"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_client_without_the_expected_names_is_left_alone_with_a_warning(tmp_path: Path) -> None:
    assert not torch.accelerator.is_available()
    output = output_with("class PartialState:\n    made = 3\n", tmp_path)
    assert "made 3" in output
    assert "fsdp_flat cannot lift the checks by which accelerate" in output
    assert "DistributedType" in output
