"""QLoRA: 4-bit weights of bitsandbytes, sharded beside peft's adapters: trained, saved, resumed, merged, exported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from bitsandbytes.nn import Linear4bit, Linear8bitLt, Params4bit
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Torchs
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from fsdp_flat import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    StateDictType,
    fully_shard,
    installed,
    iter_full_state_dict,
    load_checkpoint,
    load_full,
    save_checkpoint,
    save_full,
    unwrap,
)
from fsdp_flat.collectives import QuantizedAllGather, use_collectives
from fsdp_flat.errors import LoadError, OptionError, PeerFailureError
from fsdp_flat.tools.command import main
from fsdp_flat.wrap import ModuleWrapPolicy, _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
from tests.clients.kit import rank_environment, tokens
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.transport import rank_device

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages: merges that round, uses of torch
CONFIG: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
STORAGES = {"uint8": torch.uint8, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SIDES = pytest.mark.parametrize("side", ["originals", "flat", "fully_shard"])
# A flat parameter has one dtype, so the codes of a layer are stored in that of its norms.
EACH = [(side, storage) for side in ("originals", "flat", "fully_shard") for storage in STORAGES]
EVERY_STORAGE = pytest.mark.parametrize(("side", "storage"), [each for each in EACH if each != ("flat", "uint8")])
TWO_STORAGES = pytest.mark.parametrize(
    ("side", "storage"),
    [
        ("originals", "uint8"),
        ("originals", "bfloat16"),
        ("flat", "bfloat16"),
        ("flat", "float32"),
        ("fully_shard", "uint8"),
        ("fully_shard", "bfloat16"),
    ],
)


def quantized(folder: Path, storage: str = "uint8", *, seed: int = 0, nested: bool = True) -> Any:
    """Return a small Llama in 4 bits, read by ``from_pretrained`` from files in the folder."""
    path = folder / f"base{seed}"
    if dist.get_rank() == 0:
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(path)
    dist.barrier()
    way = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_quant_storage=STORAGES[storage],
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=way, dtype=torch.float32, device_map={"": rank_device()}
    )
    for module in model.model.layers.modules() if storage != "uint8" else ():
        if type(module).__name__ == "LlamaRMSNorm":
            module.to(STORAGES[storage])
    return model


def adapted(base: Any, seed: int = 3, **options: Any) -> Any:
    torch.manual_seed(seed)
    config = LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["q_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **options,
    )
    return get_peft_model(base, config)


def layers_of(model: Any) -> Any:
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).model.layers


def sharded(model: Any, side: str, mesh: DeviceMesh | None = None, dtype: torch.dtype | None = None) -> Any:
    layers = layers_of(model)
    if side == "fully_shard":
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    layer = partial(transformer_auto_wrap_policy, transformer_layer_cls={type(layers[0])})
    # As peft's own policy: what is trained is in units of its own.
    trained = partial(lambda_auto_wrap_policy, lambda_fn=is_trained_leaf)
    return FullyShardedDataParallel(
        model,
        process_group=None if mesh is None else mesh.get_group(),
        auto_wrap_policy=partial(_or_policy, policies=[layer, trained] if side == "flat" else [layer]),
        use_orig_params=side == "originals",
        device_id=rank_device(),
        mixed_precision=None if dtype is None else MixedPrecision(param_dtype=dtype),
    )


def is_trained_leaf(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return not list(module.children()) and weight is not None and weight.requires_grad


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.05)


def loss_of(model: Any, step: int, part: int) -> torch.Tensor:
    """Return a loss in training mode: in evaluation an unsharded 4-bit layer computes in bf16 on some CPUs."""
    model.train()
    ids = tokens()[(4 * step + 2 * part) % 12 :][:2]
    return model(input_ids=ids, labels=ids).loss


def trained(model: Any, optimizer: torch.optim.Optimizer, *steps: int, part: int) -> list[float]:
    """Train a sharded model on this rank's part of the batches, and return the losses."""
    losses = []
    for step in steps:
        loss = loss_of(model, step, part)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained_alone(model: Any, *steps: int, num_ranks: int) -> list[float]:
    """Train a model that is not sharded on all batches, and return the losses of this rank's."""
    optimizer, losses = optimizer_of(model), []
    for step in steps:
        parts = [loss_of(model, step, part) for part in range(num_ranks)]
        torch.stack(parts).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(parts[dist.get_rank()].item())
    return losses


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def full_state(model: Any, side: str) -> dict[str, torch.Tensor]:
    if side == "fully_shard":
        return {name: full(value) for name, value in model.state_dict().items()}
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


