"""Programs that call FSDP1's and FSDP2's inner names, as they do it, beside torch's FSDPs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import UsageError
from tests.support import assert_close, on_ranks
from tests.support.kit import square_loss
from tests.support.models import BufferedBlock, Tied
from tests.support.peer import peer_warnings_silenced
from tests.support.wrapper_models import batch, message, seeded, shard, shard_by_peer, whole_state

KINDS = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])


def train(model: Any, run: Callable[..., Any] | None = None, steps: int = 2) -> dict[str, torch.Tensor]:
    """The full weights after some steps on this rank's batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(steps):
        square_loss(model if run is None else run, batch(dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(model)


# ------------------------------------------------------------------------------------------ forwards, step by step


@KINDS
@on_ranks(2, 4)
def test_a_first_set_up_by_root_pre_forward_changes_nothing(orig: bool) -> None:
    """litgpt does the lazy initialization of a compiled model by ``_root_pre_forward`` before training."""
    from torch.distributed.fsdp import _runtime_utils

    expected = train(shard(seeded(), use_orig_params=orig))
    with fsdp_flat.installed():
        model = shard(seeded(), use_orig_params=orig)
        assert _runtime_utils._root_pre_forward(model, model, [], {}) == ([], {})
        assert (model._is_root, model.blocks[0]._is_root) == (True, False)
        compiled = torch.compile(model, backend="eager") if orig else model
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning
            )  # dynamo
            assert_close(train(model, compiled), expected, rtol=0, atol=0)
    torch._dynamo.reset()


class StepByStep(fsdp_flat.FullyShardedDataParallel):
    """A wrapper whose forward is written out, as trainers have it that change a part of it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from torch.distributed.fsdp import _runtime_utils as runtime

        handle = self._handle
        args, kwargs = runtime._root_pre_forward(self, self, args, kwargs)
        args, kwargs = runtime._pre_forward(
            self, handle, runtime._pre_forward_unshard, self._fsdp_wrapped_module, args, kwargs
        )
        assert handle.flat_param.device == self.compute_device
        output = self._fsdp_wrapped_module(*args, **kwargs)
        return runtime._post_forward(self, handle, runtime._post_forward_reshard, self, None, output)


def step_by_step(**kwargs: Any) -> StepByStep:
    """The model with a wrapper of that class around each block and the whole."""
    plain = seeded()
    for index, block in enumerate(plain.blocks):
        plain.blocks[index] = StepByStep(block, **kwargs)
    return StepByStep(plain, **kwargs)


@KINDS
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@on_ranks(2, 4)
def test_a_forward_written_step_by_step_trains_as_the_wrappers_own(orig: bool, dtype: torch.dtype | None) -> None:
    """``_root_pre_forward``, ``_pre_forward`` and ``_post_forward`` with the functions they take."""
    precision = {"mixed_precision": fsdp_flat.MixedPrecision(dtype, buffer_dtype=dtype, cast_forward_inputs=True)}
    expected = train(shard(seeded(), use_orig_params=orig, **precision))
    with fsdp_flat.installed():
        model = step_by_step(use_orig_params=orig, **precision)
        assert_close(train(model), expected, rtol=0, atol=0)
        assert all(each._unit.is_sharded for each in model.fsdp_modules(model))


@contextmanager
def scope(model: Any) -> Iterator[None]:
    """A forward of a wrapper around other calls, as cosmos-predict1 opens it for sampling."""
    from torch.distributed.fsdp import _runtime_utils as runtime

    handle = model._handle
    args, kwargs = runtime._root_pre_forward(model, model, [0], {"dummy": 0})
    runtime._pre_forward(model, handle, runtime._pre_forward_unshard, model._fsdp_wrapped_module, args, kwargs)
    try:
        yield
    finally:
        runtime._post_forward(model, handle, runtime._post_forward_reshard, model, None, {"output": 1})


@KINDS
@on_ranks(2)
def test_other_calls_run_inside_a_forward_that_is_opened_by_hand(orig: bool) -> None:
    """Parameters of the outer unit are there for children and methods, and sharded again afterwards."""
    plain = seeded()
    x = batch(dist.get_rank())
    with fsdp_flat.installed(), torch.no_grad():
        model = shard(seeded(), use_orig_params=orig)
        with scope(model):
            assert model.first.weight.shape == (5, 3)
            assert torch.equal(model.first(x), plain.first(x))
            assert torch.equal(model(x), plain(x))
            assert torch.equal(model.last(model.first(x)), plain.last(plain.first(x)))
        assert all(each._unit.is_sharded for each in model.fsdp_modules(model))
        with pytest.raises(ZeroDivisionError), scope(model):
            _ = 1 / 0
        assert torch.equal(model(x), plain(x))
    assert_close(train(model), train(shard(seeded(), use_orig_params=orig)), rtol=0, atol=0)


@on_ranks(2)
def test_a_forward_may_be_ended_without_a_reshard_and_must_have_been_begun() -> None:
    """The function that reshards may be None, or the caller's own."""
    from torch.distributed.fsdp import _runtime_utils as runtime

    with fsdp_flat.installed(), torch.no_grad():
        model = shard(seeded())
        for block, reshard in zip(model.blocks, (None, lambda state, handle: runtime._reshard(state, handle, True))):
            x = torch.ones(2, 5)
            args, kwargs = runtime._pre_forward(block, block._handle, None, block.module, (x,), {})
            output = block.module(*args, **kwargs)
            assert runtime._post_forward(block, block._handle, reshard, block, None, output) is not None
            assert block._unit.is_sharded is (reshard is not None)
            runtime._reshard(block, block._handle, True)
            assert block._unit.is_sharded
        text = message(
            UsageError, UsageError, lambda: runtime._post_forward(model, model._handle, None, model, None, x)
        )
        assert "without _pre_forward before it" in text
        assert "register_forward_method" in text


@KINDS
@on_ranks(2)
def test_a_unit_is_unsharded_and_freed_by_its_handle(orig: bool) -> None:
    """``handle.unshard`` with what comes before and after, and the functions of the same names."""
    from torch.distributed.fsdp import _runtime_utils as runtime

    with fsdp_flat.installed():
        model = shard(seeded(), use_orig_params=orig)
        plain, handle = seeded(), model._handle
        for unshard in (handle.unshard, lambda: runtime._unshard(model, handle, None, None)):
            assert handle.pre_unshard()
            unshard()
            handle.post_unshard()
            assert not handle.needs_unshard()
            assert torch.equal(model.first.weight, plain.first.weight)
            flat = handle._get_padded_unsharded_flat_param()
            assert flat.untyped_storage().size() == flat.nbytes
            handle.reshard(True)
            handle.post_reshard()
            assert handle.needs_unshard()


# ------------------------------------------------------------------------------------------------ states and marks


def by_class(infos: Any) -> list[list[Any]]:
    """Descriptions of parameters with the class of each module."""
    return [[type(each).__name__ if isinstance(each, nn.Module) else each for each in info] for info in infos]


@KINDS
@pytest.mark.parametrize("make", [None, Tied])
@on_ranks(2)
def test_a_handle_describes_its_shard_as_torchs(orig: bool, make: Any) -> None:
    """``handle.shard_metadata``, ``flat_param._param_infos`` and the names that go with them."""
    kind = {"make": make} if make else {}
    mine = shard(seeded(**kind), use_orig_params=orig)
    theirs = shard_by_peer(seeded(**kind), use_orig_params=orig)
    with peer_warnings_silenced():
        pairs = list(zip(mine.fsdp_modules(mine), type(theirs).fsdp_modules(theirs), strict=True))
    for a, b in pairs:
        assert tuple(a._handle.shard_metadata()) == tuple(b._handle.shard_metadata())
        assert a._handle.shard_metadata()._fields == b._handle.shard_metadata()._fields
        own, peer = a._handle.flat_param, b._handle.flat_param
        for name in ("_param_infos", "_shared_param_infos"):
            assert by_class(getattr(own, name)) == by_class(getattr(peer, name))
        assert [info.module for info in own._param_infos if getattr(info.module, "weight", None) is None] == []
        for name in ("_strides", "_contiguities", "_param_extensions"):
            assert list(getattr(own, name)) == list(getattr(peer, name))
        assert (own._shared_params is None) == (peer._shared_params is None)
        assert len(own._shared_params or ()) == len(peer._shared_params or ())
        for name in ("param_module_names", "shared_param_module_names"):
            assert list(getattr(a._handle, name)()) == list(getattr(b._handle, name)())
        for name in ("_aligned_numel", "_uses_param_mixed_precision", "_uses_reduce_mixed_precision"):
            assert getattr(a._handle, name) == getattr(b._handle, name)
        assert a._handle._fqns_in_shard == b._handle._fqns_in_shard
        assert sorted(map(str, a._handle._get_modules())) == sorted(map(str, b._handle._get_modules()))


@on_ranks(2)
def test_flat_shards_are_saved_and_put_together_by_their_metadata() -> None:
    """A checkpoint of flat parameters, as atorch writes it."""
    model = shard(seeded(), use_orig_params=True)
    parts: list[dict[str, tuple[int, torch.Tensor, torch.Size]]] = []
    own: dict[str, tuple[int, torch.Tensor, torch.Size]] = {}
    for path, unit in model.named_modules():
        if isinstance(unit, fsdp_flat.FullyShardedDataParallel):
            prefix = fsdp_flat.clean_tensor_name(path)
            meta, flat = unit._handle.shard_metadata(), unit._handle.flat_param
            held = [info for info in flat._shard_param_infos if info.in_shard]
            for info, name, shape, (start, _) in zip(
                held, meta.param_names, meta.param_shapes, meta.param_offsets, strict=True
            ):
                values = flat[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard].detach().clone()
                own[f"{prefix}.{name}".strip(".")] = start, values, shape
    parts = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, own)
    whole = {}
    for name in {name for part in parts for name in part}:
        pieces = sorted([part[name] for part in parts if name in part], key=lambda piece: piece[0])
        whole[name] = torch.cat([values for _, values, _ in pieces]).reshape(pieces[0][2])
    expected = {name: value for name, value in whole_state(model).items() if "shift" not in name}
    assert_close(dict(sorted(whole.items())), dict(sorted(expected.items())), rtol=0, atol=0)


