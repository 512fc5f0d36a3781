"""Every public name of FSDP1 with its signature, defaults and values, and the semi-private names that callers use.

``fsdp1_surface.json`` was read off torch 2.13's FSDP1; it is data, so this test needs no torch of that version.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import fsdp_flat
from fsdp_flat import CPUOffload, MixedPrecision, clean_named_modules, clean_named_parameters, clean_tensor_name
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.compat.torch_names import FSDP2_NAMES
from fsdp_flat.errors import OptionError, OptionTypeError
from fsdp_flat.fully_sharded_data_parallel import (
    FlatParamHandle,
    HandleTrainingState,
    ProcessGroupType,
    TrainingState,
)
from fsdp_flat.runtime import Arguments
from tests.support import assert_close, on_ranks
from tests.support.kit import square_loss
from tests.support.models import BufferedBlock, Model, Tied
from tests.support.wrapper_models import batch, message, seeded, shard, shard_by_peer

SURFACE = json.loads((Path(__file__).parent / "fsdp1_surface.json").read_text())["modules"]
PEER = "torch.distributed.fsdp"

# Names of FSDP1's modules that have no counterpart, each with the reason.
FSDP2 = "FSDP2's interface, which lives in the same namespace; test_surface_of_fully_shard.py compares it"
NOISE = "not FSDP1's own: what its source file happens to import"
NO_COUNTERPART = {
    # The list is that of torch's newest release.
    **dict.fromkeys(set(FSDP2_NAMES) - {"GradientReductionHandle"}, FSDP2),
    **dict.fromkeys(
        [
            *("ABC", "ActivationWrapper", "Any", "Callable", "DeviceMesh", "Enum", "Generator", "Iterable", "Iterator"),
            *("GradScaler", "OptState", "ProcessGroup", "ProcessGroupType", "Sequence", "abstractmethod", "auto"),
            *("cast", "contextmanager", "copy_method_params", "copy_method_sig", "dataclass", "defaultdict", "logger"),
            "overload",
        ],
        NOISE,
    ),
}
# What we added to FSDP1's names: always after its own arguments or fields, and with a default.
ADDED_FIELDS = {
    "MixedPrecision": ["master_dtype", "full_precision_modules", "uncast_inputs"],
    "CPUOffload": ["offload_optimizer"],
    "ShardedStateDictConfig": ["boxes"],
    "ShardedOptimStateDictConfig": ["boxes"],
}
# Members that torch's enums do not have, by enum: none yet.
ADDED_MEMBERS: dict[str, set[str]] = {}
ADDED_PARAMETERS = {"FullyShardedDataParallel.no_sync": ["mode"]}


def ours(module: str) -> Any:
    """Our module for one of FSDP1's."""
    return importlib.import_module(module.replace(PEER, "fsdp_flat", 1))


def list_steps() -> Iterator[tuple[str, str]]:
    for module, surface in SURFACE.items():
        for name in surface["names"]:
            if name not in NO_COUNTERPART:
                yield module, name


LISTED = pytest.mark.parametrize("module, name", list(list_steps()))


def parameters_of(signature: str) -> list[tuple[str, str, str | None]]:
    """Kind, name and default of each parameter in the text of a signature; annotations are left out."""
    text = re.sub(r"<enum '(\w+)'>|<class '([\w.]+)'>|<built-in function (\w+)>", "object", signature)
    text = re.sub(r"<(\w+)\.(\w+): \d+>", r"\1.\2", text)
    function = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    found = function.args
    plain = [*found.posonlyargs, *found.args]
    defaults = [None] * (len(plain) - len(found.defaults)) + [ast.unparse(default) for default in found.defaults]
    result: list[tuple[str, str, str | None]] = [("plain", arg.arg, default) for arg, default in zip(plain, defaults)]
    if found.vararg:
        result.append(("*", found.vararg.arg, None))
    for arg, value in zip(found.kwonlyargs, found.kw_defaults):
        result.append(("keyword", arg.arg, None if value is None else ast.unparse(value)))
    if found.kwarg:
        result.append(("**", found.kwarg.arg, None))
    return result


def assert_same_parameters(what: str, actual: str, expected: str) -> None:
    __tracebackhide__ = True
    got, wanted = parameters_of(actual), parameters_of(expected)
    assert got[: len(wanted)] == wanted, what
    added = got[len(wanted) :]
    assert [name for _, name, _ in added] == ADDED_PARAMETERS.get(what, []), what
    assert all(default is not None for _, _, default in added), what