@EVERY_STORAGE
@on_ranks(2, 4)
def test_adapters_beside_4_bit_weights_train_as_without_sharding(
    storage: str, side: str, num_ranks: int, tmp_path: Path
) -> None:
    plain = adapted(quantized(tmp_path, storage))
    model = sharded(adapted(quantized(tmp_path, storage)), side)
    found = trained(model, optimizer_of(model), 0, 1, 2, part=dist.get_rank())
    assert_close(found, trained_alone(plain, 0, 1, 2, num_ranks=num_ranks), rtol=2e-5, atol=1e-6)
    codes = sum(each.numel() * each.itemsize for each in plain.parameters() if isinstance(each, Params4bit))
    assert codes > 0
    if side == "fully_shard":
        own = [each for each in model.parameters() if hasattr(each, "quant_state")]
        assert sum(each.to_local().nbytes for each in own) == codes / num_ranks


@pytest.mark.parametrize("side", ["originals", "fully_shard"])
@on_ranks(2)
def test_codes_in_floating_point_tensors_are_not_cast_by_mixed_precision(side: str, tmp_path: Path) -> None:
    losses = {}
    for storage in STORAGES:
        model = quantized(tmp_path, storage)
        model = sharded(adapted(model), side, dtype=torch.bfloat16)
        losses[storage] = trained(model, optimizer_of(model), 0, 1, part=dist.get_rank())
        assert_equal(losses[storage], losses["uint8"], what=storage)


@on_ranks(2)
def test_a_flat_parameter_that_would_be_cast_holds_no_codes(tmp_path: Path) -> None:
    """On FSDP1 the codes are cast, and the model is another one."""
    with pytest.raises((OptionError, PeerFailureError), match="quantized"):
        sharded(adapted(quantized(tmp_path, "float32")), "flat", dtype=torch.bfloat16)


@TWO_STORAGES
@on_ranks(2, 4)
def test_a_state_dict_has_the_names_and_values_of_the_unsharded_model(storage: str, side: str, tmp_path: Path) -> None:
    plain = adapted(quantized(tmp_path, storage))
    expected = {name: value.detach().clone() for name, value in plain.state_dict().items()}
    assert any(name.endswith("weight.quant_state.bitsandbytes__nf4") for name in expected)
    model = sharded(adapted(quantized(tmp_path, storage)), side)
    assert_equal(dict(iter_full_state_dict(model, dst=None)), expected)
    if side == "fully_shard":
        # As on FSDP2: torch's functions read a dict with names of no parameter in some ways only.
        expected = {name: value for name, value in expected.items() if name in dict(plain.named_parameters())}
        assert_equal(full_state(model, side), expected)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
        whole = get_model_state_dict(model, options=options)
        assert_equal({name: value.detach() for name, value in whole.items()}, expected if whole else {})
        set_model_state_dict(model, whole, options=options)
        assert_equal(full_state(model, side), expected)
        return
    assert_equal(full_state(model, side), expected)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        parts = model.state_dict()
        assert parts.keys() == expected.keys()
        model.load_state_dict(parts)
    assert_equal(full_state(model, side), expected)