def grouped(model: nn.Module) -> dict[str, list[str]]:
    """Parameters with and without weight decay, by original shapes, which are looked up in FSDP's states."""
    from torch.distributed._composable_state import _get_module_state
    from torch.distributed.fsdp._common_utils import _FSDPState

    shapes: dict[str, torch.Size] = {}
    for path, module in model.named_modules():
        state: Any = _get_module_state(module)
        if isinstance(state, _FSDPState):
            flat = state._handle.flat_param
            inside = f"{path}._fsdp_wrapped_module".strip(".")
            for (name, _, below), shape in zip(flat._param_infos, flat._shapes, strict=True):
                shapes[".".join(filter(None, (inside, below, name)))] = shape
        else:
            assert state is None
    decays: dict[str, list[str]] = {"yes": [], "no": []}
    for name, param in model.named_parameters():
        decays["yes" if len(shapes.get(name, param.shape)) > 1 else "no"].append(name)
    return decays


@on_ranks(2, 4)
def test_parameters_are_grouped_by_the_shapes_that_a_state_has() -> None:
    """LLaMA2-Accessory groups by these; without them every parameter falls into "no weight decay"."""
    expected = grouped(shard_by_peer(seeded(), use_orig_params=True))
    with fsdp_flat.installed():
        found = grouped(shard(seeded(), use_orig_params=True))
    assert found == expected
    assert found["yes"]