@pytest.mark.parametrize("module", list(SURFACE))
def test_every_public_name_is_importable_from_the_same_module(module: str) -> None:
    here = ours(module)
    wanted = {*(SURFACE[module]["__all__"] or ()), *SURFACE[module]["importable_public_names"]} - set(NO_COUNTERPART)
    assert [name for name in sorted(wanted) if not hasattr(here, name)] == []
    exported = set(here.__all__) if SURFACE[module]["__all__"] else set()
    assert [name for name in SURFACE[module]["__all__"] or () if name not in exported | set(NO_COUNTERPART)] == []


@LISTED
def test_a_name_is_the_same_object_wherever_it_is_imported_from(module: str, name: str) -> None:
    homes = [other for other, surface in SURFACE.items() if name in surface["importable_public_names"]]
    assert all(getattr(ours(home), name) is getattr(ours(module), name) for home in homes)


@LISTED
def test_a_public_name_has_the_peers_signature_defaults_and_values(module: str, name: str) -> None:
    mine, theirs = getattr(ours(module), name), SURFACE[module]["names"][name]
    kind = theirs["kind"]
    if kind == "enum":
        assert issubclass(mine, enum.Enum)
        added = ADDED_MEMBERS.get(name, set())
        assert {member.name: member.value for member in mine if member.name not in added} == theirs["members"]
        assert str(next(iter(mine))) == theirs["str_of_first"]
    elif kind == "dataclass":
        fields = [field["name"] for field in theirs["fields"]]
        actual = [field.name for field in dataclasses.fields(mine)]
        assert actual[: len(fields)] == fields
        assert actual[len(fields) :] == ADDED_FIELDS.get(name, [])
        wanted = parameters_of(theirs["init_signature"])
        assert parameters_of(str(inspect.signature(mine)))[: len(wanted)] == wanted
        assert {key: getattr(mine.__dataclass_params__, key) for key in theirs["params"]} == theirs["params"]
    elif kind == "function":
        assert_same_parameters(name, str(inspect.signature(mine)), theirs["signature"])
        assert {*theirs.get("function_attributes", ())} <= {*vars(mine)}
    else:
        assert kind == "class"
        assert_same_parameters(name, str(inspect.signature(mine)), theirs["init_signature"])
        for member, facts in theirs["members"].items():
            if not member.startswith("_") or member in ("__init__", "__getattr__", "__getitem__"):
                assert_same_member(mine, member, facts)


def assert_same_member(mine: Any, name: str, facts: dict[str, Any]) -> None:
    __tracebackhide__ = True
    found = inspect.getattr_static(mine, name)
    kinds = {"staticmethod": staticmethod, "property": property}
    for kind, expected in kinds.items():
        assert isinstance(found, expected) is (facts["kind"] == kind), name
    if facts["kind"] == "property":
        assert (found.fset is not None) is facts["settable"], name
    else:
        signature = str(inspect.signature(getattr(mine, name)))
        assert_same_parameters(f"{mine.__name__}.{name}", signature, facts["signature"])


needs_torch_2_13 = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason=f"the list is of torch 2.13, and this is {torch.__version__}"
)


@needs_torch_2_13
def test_the_wrapper_has_every_member_of_fsdp1s() -> None:
    theirs: Any = importlib.import_module(PEER).FullyShardedDataParallel
    assert [name for name in dir(theirs) if not hasattr(FSDP, name)] == []


def test_the_type_of_process_groups_is_that_of_the_argument() -> None:
    assert ProcessGroupType == importlib.import_module(f"{PEER}._init_utils").ProcessGroupType


@on_ranks(2)
def test_a_caller_may_set_the_state_of_the_step(rank: int) -> None:
    model = shard(seeded())
    for state in ((TrainingState.FORWARD_BACKWARD, HandleTrainingState.FORWARD), (TrainingState.IDLE,) * 2):
        wanted = state[0], HandleTrainingState[state[1].name]
        with model._use_training_state(*wanted):
            assert (model.training_state, model._handle._training_state) == wanted
        assert model.training_state is TrainingState.IDLE
    with (
        pytest.raises(OptionError, match="do not occur together"),
        model._use_training_state(TrainingState.IDLE, HandleTrainingState.FORWARD),
    ):
        pass


