"""Texts that say what is wrong and what to do, where a raw error, or several, came before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as peer
from torch import nn

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import LoadError, OptionError, OptionTypeError, UnsupportedError, UsageError
from tests.support import assert_close, on_ranks
from tests.support.kit import square_loss
from tests.support.peer import peer_warnings_silenced
from tests.support.wrapper_models import batch, seeded, shard, shard_by_peer, whole_state

KINDS = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])


def fully(model: Any = None) -> Any:
    """The model with ``fully_shard`` on each block and the whole."""
    model = seeded() if model is None else model
    for block in model.blocks:
        fsdp_flat.fully_shard(block)
    return fsdp_flat.fully_shard(model)


def text_of(kind: type[Exception], call: Callable[[], Any]) -> str:
    """The text of the error that a call raises; warnings of torch's are not of interest."""
    with peer_warnings_silenced(), pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------ torch's FSDPs

ONE_OF_TWO = "One of the two libraries can shard a parameter."


@KINDS
@on_ranks(2)
def test_torchs_fully_shard_around_or_inside_ours_is_refused_where_it_is_called(orig: bool) -> None:
    """Torch's error was "Invariant encountered: value was None", or ours came with the first forward."""
    choices: list[Callable[[Any], Any]] = [lambda model: model, nn.Sequential, lambda model: model.blocks[0]]
    cases = [choice(shard(seeded(), use_orig_params=orig)) for choice in choices]
    cases += [nn.Sequential(fully()), fully().blocks[0].up]
    for model in cases:
        text = text_of(UsageError, lambda model=model: peer.fully_shard(model))
        assert text.startswith("torch's fully_shard was called on ")
        assert ONE_OF_TWO in text
        assert "ignored_params" in text
    # What is left out may be sharded by torch.
    rest: Any = nn.Sequential(fully(), nn.Linear(3, 3))
    peer.fully_shard(rest, ignored_params=set(rest[0].parameters()))
    assert rest[1].weight.to_local().shape != (3, 3)


@KINDS
@on_ranks(2)
def test_torchs_wrapper_inside_ours_is_refused(orig: bool) -> None:
    """Whether it is there before, or put there later; and with ``fully_shard`` of ours around it."""
    wrapped, sharded = shard(seeded(), use_orig_params=orig), fully()
    for module in (wrapped.blocks[0].module.up, sharded.blocks[0].up, sharded.blocks[1].down):
        text = text_of(UsageError, lambda module=module: shard_by_peer(module, by_blocks=False))
        assert text.startswith("torch's FullyShardedDataParallel was called on a Linear inside unit ")
        assert ONE_OF_TWO in text
    for around in (FSDP, fsdp_flat.fully_shard):
        model = seeded()
        model.blocks[0] = shard_by_peer(model.blocks[0], by_blocks=False, use_orig_params=orig)
        text = text_of(OptionError, lambda around=around, model=model: around(model))
        assert text.startswith("'blocks.0' of Model is sharded by torch's FullyShardedDataParallel already.")
        assert "python -m fsdp_flat.run" in text
    left = seeded()
    left.blocks[0] = shard_by_peer(left.blocks[0], by_blocks=False, use_orig_params=orig)
    outer = FSDP(left, ignored_modules=[left.blocks[0]], use_orig_params=orig)
    with peer_warnings_silenced():
        square_loss(outer, batch(dist.get_rank())).backward()


@on_ranks(2)
def test_ours_around_or_inside_torchs_fully_shard_is_refused_with_its_name() -> None:
    """Before, the text was about a mesh for tensor parallelism."""
    for around in (FSDP, fsdp_flat.fully_shard):
        inner = seeded()
        peer.fully_shard(inner.blocks[0])
        text = text_of(OptionError, lambda around=around, inner=inner: around(inner))
        assert text.startswith("'blocks.0' of Model is sharded by torch's fully_shard already.")
        whole = seeded()
        peer.fully_shard(whole)
        text = text_of(OptionError, lambda around=around, whole=whole: around(whole.blocks[0]))
        assert text.startswith("'up' of BufferedBlock is sharded by torch's FSDP already.")