@KINDS
@on_ranks(2)
def test_the_mark_of_a_flattened_parameter_is_a_plain_true(orig: bool) -> None:
    """As an initialisation for the meta device tests it; the unit that manages a parameter is another mark."""
    from torch.distributed.fsdp._common_utils import _is_fsdp_flattened, _set_fsdp_flattened

    model = shard(seeded(), use_orig_params=orig)
    assert all(_is_fsdp_flattened(param) is True for param in model.parameters())
    other = nn.Parameter(torch.ones(3))
    assert _is_fsdp_flattened(other) is False
    _set_fsdp_flattened(other)
    # A parameter that only carries torch's mark is managed by no unit of ours, and is sharded like any other.
    module = nn.Linear(3, 1, bias=False)
    module.weight = other
    other.data = torch.ones(1, 3)
    assert len(list(fsdp_flat.FullyShardedDataParallel(module).parameters())) == 1
    assert not any(hasattr(param, "_fsdp_flattened") for param in fsdp_flat.unwrap(model).parameters())


@on_ranks(2)
def test_no_error_of_an_inner_name_speaks_of_the_users_class() -> None:
    """The text "'Net' object has no attribute '_device_handle'" was there before."""
    for orig in (False, True):
        mine, theirs = shard(seeded(), use_orig_params=orig), shard_by_peer(seeded(), use_orig_params=orig)
        for model in (mine, theirs):
            square_loss(model, batch(dist.get_rank())).backward()
        for own, peer in ((mine, theirs), (mine._handle, theirs._handle)):
            missing = [name for name in sorted({*vars(peer), *dir(peer)}) if not hasattr(own, name)]
            for name in missing:
                text = message(AttributeError, AttributeError, lambda own=own, name=name: getattr(own, name))
                assert type(own).__name__ in text
                assert "which FSDP1 has: it has no counterpart in fsdp_flat" in text, (name, text)
        assert mine._device_handle is torch.cpu


