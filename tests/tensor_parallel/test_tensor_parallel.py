"""Tensor parallelism over one group of a 2x2 mesh and FSDP over the other."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp_flat import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    unwrap,
)
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import OptionError, UnsupportedError, UsageError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import assert_idle, average_gradients
from tests.support.kit import square_loss, train_on, wrapped

WIDTH, HIDDEN, POSITIONS = 8, 10, 4
LAYOUTS = ["tensor", "sequence"]


class Layer(nn.Module):
    """A norm and two layers; in the hidden dimension ranks of one tensor-parallel group have 5 of 10."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A layer, two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


LAYERS = ModuleWrapPolicy({Layer})


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return model


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def plan(layout: str) -> dict[str, ParallelStyle]:
    """``tensor``: layers are split, norms and the rest are plain. ``sequence``: every parameter is a DTensor, and
    the gradients of norms come as partial sums."""
    styles: dict[str, ParallelStyle] = {}
    sequence = layout == "sequence"
    for index in range(2):
        if sequence:
            styles[f"layers.{index}.norm"] = SequenceParallel()
        styles[f"layers.{index}.up"] = ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate())
        styles[f"layers.{index}.down"] = RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
    if sequence:
        styles["first"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        styles["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return styles


def on_grid(model: nn.Module, mesh: DeviceMesh, layout: str = "tensor", **kwargs: Any) -> FSDP:
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    parallelize_module(model, mesh["tp"], plan(layout))
    for name, param in model.named_parameters():
        # torch 2.8 replaces parameters by trainable ones.
        param.requires_grad_(name not in frozen)
    kwargs.setdefault("auto_wrap_policy", LAYERS)
    return wrapped(model, device_mesh=mesh["dp"], **kwargs)


def batches(step: int) -> list[torch.Tensor]:
    """One per data-parallel rank."""
    return [
        torch.randn(3, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(2)
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, eps=1e-4)


def norm_of(plain: nn.Module, norm_type: float) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(plain.parameters(), math.inf, norm_type=norm_type)


def train_plain(plain: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Take a step on the batches of all ranks; those that share tensors have the same one."""
    train_on(plain, optimizer, [x], before_step=lambda: average_gradients(plain))


def step_of_both(
    model: FSDP,
    optimizer: torch.optim.Optimizer,
    plain: nn.Module,
    plain_optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    step: int,
) -> None:
    x = batches(step)[mesh["dp"].get_local_rank()]
    train_on(model, optimizer, [x])
    train_plain(plain, plain_optimizer, x)


def trained(model: FSDP, mesh: DeviceMesh, num_steps: int = 1) -> FSDP:
    optimizer = adamw(model)
    train_on(model, optimizer, [batches(step)[mesh["dp"].get_local_rank()] for step in range(num_steps)])
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP], ids=lambda s: s.name
)
@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_training_over_both_axes_equals_a_plain_model_on_the_global_batch(
    use_orig_params: bool, strategy: ShardingStrategy, layout: str
) -> None:
    mesh, plain = grid(), net()
    model = on_grid(copy.deepcopy(plain), mesh, layout, use_orig_params=use_orig_params, sharding_strategy=strategy)
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    for step in range(4):
        for each in (model, plain):
            each.zero_grad()
            square_loss(each, batches(step)[mesh["dp"].get_local_rank()]).backward()
        average_gradients(plain)
        for norm_type in (2.0, math.inf, 2.0):
            expected = norm_of(plain, norm_type)
            assert_close(model.clip_grad_norm_(math.inf, norm_type), expected, rtol=1e-5, atol=1e-7, what="norm")
        for each in (optimizer, plain_optimizer):
            each.step()
        assert_idle(model)
    assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_clipping_scales_gradients_by_the_norm_over_both_axes(use_orig_params: bool) -> None:
    mesh, plain = grid(), net()
    model = on_grid(copy.deepcopy(plain), mesh, "sequence", use_orig_params=use_orig_params)
    for each in (model, plain):
        square_loss(each, batches(0)[mesh["dp"].get_local_rank()]).backward()
    average_gradients(plain)
    norm = model.clip_grad_norm_(0.01)
    assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01), rtol=1e-5, atol=0.0)
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert isinstance(param, DTensor), name
            assert isinstance(param.grad, DTensor)
            assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-7, what=name)


@on_ranks(4)
def test_a_parameter_that_no_unit_manages_counts_once_in_the_norm() -> None:
    mesh, plain = grid(), net()
    sharded = copy.deepcopy(plain)
    parallelize_module(sharded, mesh["tp"], plan("sequence"))
    ignored = [param for name, param in sharded.named_parameters() if name.startswith("head")]
    model = wrapped(sharded, device_mesh=mesh["dp"], ignored_states=ignored, use_orig_params=True)
    square_loss(model, batches(0)[0]).backward()
    square_loss(plain, batches(0)[0]).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert_close(model.clip_grad_norm_(0.01), expected, rtol=1e-5, atol=0.0)
    grad = ignored[0].grad
    assert isinstance(grad, DTensor)
    assert plain.head.weight.grad is not None
    assert_close(grad.full_tensor(), plain.head.weight.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_gradients_accumulated_inside_no_sync_equal_those_of_the_plain_model(use_orig_params: bool) -> None:
    mesh, plain = grid(), net()
    model = on_grid(copy.deepcopy(plain), mesh, "sequence", use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with model.no_sync():
        square_loss(model, batches(0)[mesh["dp"].get_local_rank()]).backward()
    square_loss(model, batches(1)[mesh["dp"].get_local_rank()]).backward()
    optimizer.step()
    for x in (*batches(0), *batches(1)):
        (square_loss(plain, x) / 2).backward()
    plain_optimizer.step()
    assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


@on_ranks(4)
def test_hybrid_sharding_takes_a_third_axis() -> None:
    plain = net()
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    sharded = parallelize_module(copy.deepcopy(plain), mesh["tp"], plan("tensor"))
    model = wrapped(
        sharded,
        device_mesh=mesh["replicate", "shard"],
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=LAYERS,
        use_orig_params=True,
    )
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    for step in range(2):
        x = batches(step)[mesh["replicate"].get_local_rank()]
        train_on(model, optimizer, [x])
        train_plain(plain, plain_optimizer, x)
    assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_low_precision_compute_and_offloaded_shards_work_on_local_tensors(use_orig_params: bool) -> None:
    mesh, plain = grid(), net()
    model = on_grid(
        copy.deepcopy(plain),
        mesh,
        "sequence",
        use_orig_params=use_orig_params,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        cpu_offload=CPUOffload(offload_params=True),
    )
    seen: list[torch.dtype] = []
    model.module.layers[0].up.register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
    trained(model, mesh, 2)
    assert set(seen) == {torch.bfloat16}
    plain_optimizer = adamw(plain)
    for step in range(2):
        train_plain(plain, plain_optimizer, batches(step)[mesh["dp"].get_local_rank()])
    assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0.0, atol=2e-2)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_modules_see_dtensors_in_forward_and_plain_slices_outside(use_orig_params: bool) -> None:
    mesh = grid()
    model = on_grid(net(), mesh, use_orig_params=use_orig_params)
    seen: list[Any] = []
    layer = model.module.layers[0]
    # The tensor-parallel input hook of the layer runs before this one.
    layer.up.register_forward_hook(lambda module, *_: seen.append((module.weight, module.bias)))
    layer.norm.register_forward_hook(lambda module, *_: seen.append((module.weight,)))
    square_loss(model, batches(0)[0]).backward()
    (norm,), (weight, bias) = seen
    assert type(norm) is nn.Parameter
    assert isinstance(weight, DTensor)
    assert isinstance(weight, nn.Parameter)
    assert weight.placements == (Shard(0),)
    assert weight.device_mesh == mesh["tp"]
    assert weight.shape == (HIDDEN, WIDTH)
    assert bias.to_local().shape == (HIDDEN // 2,)
    outside = list(model.parameters())
    assert not any(isinstance(param, DTensor) or param.dim() != 1 for param in outside)
    split = HIDDEN * (2 * WIDTH + 1) // 2
    held = sum(param.numel() for param in model.module.layers[0].parameters())
    assert held <= math.ceil((split + 3 * WIDTH) / 2) + 16


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_a_full_state_dict_is_that_of_the_plain_model(use_orig_params: bool, layout: str) -> None:
    plain = net()
    model = on_grid(copy.deepcopy(plain), grid(), layout, use_orig_params=use_orig_params)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(type(value) is torch.Tensor for value in state.values())
    assert_equal(dict(state), dict(plain.state_dict()))
    storages = {value.untyped_storage().data_ptr() for value in state.values()}
    assert len(storages) == len(state)
    assert sum(value.untyped_storage().nbytes() for value in state.values()) == sum(
        value.nbytes for value in state.values()
    )


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_rank0_only_keeps_the_full_state_dict_on_the_first_rank_of_each_shard_group(use_orig_params: bool) -> None:
    mesh, plain = grid(), net()
    model = on_grid(copy.deepcopy(plain), mesh, use_orig_params=use_orig_params)
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    expected = dict(plain.state_dict()) if mesh["dp"].get_local_rank() == 0 else {}
    assert_equal(dict(state), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_loading_a_full_state_dict_distributes_it_over_both_axes(use_orig_params: bool, layout: str) -> None:
    mesh, other = grid(), net(seed=1)
    model = on_grid(net(), mesh, layout, use_orig_params=use_orig_params)
    trained(model, mesh)
    report = model.load_state_dict(other.state_dict())
    assert not report.missing_keys
    assert not report.unexpected_keys
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))
    x = batches(5)[mesh["dp"].get_local_rank()]
    assert_close(model(x), other(x), rtol=1e-5, atol=1e-6)


@on_ranks(4)
def test_loading_takes_dtensors_of_the_same_shape() -> None:
    mesh, plain = grid(), net()
    parallel = parallelize_module(net(seed=1), mesh["tp"], plan("tensor"))
    model = on_grid(copy.deepcopy(plain), mesh, use_orig_params=True)
    model.load_state_dict(parallel.state_dict())
    assert_equal(dict(model.state_dict()), dict(net(seed=1).state_dict()))


@on_ranks(4)
def test_a_value_of_the_local_shape_does_not_load() -> None:
    model = on_grid(net(), grid(), use_orig_params=True)
    state = net().state_dict()
    state["layers.0.up.weight"] = state["layers.0.up.weight"][: HIDDEN // 2]
    with pytest.raises(RuntimeError, match=r"layers\.0\.up\.weight.*\[5, 8\].*\[10, 8\]"):
        model.load_state_dict(state)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_full_optimizer_state_is_that_of_the_plain_model_and_loads_back(use_orig_params: bool) -> None:
    mesh, plain = grid(), net()
    model = on_grid(copy.deepcopy(plain), mesh, "sequence", use_orig_params=use_orig_params)
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    step_of_both(model, optimizer, plain, plain_optimizer, mesh, 0)
    state = FSDP.optim_state_dict(model, optimizer)["state"]
    names = [name for name, _ in plain.named_parameters()]
    for index, expected in plain_optimizer.state_dict()["state"].items():
        assert_close(dict(state[names[index]]), dict(expected), rtol=1e-4, atol=1e-6, what=names[index])
    other = on_grid(net(), mesh, "sequence", use_orig_params=use_orig_params)
    other.load_state_dict(model.state_dict())
    other_optimizer = adamw(other)
    saved = FSDP.optim_state_dict(model, optimizer)
    other_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, other_optimizer, saved))
    step_of_both(other, other_optimizer, plain, plain_optimizer, mesh, 1)
    assert_close(dict(other.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_unwrapping_gives_the_tensor_parallel_model_back(use_orig_params: bool) -> None:
    mesh, plain = grid(), net()
    model = unwrap(on_grid(copy.deepcopy(plain), mesh, use_orig_params=use_orig_params))
    assert isinstance(model.layers[0].up.weight, DTensor)
    square_loss(model, batches(0)[0]).backward()
    square_loss(plain, batches(0)[0]).backward()
    grad = model.layers[0].up.weight.grad
    assert_close(grad.full_tensor(), plain.layers[0].up.weight.grad, rtol=1e-5, atol=1e-7)


SHARDED = StateDictType.SHARDED_STATE_DICT


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_a_sharded_state_dict_is_dtensors_on_the_mesh_of_both_axes(use_orig_params: bool, layout: str) -> None:
    mesh, plain = grid(), net()
    model = on_grid(copy.deepcopy(plain), mesh, layout, use_orig_params=use_orig_params)
    optimizer = adamw(model)
    step_of_both(model, optimizer, plain, adamw(plain), mesh, 0)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        expected, expected_state = model.state_dict(), FSDP.optim_state_dict(model, optimizer)["state"]
    with FSDP.state_dict_type(model, SHARDED):
        state, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)["state"]
    assert list(state) == list(expected)
    for name, value in state.items():
        assert isinstance(value, DTensor), name
        assert value.device_mesh == mesh, name
        assert value.placements[0] == Shard(0), name
        assert_equal(value.full_tensor(), expected[name], what=name)
        for key in ("exp_avg", "exp_avg_sq"):
            assert states[name][key].placements == value.placements, name
            assert_equal(states[name][key].full_tensor(), expected_state[name][key], what=f"{key} of {name}")
    split = dict(parallelize_module(net(), mesh["tp"], plan(layout)).named_parameters())
    for name, value in state.items():
        tensor_placement = split[name].placements[0] if isinstance(split[name], DTensor) else Replicate()
        assert value.placements[1] == tensor_placement, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_sharded_states_load_back_and_training_goes_on_alike(use_orig_params: bool, layout: str) -> None:
    mesh = grid()
    model = on_grid(net(), mesh, layout, use_orig_params=use_orig_params)
    optimizer = adamw(model)
    step_of_both(model, optimizer, net(), adamw(net()), mesh, 0)
    other = on_grid(net(seed=1), mesh, layout, use_orig_params=use_orig_params)
    other_optimizer = adamw(other)
    with FSDP.state_dict_type(model, SHARDED), FSDP.state_dict_type(other, SHARDED):
        other.load_state_dict(model.state_dict())
        saved = FSDP.optim_state_dict(model, optimizer)
        other_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, other_optimizer, saved))
    for which, optim in ((model, optimizer), (other, other_optimizer)):
        for step in (1, 2):
            step_of_both(which, optim, net(), adamw(net()), mesh, step)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


@on_ranks(4)
def test_dtensors_with_other_placements_are_redistributed_and_others_refused() -> None:
    mesh = grid()
    model = on_grid(net(), mesh, use_orig_params=True)
    plain = net(seed=1)
    given: dict[str, Any] = dict(plain.state_dict())
    name = "layers.0.up.weight"
    given[name] = distribute_tensor(given[name], mesh, [Replicate(), Shard(1)])
    with FSDP.state_dict_type(model, SHARDED):
        model.load_state_dict(given)
        given[name] = distribute_tensor(plain.state_dict()[name], mesh["dp"], [Shard(0)])
        with pytest.raises(RuntimeError, match=rf"{name}: expected a DTensor on .*, got DTensor with placements"):
            model.load_state_dict(given)
    assert_equal(dict(model.state_dict()), dict(plain.state_dict()))


@on_ranks(4)
def test_a_sharded_state_dict_needs_a_mesh_that_joins_both_axes() -> None:
    mesh = grid()
    model = parallelize_module(net(), mesh["tp"], plan("tensor"))
    sharded = wrapped(model, process_group=mesh["dp"].get_group(), auto_wrap_policy=LAYERS)
    with (
        FSDP.state_dict_type(sharded, SHARDED),
        pytest.raises(UnsupportedError, match=r"'up\.weight', a DTensor .* pass device_mesh=mesh\[.dp.\]"),
    ):
        sharded.state_dict()


def of_uneven_parts(out_features: int, use_orig_params: bool) -> tuple[nn.Module, Any]:
    """A model, and the same one split unevenly by tensor parallelism and wrapped."""
    mesh = grid()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, out_features, bias=False), nn.Linear(out_features, 3))
    split = copy.deepcopy(plain)
    parallelize_module(split, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return plain, wrapped(split, device_mesh=mesh["dp"], use_orig_params=use_orig_params)


@pytest.mark.parametrize("out_features", [1, 3, 5])
@on_ranks(4)
def test_sharded_chunks_of_uneven_parts_round_trip(out_features: int) -> None:
    plain, model = of_uneven_parts(out_features, use_orig_params=True)
    with FSDP.state_dict_type(model, SHARDED):
        state = model.state_dict()
        assert_equal({name: value.full_tensor() for name, value in state.items()}, dict(plain.state_dict()))
        model.load_state_dict({name: 2 * value for name, value in state.items()})
    assert_equal(dict(model.state_dict()), {name: 2 * value for name, value in plain.state_dict().items()})


@on_ranks(4)
def test_full_optimizer_state_from_rank_zero_of_each_column_loads_back() -> None:
    mesh, plain = grid(), net()
    model = on_grid(copy.deepcopy(plain), mesh, use_orig_params=True)
    optimizer = adamw(model)
    step_of_both(model, optimizer, plain, adamw(plain), mesh, 0)
    expected = FSDP.optim_state_dict(model, optimizer)
    config = FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
        saved = FSDP.optim_state_dict(model, optimizer)
        assert bool(saved) == (mesh["dp"].get_local_rank() == 0)
        other_optimizer = adamw(model)
        other_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, other_optimizer, saved or None))
    assert_equal(FSDP.optim_state_dict(model, other_optimizer), expected)


@pytest.mark.parametrize("out_features", [1, 3, 5])
@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_parts_of_uneven_size_round_trip(use_orig_params: bool, out_features: int) -> None:
    plain, model = of_uneven_parts(out_features, use_orig_params=use_orig_params)
    assert_equal(dict(model.state_dict()), dict(plain.state_dict()))
    doubled = {name: 2 * value for name, value in plain.state_dict().items()}
    model.load_state_dict(doubled)
    assert_equal(dict(model.state_dict()), doubled)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_summoned_parameters_are_dtensors_and_changes_are_kept(use_orig_params: bool) -> None:
    mesh, plain = grid(), net()
    model = on_grid(copy.deepcopy(plain), mesh, use_orig_params=use_orig_params)
    with FSDP.summon_full_params(model):
        shown = dict(model.named_parameters())
        assert list(shown) == [name for name, _ in plain.named_parameters()]
        weight = shown["layers.1.down.weight"]
        assert isinstance(weight, DTensor)
        assert weight.placements == (Shard(1),)
        assert_equal(weight.full_tensor().detach(), plain.layers[1].down.weight.detach())
        assert type(shown["layers.1.norm.weight"]) is nn.Parameter
        with torch.no_grad():
            weight.mul_(3.0)
            shown["layers.1.norm.weight"].mul_(3.0)
    with torch.no_grad():
        plain.layers[1].down.weight.mul_(3.0)
        plain.layers[1].norm.weight.mul_(3.0)
    assert_equal(dict(model.state_dict()), dict(plain.state_dict()))
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        model.module.layers[1].down.weight.zero_()
    assert_equal(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_frozen_tensor_parallel_parameters_stay_as_they_are(use_orig_params: bool) -> None:
    mesh, plain = grid(), net()
    model = copy.deepcopy(plain)
    model.layers[0].requires_grad_(False)
    sharded = on_grid(model, mesh, use_orig_params=use_orig_params)
    trained(sharded, mesh, 2)
    state = sharded.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value) == name.startswith("layers.0"), name


@on_ranks(4)
def test_hooks_and_marks_on_a_dtensor_survive_wrapping() -> None:
    mesh, model = grid(), parallelize_module(net(), grid()["tp"], plan("sequence"))
    grads: list[torch.Tensor] = []
    model.head.weight.mark = "kept"
    model.head.weight.register_hook(lambda grad: grads.append(grad))
    sharded = wrapped(model, device_mesh=mesh["dp"], use_orig_params=True)
    marks: list[Any] = []
    model.head.register_forward_hook(lambda module, *_: marks.append(module.weight.mark))
    square_loss(sharded, batches(0)[0]).backward()
    assert marks == ["kept"]
    assert isinstance(grads[0], DTensor)
    assert grads[0].shape == (6, WIDTH)


@pytest.mark.parametrize("sync", [True, "auto"])
@on_ranks(4)
def test_starting_weights_are_synchronised_over_the_data_parallel_axis(sync: Any) -> None:
    mesh = grid()
    model = net(seed=mesh["dp"].get_local_rank())
    sharded = on_grid(model, mesh, use_orig_params=True, sync_module_states=sync)
    assert_equal(dict(sharded.state_dict()), dict(net(seed=0).state_dict()))


@on_ranks(4)
def test_wrapping_over_the_ranks_of_the_tensor_parallel_mesh_is_refused() -> None:
    mesh = grid()
    model = parallelize_module(net(), mesh["tp"], plan("tensor"))
    with pytest.raises(OptionError, match=r"'layers\.0\.up\.weight' is a DTensor over ranks .*may share rank \d only"):
        wrapped(model, auto_wrap_policy=LAYERS)
    with pytest.raises(OptionError, match="is a DTensor over ranks"):
        wrapped(model, device_mesh=mesh["tp"])


@on_ranks(4)
def test_the_process_group_of_the_data_parallel_axis_does_as_well_as_its_mesh() -> None:
    mesh, plain = grid(), net()
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], plan("tensor"))
    sharded = wrapped(model, process_group=mesh["dp"].get_group(), auto_wrap_policy=LAYERS)
    assert_equal(dict(sharded.state_dict()), dict(plain.state_dict()))


@on_ranks(4)
def test_a_partial_dtensor_cannot_be_flattened() -> None:
    mesh = grid()
    model = nn.Linear(4, 4)
    partial = DTensor.from_local(model.weight.detach(), mesh["tp"], [Partial()], run_check=False)
    model.weight = nn.Parameter(partial)
    with pytest.raises(UnsupportedError, match="'weight' is a DTensor with placements"):
        wrapped(model, device_mesh=mesh["dp"])


@pytest.mark.of_guards
@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_an_optimizer_that_holds_the_dtensors_is_found(use_orig_params: bool) -> None:
    mesh, model = grid(), net()
    parallelize_module(model, mesh["tp"], plan("tensor"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = wrapped(model, device_mesh=mesh["dp"], use_orig_params=use_orig_params)
    square_loss(sharded, batches(0)[0]).backward()
    with pytest.raises(UsageError, match="Build the optimizer after wrapping"):
        optimizer.step()


@on_ranks(4)
def test_the_error_for_a_sharded_weight_has_the_shape_that_the_module_shows() -> None:
    model = on_grid(net(), grid(), use_orig_params=False)
    weight = model.module.layers[0].module.up.weight
    with pytest.raises(UsageError, match=rf"up.weight' \({HIDDEN}, {WIDTH}\) of unit"):
        weight + 1