@TWO_STORAGES
@on_ranks(2)
def test_a_load_brings_the_constants_of_another_base(storage: str, side: str, tmp_path: Path) -> None:
    other = adapted(quantized(tmp_path, storage, seed=1), seed=4)
    state = {name: value.detach().clone() for name, value in other.state_dict().items()}
    model = sharded(adapted(quantized(tmp_path, storage)), side)
    if side == "fully_shard":
        model.load_state_dict(state)
    else:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            model.load_state_dict(state)
    found = full_state(model, side)
    assert_equal(found, {name: value for name, value in state.items() if name in found})
    assert_close(loss_of(model, 0, 0), loss_of(other, 0, 0), rtol=1e-5, atol=1e-6)


@SIDES
@on_ranks(2)
def test_a_load_of_a_base_that_was_quantized_in_another_way_says_so_and_changes_nothing(
    side: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "saved", sharded(adapted(quantized(tmp_path, "bfloat16", seed=1, nested=False)), side))
    model = sharded(adapted(quantized(tmp_path, "bfloat16")), side)
    before = full_state(model, side)
    with pytest.raises((LoadError, PeerFailureError, RuntimeError), match="absmax"):
        load_checkpoint(tmp_path / "saved", model)
    assert_equal(full_state(model, side), before)


def mesh_of(num_ranks: int) -> DeviceMesh:
    """Return a mesh of this rank and others, as many as given; of four ranks there may be two such meshes."""
    whole = init_device_mesh(rank_device().type, (4 // num_ranks, num_ranks), mesh_dim_names=("others", "own"))
    return whole["own"]


@SIDES
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (4, 1)])
@on_ranks(4)
def test_training_goes_on_at_another_number_of_ranks(side: str, before: int, after: int, tmp_path: Path) -> None:
    own = tmp_path / f"saved{dist.get_rank() // before}"
    mesh = mesh_of(before)
    model = sharded(adapted(quantized(tmp_path, "bfloat16")), side, mesh)
    optimizer = optimizer_of(model)
    trained(model, optimizer, 0, 1, part=0)
    save_checkpoint(own, model, optimizer)
    state, going_on = full_state(model, side), trained(model, optimizer, 2, part=0)
    dist.barrier()
    again = sharded(adapted(quantized(tmp_path, "bfloat16", seed=1), seed=5), side, mesh_of(after))
    loaded = optimizer_of(again)
    load_checkpoint(tmp_path / "saved0", again, loaded)
    assert_equal(full_state(again, side), state)
    assert_close(trained(again, loaded, 2, part=0), going_on, rtol=1e-5, atol=1e-6)


@TWO_STORAGES
@on_ranks(2)
def test_adapters_are_written_as_peft_reads_them_on_a_4_bit_base(storage: str, side: str, tmp_path: Path) -> None:
    plain = adapted(quantized(tmp_path, storage))
    model = sharded(adapted(quantized(tmp_path, storage)), side)
    trained_alone(plain, 0, num_ranks=2)
    trained(model, optimizer_of(model), 0, part=dist.get_rank())
    save_full(model, tmp_path / "adapters", trainable_only=True)
    read = PeftModel.from_pretrained(quantized(tmp_path, storage), tmp_path / "adapters")
    expected = get_peft_model_state_dict(plain)
    assert_close(get_peft_model_state_dict(read), expected, rtol=1e-4, atol=1e-6)
    assert_close(loss_of(read, 1, 0), loss_of(plain, 1, 0), rtol=1e-5, atol=1e-6)
    other = sharded(adapted(quantized(tmp_path, storage), seed=6), side)
    load_full(other, tmp_path / "adapters", strict=False)
    assert_close(loss_of(other, 1, 0), loss_of(plain, 1, 0), rtol=1e-5, atol=1e-6)