# --------------------------------------------------------------------------------------------------------- FSDP2


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(BufferedBlock(), BufferedBlock())
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def fully(fully_shard: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    for module in (*model.body, model.head, model):
        fully_shard(module, **kwargs)
    return model


@on_ranks(2)
def test_states_of_fully_shard_are_found_as_torchs() -> None:
    """``_get_module_fsdp_state``, ``_get_module_state`` and ``_module_state_mapping``."""
    from torch.distributed import _composable_state as composable
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state

    def read(model: Any) -> list[Any]:
        found: list[Any] = []
        params = {id(param) for param in model.parameters()}
        for name, module in model.named_modules():
            state: Any = _fsdp_state._get_module_fsdp_state(module)
            assert composable._get_module_state(module) == state
            assert (module in composable._module_state_mapping) is (state is not None)
            if state is None:
                found.append((name, None))
                continue
            assert isinstance(state, composable._State)
            assert isinstance(state, _fsdp_state.FSDPState)
            assert state._modules == (module,)
            group = state._fsdp_param_group
            found.append((name, group is None))
            if group is not None:
                assert isinstance(group, _fsdp_param_group.FSDPParamGroup)
                assert group.modules == (module,)
                assert {id(param.sharded_param) for param in group.fsdp_params} <= params
        return found

    expected = read(fully(torch.distributed.fsdp.fully_shard))
    with fsdp_flat.installed():
        assert read(fully(fsdp_flat.fully_shard)) == expected


@on_ranks(2)
def test_the_closest_sharded_module_is_found_in_torchs_map_of_states() -> None:
    """TransformerEngine looks for the state of a module inside a sharded one; ``unwrap`` takes it out."""
    from torch.distributed._composable_state import _module_state_mapping

    def closest(module: nn.Module) -> Any:
        holders = [each for each in _module_state_mapping if any(child is module for child in each.modules())]
        holders.sort(key=lambda each: len(list(each.modules())))
        return holders[0]._get_fsdp_state() if holders else None  # type: ignore[operator]

    model = fully(fsdp_flat.fully_shard)
    assert closest(model.body[0].up) == model.body[0]._get_fsdp_state()
    assert closest(model.body) == model._get_fsdp_state()
    assert closest(nn.Linear(2, 2)) is None
    fsdp_flat.unwrap(model)
    assert closest(model.head) is None


def through_chunks(fully_shard: Any) -> dict[str, torch.Tensor]:
    """Weights after steps whose backwards are reduced by hand, through states and groups."""
    model = fully(fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = model._get_fsdp_state()
    for step in range(2):
        model.set_is_last_backward(False)
        model.set_requires_gradient_sync(False)
        for chunk in range(2):
            torch.manual_seed(10 * step + chunk + 100 * dist.get_rank())
            model(torch.randn(3, 5)).square().mean().backward()
        for module in model.modules():
            found = getattr(module, "_get_fsdp_state", lambda: None)()
            if found is None or found._fsdp_param_group is None:
                continue
            group = found._fsdp_param_group
            group.reduce_grads = True
            for param in group.fsdp_params:
                if hasattr(param, "_unsharded_param"):
                    param.accumulate_unsharded_grad_if_needed()
                    param.to_accumulated_grad_if_needed()
            group.post_backward()
        model.set_is_last_backward(True)
        state._root_post_backward_final_callback()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.full_tensor().detach() for name, param in model.named_parameters()}


@on_ranks(2)
def test_a_pipelines_end_of_backward_through_groups_and_parameters_is_torchs() -> None:
    """As dual pipelines end a backward, with the switch of a group assigned."""
    expected = through_chunks(torch.distributed.fsdp.fully_shard)
    assert_close(through_chunks(fsdp_flat.fully_shard), expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_state_is_set_idle_before_a_model_is_moved_and_to_nothing_else() -> None:
    """VeOmni's offload between steps."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    with fsdp_flat.installed():
        model = fully(fsdp_flat.fully_shard)
        model(torch.ones(2, 5)).sum().backward()
        hook = model.body[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 5))
        hook.remove()
        for module in model.modules():
            state: Any = _get_module_fsdp_state(module)
            if state is not None and state._fsdp_param_group is not None:
                state._fsdp_param_group._training_state = TrainingState.IDLE
        model.reshard()
        model.cpu()
        with pytest.raises(UsageError, match="IDLE, which resets the unit"):
            model.head._get_fsdp_state()._training_state = TrainingState.FORWARD
        model(torch.ones(2, 5)).sum().backward()


@on_ranks(2)
def test_fsdp1s_functions_refuse_a_module_of_fully_shard_by_name() -> None:
    """FSDP1's state of a module is a wrapper."""
    from torch.distributed.fsdp import _runtime_utils as runtime

    model = fully(fsdp_flat.fully_shard)
    with fsdp_flat.installed():
        for call in (runtime._lazy_init, runtime._is_fsdp_root, runtime._post_backward_final_callback):
            text = message(UsageError, UsageError, lambda call=call: call(model, model))
            assert text.startswith(f"{call.__name__} takes a FullyShardedDataParallel")
            assert "unshard, reshard, reset_iter_state" in text


class Named(FSDP):
    """Overrides undocumented members, as subclasses of FSDP1's wrapper do."""

    @property
    def _is_root(self) -> Any:
        return "root", super()._is_root  # type: ignore[misc]

    def _assert_state(self, state: Any) -> None:
        self.asserted = state
        super()._assert_state(state)  # type: ignore[misc]


@on_ranks(2)
def test_a_subclass_overrides_undocumented_members_and_calls_the_wrappers() -> None:
    model = Named(nn.Linear(2, 2))
    assert model._is_root == ("root", None)
    model.check_is_root()
    assert model._is_root == ("root", True)
    model._assert_state(model.training_state)
    assert model.asserted is model.training_state
    with pytest.raises(ValueError, match="was expected to be in"):
        model._assert_state([])