def test_the_warnings_of_older_arguments_can_be_called() -> None:
    FSDP._warn_optim_input(None)
    with pytest.warns(FutureWarning, match="optim_input"):
        FSDP._warn_optim_input([nn.Parameter(torch.ones(1))])
    with pytest.warns(FutureWarning, match="old is an older form of new"):
        FSDP._warn_legacy_optim_state_dict("old", "new")


def test_the_constructors_record_of_arguments_which_it_fills_by_position_has_their_order() -> None:
    _, *arguments = inspect.signature(FSDP).parameters.values()
    found = [(field.name, field.default) for field in dataclasses.fields(Arguments)]
    assert found == [(each.name, each.default) for each in arguments]


def test_a_flat_parameter_cannot_be_constructed() -> None:
    with pytest.raises(TypeError, match="a type to test against"):
        fsdp_flat.FlatParameter()


# ----------------------------------------------------------------------------------------- semi-private names

WRAPPER_VALUES = (
    *("_has_params", "_is_root", "_use_orig_params", "_sync_gradients", "_use_full_prec_in_eval", "_device_mesh"),
    *("rank", "world_size", "limit_all_gathers", "forward_prefetch", "compute_device", "_comm_hook"),
)
WRAPPER_MEMBERS = ("sharding_strategy", "backward_prefetch", "training_state", "_state_dict_type")
WRAPPER_RECORDS = ("mixed_precision", "cpu_offload", "_state_dict_config", "_optim_state_dict_config")
HANDLE_VALUES = (
    *("rank", "world_size", "device", "uses_sharded_strategy", "_use_orig_params", "_offload_params"),
    *("_orig_param_dtype", "_fwd_bwd_param_dtype", "_reduce_dtype", "_keep_low_precision_grads"),
)
FLAT_PARAM_VALUES = (
    *("_num_params", "_fqns", "_shapes", "_numels", "_numels_with_padding", "_is_padding_mask", "_shard_param_infos"),
    *("_shard_numel_padded", "_sharded_size", "_unpadded_unsharded_size", "_is_flat_param", "_fsdp_flattened"),
)


def plain_value(value: Any) -> Any:
    """Named tuples and lists as tuples, so that classes of two libraries compare."""
    return tuple(map(plain_value, value)) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("kind", [Model, Tied])
@pytest.mark.parametrize("after_a_forward", [False, True])
@on_ranks(2)
def test_semi_private_names_have_the_peers_values(
    use_orig_params: bool, strategy: str, kind: Any, after_a_forward: bool
) -> None:
    model = shard(seeded(kind), strategy, use_orig_params=use_orig_params)
    peer = shard_by_peer(seeded(kind), strategy, use_orig_params=use_orig_params)
    if after_a_forward:
        x = batch(0) if kind is Model else torch.zeros(2, dtype=torch.int64)
        with torch.no_grad():
            model(x), peer(x)
        assert len(model._all_handles) == len(peer._all_handles)
        assert len(model._all_fsdp_states) == len(peer._all_fsdp_states)
        assert all(a is b._handle for a, b in zip(model._all_handles, FSDP.fsdp_modules(model), strict=True))
    mine, theirs = FSDP.fsdp_modules(model), type(peer).fsdp_modules(peer)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs):
        for name in WRAPPER_VALUES:
            assert getattr(a, name) == getattr(b, name), name
        for name in WRAPPER_MEMBERS:
            assert getattr(a, name).name == getattr(b, name).name, name
        for name in WRAPPER_RECORDS:
            assert type(getattr(a, name)).__name__ == type(getattr(b, name)).__name__
            wanted = dataclasses.asdict(getattr(b, name))
            assert {key: getattr(getattr(a, name), key) for key in wanted} == wanted
        assert len(a.params) == len(b.params) == 1
        assert a.params[0] is a._flat_param is a._handle.flat_param
        assert a.process_group is b.process_group
        assert list(a._fully_sharded_module_to_handle.values()) == [a._handle]
        assert_same_handle(a, b)


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
@on_ranks(2)
def test_the_unsharded_flat_tensor_has_memory_while_the_unit_is_unsharded(orig: bool) -> None:
    mine, theirs = shard(seeded(), use_orig_params=orig), shard_by_peer(seeded(), use_orig_params=orig)
    for model in (mine, theirs):
        get = model._handle._get_padded_unsharded_flat_param
        square_loss(model, batch(dist.get_rank())).backward()
        assert get().untyped_storage().size() == 0
        _ = model(batch(dist.get_rank()))
        assert get().untyped_storage().size() == get().nbytes > 0
    first, second = [model._handle._get_padded_unsharded_flat_param() for model in (mine, theirs)]
    is_padding = second == 42  # torch fills paddings between parameters with it
    assert_close(first, second.masked_fill(is_padding, 0), rtol=0, atol=0)