@KINDS
@on_ranks(2)
def test_static_methods_of_torchs_wrapper_refuse_models_of_ours(orig: bool) -> None:
    """They ended in ``KeyError: None``, or did nothing, while a helper still imported the class from torch."""
    theirs, full = peer.FullyShardedDataParallel, peer.StateDictType.FULL_STATE_DICT
    wrapper = shard(seeded(), use_orig_params=orig)
    optimizer = torch.optim.SGD(wrapper.parameters())
    for model in (wrapper, nn.Sequential(wrapper)):
        calls: dict[str, Callable[[], Any]] = {
            "state_dict_type": lambda model=model: theirs.state_dict_type(model, full),
            "set_state_dict_type": lambda model=model: theirs.set_state_dict_type(model, full),
            "get_state_dict_type": lambda model=model: theirs.get_state_dict_type(module=model),
            "optim_state_dict": lambda model=model: theirs.optim_state_dict(model, optimizer),
            "optim_state_dict_to_load": lambda model=model: theirs.optim_state_dict_to_load(model, optimizer, {}),
            "full_optim_state_dict": lambda model=model: theirs.full_optim_state_dict(model, optimizer),
            "shard_full_optim_state_dict": lambda model=model: theirs.shard_full_optim_state_dict({}, model=model),
            "summon_full_params": lambda model=model: theirs.summon_full_params(model),
        }
        for name, call in calls.items():
            text = text_of(UsageError, call)
            assert text.startswith(f"torch's FullyShardedDataParallel.{name} was called on a {type(model).__name__} ")
            assert f"fsdp_flat.FullyShardedDataParallel.{name}" in text
            assert "fsdp_flat.install()" in text
    assert theirs.fsdp_modules(wrapper) == []


@KINDS
@on_ranks(2)
def test_static_methods_of_torchs_wrapper_work_on_models_of_torchs_beside_ours(orig: bool) -> None:
    ours = shard(seeded(), use_orig_params=orig)
    both = nn.ModuleList([shard_by_peer(seeded(), use_orig_params=orig), ours])
    whole = whole_state(ours)
    for model in (both, both[0]):
        with peer_warnings_silenced(), peer.FullyShardedDataParallel.summon_full_params(model):
            assert both[0].state_dict().keys() >= whole.keys()
    with peer.FullyShardedDataParallel.summon_full_params(fully()):  # as of torch's fully_shard, nothing happens
        pass


# ------------------------------------------------------------------------------------------------------ after unwrap


@KINDS
@on_ranks(2)
def test_a_wrapper_that_unwrap_has_emptied_says_so_in_every_method(orig: bool) -> None:
    """``state_dict()`` raised an empty AssertionError; ``reshard()``, of an inner wrapper too, is a sibling."""
    model = shard(seeded(), use_orig_params=orig)
    inner = model.blocks[0]
    plain = fsdp_flat.unwrap(model)
    calls = [
        *(method for each in (model, inner) for method in (each.state_dict, each.reshard, each.unshard)),
        *(lambda: list(model.parameters()), lambda: model.load_state_dict({}), model.zero_grad, model.check_is_root),
        *(lambda: model(batch(0)), lambda: model.clip_grad_norm_(1.0), lambda: model.set_requires_gradient_sync(False)),
        lambda: fsdp_flat.save_checkpoint("unused", model),
        lambda: fsdp_flat.save_full(model, "unused"),
    ]
    for call in calls[:-5]:
        assert "Use the module that unwrap returned." in text_of(UsageError, call)
    for call in calls[-2:]:
        assert "Use the module that unwrap returned." in text_of(UsageError, call)
    assert "Shard the model first." in text_of(OptionError, lambda: fsdp_flat.save_full(nn.Linear(2, 2), "unused"))
    assert plain.state_dict().keys() == seeded().state_dict().keys()