@TWO_STORAGES
@on_ranks(2)
def test_an_unwrapped_model_is_merged_by_peft_and_read_by_transformers(storage: str, side: str, tmp_path: Path) -> None:
    plain = adapted(quantized(tmp_path, storage))
    model = unwrap(sharded(adapted(quantized(tmp_path, storage)), side))
    assert {type(each) for each in model.parameters()} == {type(each) for each in plain.parameters()}
    merged, expected = model.merge_and_unload(), plain.merge_and_unload()
    assert_equal(dict(merged.state_dict()), dict(expected.state_dict()))
    own = tmp_path / "merged"
    merged.save_pretrained(own)  # by rank 0
    dist.barrier()
    read = AutoModelForCausalLM.from_pretrained(own, device_map={"": rank_device()})
    assert any(isinstance(each, Params4bit) for each in read.parameters())
    assert_equal(dict(read.state_dict()), dict(expected.state_dict()))
    whole = merged.dequantize(dtype=torch.float32)
    whole.save_pretrained(own / "whole")
    dist.barrier()
    assert not any(isinstance(each, Params4bit) for each in whole.parameters())
    again = AutoModelForCausalLM.from_pretrained(own / "whole")
    assert_close(loss_of(again, 0, 0), loss_of(expected, 0, 0), rtol=1e-3, atol=1e-3)