@on_ranks(2)
def test_an_attribute_of_fsdp1_without_counterpart_is_named_as_such() -> None:
    model = shard(seeded())
    for owner, name in ((model, "_exec_order_data"), (model._handle, "_use_sharded_views")):
        text = message(AttributeError, AttributeError, lambda owner=owner, name=name: getattr(owner, name))
        assert f"has no attribute '{name}'" in text
        assert "FSDP1" in text
        assert "summon_full_params" in text
        assert not hasattr(owner, name)
    assert "FSDP1" not in message(AttributeError, AttributeError, lambda: model._handle.nothing)
    model.module._exec_order_data = 1  # the wrapped module's own attribute
    assert model._exec_order_data == 1


def assert_same_handle(a: Any, b: Any) -> None:
    __tracebackhide__ = True
    assert isinstance(a._handle, FlatParamHandle)
    assert a._handle is a._handle
    for name in HANDLE_VALUES:
        assert getattr(a._handle, name) == getattr(b._handle, name), name
    assert a._handle.process_group is b._handle.process_group
    assert a._handle._fully_sharded_module is a._fsdp_wrapped_module
    assert a._handle._training_state.name == b._handle._training_state.name
    assert isinstance(a._flat_param, fsdp_flat.FlatParameter)
    for name in FLAT_PARAM_VALUES:
        assert plain_value(getattr(a._flat_param, name)) == plain_value(getattr(b._flat_param, name)), name
    if b._is_root is not None:
        assert a._flat_param._local_shard.shape == b._flat_param._local_shard.shape
    if b._is_root is False and b.sharding_strategy.name == "FULL_SHARD":
        # The peer leaves the root, and without freeing after forward all units, gathered also where nothing follows.
        assert a._handle.needs_unshard()
        assert b._handle.needs_unshard()
    assert a._flat_param._local_shard.data_ptr() == a._flat_param.data_ptr()
    mine, theirs = a._flat_param._params, b._flat_param._params
    assert (mine is None) is (theirs is None)
    assert len(mine or ()) == len(theirs or ())
    if b._handle.uses_sharded_strategy and hasattr(b._flat_param, "_full_param_padded"):
        assert a._flat_param._full_param_padded.shape == b._flat_param._full_param_padded.shape
        assert a._flat_param._padded_unsharded_size == b._flat_param._padded_unsharded_size


@on_ranks(4)
def test_hybrid_strategies_have_an_inter_node_group_and_others_have_not() -> None:
    model = shard(seeded(), "HYBRID_SHARD")
    peer = shard_by_peer(seeded(), "HYBRID_SHARD", process_group=(model.process_group, model._inter_node_pg))
    assert (model.rank, model.world_size) == (peer.rank, peer.world_size)
    assert model._inter_node_pg is peer._inter_node_pg
    assert not hasattr(shard(seeded()), "_inter_node_pg")