# ------------------------------------------------------------------------------------------ calls while it is sharded


@on_ranks(2)
def test_a_child_or_method_called_under_fully_shard_is_told_how_to_call_it() -> None:
    """Torch's error is about a mixture of tensors; advice is added, and a right operation is not refused."""
    model, x = fully(), batch(dist.get_rank())
    for call in (
        lambda: model.first(x),
        lambda: model.blocks[0].up(torch.ones(2, 5)),
        lambda: model.last(model.first(x)),
    ):
        text = text_of(RuntimeError, call)
        assert "mixed torch.Tensor and DTensor" in text  # torch's own
        assert "Linear was called while its parameter" in text
        assert "is sharded, and so a DTensor. Call the wrapped model" in text
        assert "register_forward_method(model, name)" in text
        assert text.count("register_forward_method") == 1
    replicated = [torch.distributed.tensor.Replicate()]
    same = batch(0)
    as_dtensor = torch.distributed.tensor.DTensor.from_local(same, model.first.weight.device_mesh, replicated)
    assert_close(model.first(as_dtensor).full_tensor(), seeded().first(same), rtol=1e-5, atol=1e-6)
    assert_close(model(x), seeded()(x), rtol=1e-5, atol=1e-6)
    # Nothing is left on the modules that were called.
    assert not any(module._forward_hooks for module in model.modules())
    fsdp_flat.unwrap(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


@on_ranks(2)
def test_another_error_of_a_child_stays_as_it_is() -> None:
    """The advice belongs to one error."""

    class Picky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no")

    model = fsdp_flat.fully_shard(nn.Sequential(Picky(2, 2)))
    assert text_of(RuntimeError, lambda: model[0](torch.ones(1, 2))) == "no"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # by torch.func itself
@KINDS
@on_ranks(2)
def test_forward_mode_transforms_run_and_those_that_run_backward_are_named(orig: bool) -> None:
    """``torch.func.jvp`` on the wrapper, ``jacfwd`` and ``vmap``; ``grad`` and ``vjp`` cannot work."""
    x, plain = batch(dist.get_rank()), seeded()
    for model in (shard(seeded(), use_orig_params=orig), fully()):
        for transform in (
            lambda module: torch.func.jvp(module, (x,), (x,)),
            lambda module: torch.func.jacfwd(module)(x),
            lambda module: torch.func.vmap(module)(x),
        ):
            expected = torch.utils._pytree.tree_leaves(transform(plain))
            found = torch.utils._pytree.tree_leaves(transform(model))
            assert_close([each.detach() for each in found], [each.detach() for each in expected], rtol=1e-5, atol=1e-6)
        for transform in (
            lambda module: torch.func.grad(lambda given: module(given).sum())(x),
            lambda module: torch.func.vjp(module, x),
            lambda module: torch.func.jacrev(module)(x),
        ):
            text = text_of(UnsupportedError, lambda transform=transform, model=model: transform(model))
            assert "inside a transform of torch.func that runs backward" in text
            assert "torch.func.jvp and jacfwd" in text
        square_loss(model, x).backward()
    assert all(param.grad is not None for param in model.parameters())


# ------------------------------------------------------------------------------------------------------ state dicts


def odd_states() -> dict[str, tuple[Any, str]]:
    """State dicts that are not the model's, with what is told about each."""
    state = seeded().state_dict()
    return {
        "of DistributedDataParallel": (
            {f"module.{name}": value for name, value in state.items()},
            "Its names begin with 'module.' (by DistributedDataParallel), the model's do not. Load "
            "{name.removeprefix('module.'): value for name, value in state_dict.items()}.",
        ),
        "of a task around it": (
            {f"net.model.{name}": value for name, value in state.items()},
            "Its names begin with 'net.model.', the model's do not.",
        ),
        "in a checkpoint": (
            {"model": state, "epoch": 3},
            "The model's state dict is its entry 'model'. Load state_dict['model'].",
        ),
        "in Lightning's checkpoint": (
            {"state_dict": state, "optimizer_states": []},
            "The model's state dict is its entry 'state_dict'. Load state_dict['state_dict'].",
        ),
        "of an optimizer": (
            {"state": {"first.weight": {"step": torch.ones(())}}, "param_groups": [{"params": ["first.weight"]}]},
            "This is an optimizer's state dict. Load it by optim.load_state_dict; one that FSDP.optim_state_dict has "
            "made is converted for that by FSDP.optim_state_dict_to_load(model, optim, state_dict).",
        ),
    }


@pytest.mark.parametrize("which", odd_states())
@pytest.mark.parametrize("kind", ["flat", "orig", "fully_shard"])
@on_ranks(2)
def test_loading_another_state_dict_tells_what_to_load(which: str, kind: str) -> None:
    """Names of DDP, a whole checkpoint, an optimizer's state; with torch's list of names before it."""
    state, advice = odd_states()[which]
    model = fully() if kind == "fully_shard" else shard(seeded(), use_orig_params=kind == "orig")
    before = whole_state(model) if isinstance(model, FSDP) else None
    text = text_of(RuntimeError, lambda: model.load_state_dict(state))
    assert "Missing key(s) in state_dict" in text
    assert advice in text
    assert before is None or all(torch.equal(value, before[name]) for name, value in whole_state(model).items())
    # Names that fit are no reason for advice, nor is a load that does not ask for all.
    some = dict(list(seeded().state_dict().items())[1:])
    assert text_of(RuntimeError, lambda: model.load_state_dict(some)).rstrip().endswith('"first.weight".')
    model.load_state_dict(some, strict=False)


@pytest.mark.parametrize("kind", ["flat", "orig", "fully_shard"])
@on_ranks(2)
def test_an_empty_state_dict_is_told_to_be_that_of_other_ranks_than_the_first(kind: str) -> None:
    """With ``rank0_only=True``; with ``strict=False`` it loaded nothing, and said nothing."""
    model = fully() if kind == "fully_shard" else shard(seeded(), use_orig_params=kind == "orig")
    assert "The state dict is empty, as rank0_only=True leaves it" in text_of(
        RuntimeError, lambda: model.load_state_dict({})
    )
    with pytest.warns(UserWarning, match="has loaded nothing. The state dict is empty"):
        model.load_state_dict({}, strict=False)


@pytest.mark.parametrize("which", odd_states())
@on_ranks(2)
def test_a_file_with_another_state_dict_tells_the_same(which: str, tmp_path: Path) -> None:
    """``load_full`` has the same hints, by the same code."""
    state, advice = odd_states()[which]
    path = tmp_path / "model.pt"
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()
    text = text_of(LoadError, lambda: fsdp_flat.load_full(shard(seeded()), path))
    assert ("prefix=" in text) if all(isinstance(value, torch.Tensor) for value in state.values()) else (advice in text)


@on_ranks(2)
def test_a_directory_that_is_a_checkpoint_is_named_as_such_by_load_full(tmp_path: Path) -> None:
    """Of ``save_checkpoint``, all of them or one; and of torch.distributed.checkpoint."""
    model = shard(seeded(), use_orig_params=True)
    fsdp_flat.save_checkpoint(tmp_path / "runs", model, step=3)
    one = next(path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    for path in (tmp_path / "runs", one):
        text = text_of(LoadError, lambda path=path: fsdp_flat.load_full(model, path))
        assert "but a checkpoint of save_checkpoint. Load it by fsdp_flat.load_checkpoint" in text
    with peer_warnings_silenced():
        dcp.save({"x": torch.ones(2)}, checkpoint_id=str(tmp_path / "dcp"))
    text = text_of(LoadError, lambda: fsdp_flat.load_full(model, tmp_path / "dcp"))
    assert "but a checkpoint of torch.distributed.checkpoint. Load it by torch.distributed.checkpoint.load" in text
    if dist.get_rank() == 0:
        (tmp_path / "other").mkdir()
    dist.barrier()
    text = text_of(LoadError, lambda: fsdp_flat.load_full(model, tmp_path / "other"))
    assert "holds neither model.safetensors nor model.safetensors.index.json. " in f"{text} "


@on_ranks(2)
def test_load_full_says_what_a_name_on_a_hub_and_other_files_need(tmp_path: Path, rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    text = text_of(LoadError, lambda: fsdp_flat.load_full(model, "some-owner/Some-Model-8B"))
    assert "huggingface_hub.snapshot_download('some-owner/Some-Model-8B')" in text
    assert "huggingface_hub" not in text_of(LoadError, lambda: fsdp_flat.load_full(model, tmp_path / "nowhere"))
    if rank == 0:
        torch.save({}, tmp_path / "pytorch_model.bin")
    dist.barrier()
    text = text_of(LoadError, lambda: fsdp_flat.load_full(model, tmp_path))
    assert f"but pytorch_model.bin. Load that file: load_full(model, {str(tmp_path / 'pytorch_model.bin')!r})" in text
    dist.barrier()
    if rank == 0:
        (tmp_path / "pytorch_model.bin").rename(tmp_path / "pytorch_model-00001-of-00002.bin")
    dist.barrier()
    text = text_of(LoadError, lambda: fsdp_flat.load_full(model, tmp_path))
    assert f"fsdp-flat convert {tmp_path} TARGET --to safetensors" in text
    dist.barrier()
    fsdp_flat.save_full(model, tmp_path / "hub")
    for options in ({}, {"strict": False}):
        text = text_of(
            LoadError, lambda options=options: fsdp_flat.load_full(model, tmp_path / "hub", prefix="mod", **options)
        )
        assert "No name begins with prefix='mod': there are 'first.weight'" in text
    text = text_of(OptionError, lambda: fsdp_flat.load_full(model, tmp_path / "hub", prefix="first", strict=False))
    assert "pass prefix='first.'" in text
    text = text_of(
        LoadError, lambda: fsdp_flat.load_full(shard(nn.Sequential(nn.Linear(3, 3)), by_blocks=False), tmp_path / "hub")
    )
    assert "load_full(..., strict=False) loads what fits" in text


# ------------------------------------------------------------------------------------------------ optimizers, options


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is there since torch 2.9")
@KINDS
@on_ranks(2)
def test_muon_on_local_shards_raises_our_error_when_it_is_built(orig: bool) -> None:
    """Torch's own error, about a number of dimensions, came first; groups and names are siblings."""
    model = shard(seeded(), use_orig_params=orig)
    matrices = [(name, param) for name, param in model.named_parameters() if "bias" not in name]
    for given in (
        [param for _, param in matrices],
        matrices,
        [{"params": [param for _, param in matrices]}],
        [{"params": (param for _, param in matrices), "lr": 0.1}],
        (param for _, param in matrices),
    ):
        text = text_of(UsageError, lambda given=given: torch.optim.Muon(given))
        assert text.startswith("Muon computes with full parameters, and it was given ")
        assert "fsdp_flat.MatrixOptimizer(model, Muon, ...)" in text
    plain = seeded()
    for given in ([plain.first.weight], [{"params": iter([plain.first.weight])}], [("w", plain.first.weight)]):
        assert len(torch.optim.Muon(given).param_groups[0]["params"]) == 1
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        torch.optim.Muon([plain.first.bias])
    torch.optim.Muon([param for name, param in fully().named_parameters() if "bias" not in name])


WRONG_OPTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "precision by name": (
        lambda: FSDP(seeded(), mixed_precision="bf16"),  # type: ignore[arg-type]
        "mixed_precision must be a MixedPrecision; got 'bf16'. For example "
        "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).",
    ),
    "precision as a dtype": (
        lambda: FSDP(seeded(), mixed_precision=torch.bfloat16),  # type: ignore[arg-type]
        "mixed_precision must be a MixedPrecision; got torch.bfloat16. For example ",
    ),
    "a dtype by name": (
        lambda: FSDP(seeded(), mixed_precision=fsdp_flat.MixedPrecision("bf16")),  # type: ignore[arg-type]
        "MixedPrecision.param_dtype must be a torch.dtype or None; got 'bf16'. For example param_dtype=torch.bfloat16.",
    ),
    "offload as a flag": (
        lambda: FSDP(seeded(), cpu_offload=True),  # type: ignore[arg-type]
        "cpu_offload must be a CPUOffload; got True. For example cpu_offload=CPUOffload(offload_params=True).",
    ),
    "a policy of precision by name": (
        lambda: fsdp_flat.fully_shard(seeded(), mp_policy="bf16"),  # type: ignore[arg-type]
        "mp_policy must be a MixedPrecisionPolicy; got 'bf16'. For example mp_policy=MixedPrecisionPolicy(",
    ),
    "a policy of offload as a flag": (
        lambda: fsdp_flat.fully_shard(seeded(), offload_policy=True),  # type: ignore[arg-type]
        "offload_policy must be an OffloadPolicy; got True. For example offload_policy=CPUOffloadPolicy().",
    ),
    "a text that says no": (
        lambda: FSDP(seeded(), use_orig_params="False"),  # type: ignore[arg-type]
        "use_orig_params must be True or False; got 'False', a text, which counts as True in Python.",
    ),
    "a text that says no in an option object": (
        lambda: FSDP(seeded(), cpu_offload=fsdp_flat.CPUOffload("no")),  # type: ignore[arg-type]
        "CPUOffload.offload_params must be True or False; got 'no'",
    ),
    "a text that says no in a config of state dicts": (
        lambda: FSDP.set_state_dict_type(
            shard(seeded()),
            fsdp_flat.StateDictType.FULL_STATE_DICT,
            fsdp_flat.FullStateDictConfig(rank0_only="0"),  # type: ignore[arg-type]
        ),
        "FullStateDictConfig.rank0_only must be True or False; got '0'",
    ),
    "a text that says no in a switch": (
        lambda: fully().set_requires_gradient_sync("off"),
        "requires_gradient_sync must be True or False; got 'off'",
    ),
    "an argument of the wrapper": (
        lambda: fsdp_flat.fully_shard(seeded(), sharding_strategy="FULL_SHARD"),  # type: ignore[call-overload]
        "fully_shard has no argument 'sharding_strategy'; it takes module, mesh, reshard_after_forward, ",
    ),
    "an argument of fully_shard": (
        lambda: FSDP(seeded(), mesh=None),  # type: ignore[call-arg]
        "FullyShardedDataParallel has no argument 'mesh'; it takes module, process_group, ",
    ),
    "a mesh by shape": (
        lambda: fsdp_flat.fully_shard(seeded(), mesh=(2,)),  # type: ignore[arg-type]
        "mesh must be a DeviceMesh; got (2,). For example mesh=torch.distributed.device_mesh.init_device_mesh(",
    ),
}


@pytest.mark.parametrize("which", WRONG_OPTIONS)
@on_ranks(2)
def test_an_option_of_a_wrong_type_is_answered_with_an_example(which: str) -> None:
    """``mixed_precision="bf16"`` and ``cpu_offload=True`` name the class; now its use too."""
    call, wanted = WRONG_OPTIONS[which]
    assert text_of(OptionTypeError, call).startswith(wanted)


@on_ranks(2)
def test_a_text_that_says_yes_is_taken_as_on_fsdp1() -> None:
    assert isinstance(FSDP(seeded(), use_orig_params="True").module, nn.Module)  # type: ignore[arg-type]