@TWO_STORAGES
@on_ranks(2)
def test_a_quantized_base_is_written_as_transformers_reads_it(storage: str, side: str, tmp_path: Path) -> None:
    plain = quantized(tmp_path, storage)
    base = quantized(tmp_path, storage)
    model = base if side == "flat" else sharded(base, side)
    if side == "flat":
        base.requires_grad_(False)
        for layer in base.model.layers:
            for name in ("self_attn", "mlp"):
                setattr(layer, name, FullyShardedDataParallel(getattr(layer, name), use_orig_params=False))
    save_full(model, tmp_path / "saved")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", device_map={"": rank_device()})
    assert_equal(dict(read.state_dict()), dict(plain.state_dict()))
    other = sharded(quantized(tmp_path, storage, seed=1), "originals" if side == "flat" else side)
    assert load_full(other, tmp_path / "saved") == ([], [])
    assert_close(loss_of(other, 0, 0), loss_of(plain, 0, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("side", ["originals", "fully_shard"])
@on_ranks(2)
def test_a_file_in_another_dtype_has_the_codes_and_constants_as_they_are(side: str, tmp_path: Path) -> None:
    save_full(sharded(quantized(tmp_path, "float32"), side), tmp_path / "saved", dtype=torch.bfloat16)
    found = load_file(tmp_path / "saved" / "model.safetensors")
    plain = quantized(tmp_path, "float32").state_dict()
    for name, value in plain.items():
        is_number = "proj" not in name
        assert found[name].dtype == (torch.bfloat16 if is_number else value.dtype), name
        assert torch.equal(found[name].view(torch.uint8), value.to(found[name].dtype).view(torch.uint8)), name


@pytest.mark.parametrize("side", ["originals", "fully_shard"])
@on_ranks(2)
def test_codes_that_are_stored_in_another_dtype_are_not_loaded(side: str, tmp_path: Path) -> None:
    saved = sharded(quantized(tmp_path, "bfloat16"), side)
    save_checkpoint(tmp_path / "checkpoint", saved)
    if dist.get_rank() == 0:
        convert = ["convert", str(tmp_path / "checkpoint"), str(tmp_path / "converted"), "--to", "safetensors"]
        assert main([*convert, "--dtype", "float16"]) != 0
        assert main(convert) == 0
    save_full(saved, tmp_path / "full")
    state = dict(iter_full_state_dict(saved, dst=None))
    model = sharded(quantized(tmp_path, "float16", seed=1), side)
    before = full_state(model, side)
    words = r"codes .*in torch\.bfloat16 .*in torch\.float16 in the model"
    with pytest.raises((LoadError, PeerFailureError), match=words):
        load_checkpoint(tmp_path / "checkpoint", model)
    with pytest.raises((LoadError, PeerFailureError), match=words):
        load_full(model, tmp_path / "full")
    assert_equal(full_state(model, side), before)
    with pytest.raises(RuntimeError, match=words):
        model.load_state_dict(state)
    if side == "originals":  # as in torch, fully_shard loads what fits
        assert_equal(full_state(model, side), before)


@pytest.mark.parametrize("side", ["originals", "fully_shard"])
@on_ranks(2)
def test_layers_evaluate_and_train_on_afterwards(side: str, tmp_path: Path) -> None:
    """On CPUs with AVX512-BF16 bitsandbytes repacks a weight in evaluation, and notes it in the shared constants."""
    model = sharded(adapted(quantized(tmp_path)), side)
    plain = adapted(quantized(tmp_path))
    for module in plain.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    for each in (model.eval(), plain.eval()):
        with torch.no_grad():
            each(input_ids=tokens()[:2])
    optimizer = optimizer_of(model.train())
    found = trained(model, optimizer, 0, 1, part=dist.get_rank())
    assert_close(found, trained_alone(plain.train(), 0, 1, num_ranks=2), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("side", ["originals", "fully_shard"])
@on_ranks(2)
def test_dora_on_4_bit_weights_trains_as_without_sharding(side: str, tmp_path: Path) -> None:
    """Its forward looks at the class of the base weight, and at its constants."""
    plain = adapted(quantized(tmp_path), use_dora=True)
    model = sharded(adapted(quantized(tmp_path), use_dora=True), side)
    found = trained(model, optimizer_of(model), 0, 1, part=dist.get_rank())
    assert_close(found, trained_alone(plain, 0, 1, num_ranks=2), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("side", ["originals", "fully_shard"])
@on_ranks(2)
def test_a_frozen_bias_that_its_layer_casts_is_no_change_of_a_weight(side: str) -> None:
    """A 4-bit layer casts its bias to the dtype of compute for good, by an assignment to ``.data``."""
    torch.manual_seed(0)
    layer = Linear4bit(64, 64, compute_dtype=torch.bfloat16).to("cpu").requires_grad_(False)
    model: Any = nn.Sequential(nn.Linear(64, 64), layer)
    assert layer.bias.dtype == torch.float32
    if side == "originals":
        model = FullyShardedDataParallel(model, use_orig_params=True)
    else:
        fully_shard(model)
    batch = torch.randn(2, 64)
    outputs = [model(batch) for _ in range(2)]
    outputs[-1].sum().backward()
    assert_equal(outputs[0].detach(), outputs[1].detach())


@pytest.mark.parametrize("side", ["originals", "fully_shard"])
@on_ranks(2)
def test_torchs_fsdp_trains_with_the_same_losses(side: str, tmp_path: Path) -> None:
    losses = []
    for ours in (True, False):
        # FSDP1 takes one dtype for all parameters of a unit.
        model = adapted(quantized(tmp_path, "float32" if side == "originals" else "bfloat16"))
        if ours:
            model = sharded(model, side)
        elif side == "originals":
            policy = ModuleWrapPolicy({type(layers_of(model)[0])})
            model = Torchs(model, auto_wrap_policy=policy, use_orig_params=True, device_id=rank_device())
        else:
            for layer in layers_of(model):
                torchs_fully_shard(layer)
            torchs_fully_shard(model)
        losses.append(trained(model, optimizer_of(model), 0, 1, 2, part=dist.get_rank()))
    assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("keeps", ["parameter", "layer", "emptied layer"])
@on_ranks(2)
def test_codes_of_rank_zero_reach_ranks_whose_weights_are_on_the_meta_device(
    keeps: str, use_orig_params: bool, rank: int
) -> None:
    """As QLoRA on FSDP1 was first published: a weight that leaves the meta device loses its class and its constants.

    They are found where the weight on the meta device has them, or its layer.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Linear4bit(64, 64, bias=False, quant_storage=torch.float32)).to("cpu")
    x, layer = torch.ones(2, 64), model[1]
    expected, state, codes = model(x).detach(), layer.weight.quant_state, layer.weight.data.clone()
    layer.quant_state = None if keeps == "parameter" else state
    init = None
    if rank:
        options = {} if keeps == "layer" else {"quant_state": state, "bnb_quantized": True}
        layer.weight = Params4bit(codes.to("meta"), requires_grad=False, quant_storage=torch.float32, **options)
        with torch.no_grad():
            state.absmax.zero_()
        if keeps == "emptied layer":
            layer.to_empty(device="cpu")
        else:
            model[0].to("meta")
            init = partial(nn.Module.to_empty, device="cpu", recurse=False)
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
        sync_module_states=True,
        param_init_fn=init,
    )
    assert torch.equal(model(x), expected)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        found = model.state_dict()
    assert torch.equal(found["1.weight"], codes)
    assert found["1.weight.absmax"].count_nonzero()


@pytest.mark.parametrize("side", ["originals", "fully_shard"])
@on_ranks(2)
def test_an_all_gather_in_fewer_bits_takes_codes_that_are_integers_alone(side: str, tmp_path: Path) -> None:
    model = sharded(adapted(quantized(tmp_path, "bfloat16")), side)
    with pytest.raises(OptionError, match=r"4-bit codes in torch\.bfloat16.*torch\.uint8"):
        use_collectives(model, all_gather=QuantizedAllGather())
    with pytest.raises(OptionError, match="param_dtype_between_hosts"):
        use_collectives(model, param_dtype_between_hosts=torch.int8)
    model = sharded(adapted(quantized(tmp_path, "uint8")), side)
    exact = loss_of(model, 0, 0).item()
    use_collectives(model, all_gather=QuantizedAllGather(dtype=torch.bfloat16))
    assert loss_of(model, 0, 0).item() == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@on_ranks(2)
def test_accelerate_trains_saves_and_loads(kind: str, version: int, tmp_path: Path, rank: int) -> None:
    """With version 2 it calls torch's functions, which read no names that are of no parameter and no buffer."""
    expected = trained_alone(adapted(quantized(tmp_path, "float32")), 0, 1, 2, num_ranks=2)
    own = {"use_orig_params": True, "reshard_after_forward": "FULL_SHARD"} if version == 1 else {}
    with rank_environment(), installed(version == 2):
        AcceleratorState._reset_state(reset_partial_state=True)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            state_dict_type=kind,
            cpu_ram_efficient_loading=False,
            **own,
        )
        accelerator = Accelerator(fsdp_plugin=plugin)
        model = adapted(quantized(tmp_path, "float32"))
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        assert_close(trained(model, optimizer, 0, 1, 2, part=rank), expected, rtol=1e-5, atol=1e-6)
        accelerator.save_state(str(tmp_path / "state"))
        after = loss_of(model, 3, rank).item()
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.zero_()
        assert loss_of(model, 3, rank).item() != after
        accelerator.load_state(str(tmp_path / "state"))
        assert loss_of(model, 3, rank).item() == after
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("side", ["originals", "fully_shard"])
@on_ranks(2)
def test_8_bit_weights_train_and_are_saved_though_each_layer_keeps_its_codes(side: str, tmp_path: Path) -> None:
    def base() -> Any:
        path = tmp_path / "base"
        if dist.get_rank() == 0:
            torch.manual_seed(0)
            LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(path)
        dist.barrier()
        way = BitsAndBytesConfig(load_in_8bit=True)
        return adapted(AutoModelForCausalLM.from_pretrained(path, quantization_config=way, dtype=torch.float32))

    plain, model = base(), sharded(base(), side)
    expected = {name: value.detach().clone() for name, value in plain.state_dict().items()}
    assert_equal(full_state(model, side), expected)
    found = trained(model, optimizer_of(model), 0, 1, 2, part=dist.get_rank())
    assert_close(found, trained_alone(plain, 0, 1, 2, num_ranks=2), rtol=2e-5, atol=1e-6)
    layers = [each for each in model.modules() if isinstance(each, Linear8bitLt) and hasattr(each, "state")]
    assert layers
    assert all(each.state.CB.shape == (each.out_features, each.in_features) for each in layers)