@on_ranks(2)
def test_names_of_an_initialised_root_are_not_there_before_and_elsewhere() -> None:
    model = shard(seeded())
    inner = FSDP.fsdp_modules(model)[1]
    assert not hasattr(model, "_all_handles")
    assert (model._is_root, inner._is_root) == (None, None)
    assert model.check_is_root()
    assert (model._is_root, inner._is_root) == (True, False)
    assert not hasattr(inner, "_all_handles")
    model._is_root = False
    assert (model._is_root, inner._is_root) == (None, None)
    x = batch(dist.get_rank())
    assert_close(model(x), seeded()(x), rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_states_are_told_in_the_peers_words() -> None:
    seen: list[Any] = []

    class Looking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((model.training_state, model._handle._training_state, model._handle.needs_unshard()))
            return super().forward(x)

    model = FSDP(Looking(3, 2))
    model(batch(0)).sum().backward()
    assert seen == [(TrainingState.FORWARD_BACKWARD, HandleTrainingState.FORWARD, False)]
    with FSDP.summon_full_params(model):
        assert model.training_state is TrainingState.SUMMON_FULL_PARAMS
    assert model.training_state is TrainingState.IDLE
    with model.no_sync():
        assert not model._sync_gradients


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@on_ranks(2)
def test_accelerates_upcast_before_the_first_forward_trains_in_float32(use_orig_params: bool) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(seeded().bfloat16(), mixed_precision=precision, use_orig_params=use_orig_params)
    for module in FSDP.fsdp_modules(model):
        if module._has_params and module._flat_param.dtype != torch.float32:
            module._flat_param.data = module._flat_param.data.to(torch.float32)
            module._handle._orig_param_dtype = torch.float32
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = square_loss(model, batch(dist.get_rank()))
    assert loss.dtype == torch.bfloat16
    loss.backward()
    assert {param.grad.dtype for param in model.parameters() if param.numel() > 0} == {torch.float32}
    optimizer.step()
    text = message(OptionTypeError, TypeError, lambda: setattr(model._handle, "_orig_param_dtype", "float32"))
    assert "torch.dtype" in text


@on_ranks(2)
def test_a_shard_is_moved_and_freed_by_hand_as_verl_does() -> None:
    model = shard(seeded(), "SHARD_GRAD_OP")
    x = batch(dist.get_rank())
    expected = model(x).detach()
    model._handle.reshard(True)
    assert model._handle.needs_unshard()
    for handle in model._all_handles:
        handle.flat_param_to(torch.device("cpu"), non_blocking=True)
        handle.flat_param._local_shard = handle.flat_param.data
        assert handle.is_sharded(handle.flat_param)
    assert_close(model(x).detach(), expected, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_constructor_arguments_are_shown_as_given() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = shard(seeded(), mixed_precision=precision, cpu_offload=CPUOffload(), limit_all_gathers=False)
    for wrapper in FSDP.fsdp_modules(model):
        assert wrapper.mixed_precision == precision
        assert wrapper.cpu_offload == CPUOffload()
        assert wrapper.limit_all_gathers is False
        for name in ("mixed_precision", "_has_params", "_flat_param", "rank", "module", "training_state"):
            with pytest.raises(AttributeError):
                setattr(wrapper, name, None)


# --------------------------------------------------------------------------------------------------- clean names


def test_clean_tensor_name_removes_every_wrapper() -> None:
    name = "_orig_mod.blocks.0._fsdp_wrapped_module._checkpoint_wrapped_module.up.weight"
    assert clean_tensor_name(name) == "blocks.0.up.weight"
    assert clean_tensor_name("up._orig_modern.weight") == "up._orig_modern.weight"


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@on_ranks(2)
def test_clean_named_modules_are_the_plain_models(use_orig_params: bool) -> None:
    plain = [(name, type(module)) for name, module in seeded().named_modules()]
    model = shard(seeded(), use_orig_params=use_orig_params)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    expected = {
        id(module) for module in model.modules() if isinstance(module, (Model, BufferedBlock, nn.Linear, nn.ModuleList))
    }
    found = list(clean_named_modules(model))
    assert [(name, type(module)) for name, module in found] == plain
    assert {id(module) for _, module in found} == expected
    # As seen from a wrapped plain module, too: nested wrappers lie in the middle of its names.
    assert [(name, type(module)) for name, module in clean_named_modules(model.module)] == plain
    # The names are those of state dicts.
    holders = {name.rpartition(".")[0] for name in model.state_dict()}
    assert holders <= {name for name, _ in found}


@on_ranks(2)
def test_an_optimizer_of_clean_named_parameters_has_clean_names_in_its_groups() -> None:
    plain = [name for name, _ in seeded().named_parameters()]
    model = shard(seeded(), use_orig_params=True)
    assert [name for name, _ in clean_named_parameters(model)] == plain
    optimizer = torch.optim.AdamW(clean_named_parameters(model))
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == plain
    flat = shard(seeded())
    assert [name for name, _ in clean_named_parameters(flat)] == [
        "_flat_param",
        "blocks.0._flat_param",
        "blocks.1._flat_param",
    ]
    assert next(clean_named_parameters(nn.ModuleDict({"a": model})))[0] == "a.first.weight"
    tied = shard(seeded(Tied), use_orig_params=True)
    assert "head.weight" not in dict(clean_named_parameters(tied))
    assert "head.weight" in dict(clean_named_parameters(tied, remove_duplicate=False))


@on_ranks(2)
def test_an_optimizer_built_before_wrapping_is_named_without_wrapper_words() -> None:
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = shard(model)
    square_loss(wrapped, batch(0)).backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert "_fsdp_wrapped_module" not in str(caught.value)
    assert "'first.weight'" in str(caught.value)
