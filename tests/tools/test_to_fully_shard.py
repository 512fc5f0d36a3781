"""``fsdp-flat to-fully-shard``: rewritten programs compute the same; what is not sure stays, with a reason."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("libcst", reason="the migration tool needs it")

import fsdp_flat
from fsdp_flat.tools.to_fully_shard import rewrite_files
from tests.support import on_ranks
from tests.support.peer import mend_peer
from tests.support.scripts import SCRIPTS, assert_equal_losses, run_script
from tests.tools.conftest import Run, RunJson

HEAD = """\
import contextlib
import functools

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.register_buffer("scale", torch.full((width,), 1.001))

    def forward(self, x):
        return x + self.mlp(self.norm(x)) * self.scale


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), Block(10), Block(10), Block(10), nn.Linear(10, 3))


def is_block(module):
    return isinstance(module, Block)


def batch(step):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


"""
STEPS = """

def steps(model, optimizer, start, stop):
    losses = []
    for step in range(start, stop):
        loss = model(batch(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
"""
TRAIN = """

def train(folder):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = steps(model, optimizer, 0, 4)
    return losses, model.state_dict()
"""
CPU = 'device_id=torch.device("cpu")'
WRAPPING = {
    "class": f"""\
def build():
    return FSDP(plain(), auto_wrap_policy=ModuleWrapPolicy({{Block}}), use_orig_params=True, {CPU})
""",
    "flat": f"""\
def build():
    model = plain()
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy([Block, nn.LayerNorm]), {CPU})
    return model
""",
    "transformer": f"""\
def build():
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={{Block}})
    strategy = ShardingStrategy.SHARD_GRAD_OP
    model = FSDP(plain(), strategy_of(), auto_wrap_policy=policy, {CPU})
    return model


def strategy_of():
    return None
""".replace("strategy_of(), ", "sharding_strategy=strategy, "),
    "size": f"""\
def build():
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=400)
    model = FSDP(plain(), auto_wrap_policy=policy, use_orig_params=True, sync_module_states=True, {CPU})
    return model
""",
    "lambda": f"""\
def build():
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_block)
    model = FSDP(plain(), auto_wrap_policy=policy, cpu_offload=CPUOffload(offload_params=True), {CPU})
    return model
""",
    "one unit": f"""\
def build():
    return FSDP(plain(), limit_all_gathers=True, forward_prefetch=True, {CPU})
""",
    "by hand": f"""\
def build():
    model = plain()
    for name in ("1", "2"):
        setattr(model, name, FSDP(getattr(model, name), {CPU}))
    return FSDP(model, {CPU})
""",
    "mixed": f"""\
half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)


def build():
    model = FSDP(plain(), auto_wrap_policy=ModuleWrapPolicy({{Block}}), mixed_precision=half, {CPU})
    return model
""",
    "mixed everywhere": f"""\
def build():
    model = FSDP(
        plain(),
        auto_wrap_policy=ModuleWrapPolicy({{Block}}),
        mixed_precision=MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16, cast_forward_inputs=True),  # all
        {CPU},
    )
    return model
""",
}
BUILD = WRAPPING["class"]
STEP_OF = {
    "accumulation": """
        for part in range(3):
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                loss = model(batch(3 * step + part)).square().mean() / 3
                loss.backward()
""",
    "accumulation through a name": """
        for part in range(2):
            context = contextlib.nullcontext() if part == 1 else model.no_sync()
            with context:
                loss = model(batch(3 * step + part)).square().mean() / 2
                loss.backward()
""",
    "plain accumulation": """
        with model.no_sync():
            model(batch(3 * step)).square().mean().backward()
        loss = model(batch(3 * step + 1)).square().mean()
        loss.backward()
""",
    "clipping": """
        loss = model(batch(step)).square().mean()
        loss.backward()
        norm = model.clip_grad_norm_(0.1)
        assert norm.item() > 0.1
        model.clip_grad_norm_(max_norm=0.05, norm_type=float("inf"))
""",
}
FULL = """

def train(folder):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = steps(model, optimizer, 0, 3)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    optim_config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config, optim_config):
        state = model.state_dict()
        optim_state = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(state, folder / "model.pt")
        torch.save(optim_state, folder / "optim.pt")
    dist.barrier()
    return losses + resume(folder), state


def resume(folder):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        # every rank reads all of it
        model.load_state_dict(torch.load(folder / "model.pt"))
        flat = FSDP.optim_state_dict_to_load(model, optimizer, torch.load(folder / "optim.pt"))
        optimizer.load_state_dict(flat)
    return steps(model, optimizer, 3, 6)
"""
SHARDED = """

def train(folder):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = steps(model, optimizer, 0, 3)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder / "sharded")
    model, optimizer = resumed(folder)
    losses += steps(model, optimizer, 3, 6)
    return losses, model.state_dict()


def resumed(folder):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps(model, optimizer, 7, 8)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder / "sharded")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optim"]))
    return model, optimizer
"""
IN_A_CLASS = f"""\
class Trainer:
    def __init__(self):
        self.model = FSDP(plain(), auto_wrap_policy=ModuleWrapPolicy({{Block}}), use_orig_params=True, {CPU})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, number, is_last):
        with contextlib.nullcontext() if is_last else self.model.no_sync():
            loss = self.model(batch(number)).square().mean()
            loss.backward()
        if is_last:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()


def train(folder):
    trainer = Trainer()
    losses = [trainer.step(number, number % 2 == 1) for number in range(6)]
    assert isinstance(trainer.model, FSDP)
    with FSDP.summon_full_params(trainer.model):
        return losses, {{name: value.clone() for name, value in trainer.model.named_parameters()}}
"""
PROGRAMS = {
    **{name: HEAD + build + STEPS + TRAIN for name, build in WRAPPING.items()},
    **{
        name: HEAD
        + BUILD
        + "\n\ndef steps(model, optimizer, start, stop):\n    losses = []\n    for step in range(start, stop):"
        + step
        + "        optimizer.step()\n        optimizer.zero_grad()\n        losses.append(loss.item())\n"
        + "    return losses\n"
        + TRAIN
        for name, step in STEP_OF.items()
    },
    "in a class": HEAD + IN_A_CLASS,
    "full checkpoint": HEAD + BUILD + STEPS + FULL,
    "sharded checkpoint": HEAD + BUILD + STEPS + SHARDED,
}


def rewritten(text: str, **others: str) -> tuple[str, list[str]]:
    """A program after the tool, and what it says of it."""
    files = {Path("train.py"): text.encode(), **{Path(f"{name}.py"): other.encode() for name, other in others.items()}}
    done = rewrite_files(files)
    first = done[Path("train.py")]
    return first.data.decode(), [f"{found.line} {found.kind} {found.text}" for found in first.findings]


def of_kind(findings: list[str], kind: str) -> list[str]:
    return [found for found in findings if found.split()[1] == kind]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rewritten_program_names_nothing_of_the_wrapper_and_a_second_run_changes_nothing(name: str) -> None:
    again, findings = rewritten(PROGRAMS[name])
    assert not of_kind(findings, "left")
    assert of_kind(findings, "changed")
    text = again.replace("FSDP.summon_full_params", "")  # takes models of both kinds
    for word in ("FSDP(", "FSDP.", "torch.distributed.fsdp", "no_sync", "model.clip_grad_norm_", "StateDictType."):
        assert word not in text
    assert rewritten(again) == (again, [])


@on_ranks(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_and_weights_of_a_rewritten_program_are_those_of_the_original(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    results = []
    for kind, text in (("before", program), ("after", rewritten(program)[0])):
        path = tmp_path / f"{kind}{dist.get_rank()}.py"
        path.write_text(text)
        folder = tmp_path / f"folder_{kind}"
        folder.mkdir(exist_ok=True)
        with fsdp_flat.installed():
            results.append(run_script(path, "train", folder))
    (losses, state), (new_losses, new_state) = results
    assert len(set(losses)) == len(losses) > 3
    # The norm adds its squares by parameter instead of by flat parameter, which rounds differently.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if name == "clipping" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(new_losses, losses, **tolerance)
    assert new_state.keys() == state.keys(), name
    for key, value in state.items():
        assert type(new_state[key]) is torch.Tensor
        # Buffers that were converted are the only values with another dtype.
        if new_state[key].dtype != value.dtype:
            assert name.startswith("mixed")
            assert key.endswith("scale")
        else:
            torch.testing.assert_close(new_state[key], value, **tolerance)


@on_ranks(2)
def test_scripts_written_for_torchs_fsdp1_give_its_losses_after_the_rewrite(tmp_path: Path) -> None:
    mend_peer()
    original = SCRIPTS / "train_sharded_checkpoint.py"
    ours = tmp_path / f"sharded{dist.get_rank()}.py"
    ours.write_text(rewritten(original.read_text())[0])
    expected = run_script(original, "train", str(tmp_path / "original"))
    assert_equal_losses(run_script(ours, "train", str(tmp_path / "ours")), expected)
    # Files from before the change load after it.
    assert_equal_losses(run_script(ours, "resumed", str(tmp_path / "original"), torch.device("cpu")), expected[3:])

    original = SCRIPTS / "train_tutorial.py"
    ours = tmp_path / f"tutorial{dist.get_rank()}.py"
    ours.write_text(rewritten(original.read_text())[0])
    parse = runpy.run_path(str(original))["parse"]
    ranks = dist.get_rank(), dist.get_world_size()
    losses = [
        run_script(script, "train", *ranks, parse(["--save", str(tmp_path / f"{script.stem[:5]}.pt")]))
        for script in (original, ours)
    ]
    assert_equal_losses(losses[1], losses[0])
    if dist.get_rank() == 0:
        saved = [torch.load(tmp_path / f"{name}.pt") for name in ("train", "tutor")]
        torch.testing.assert_close(saved[1], saved[0], rtol=1e-4, atol=1e-6)


WRAP = "from fsdp_flat import FullyShardedDataParallel as FSDP\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "m = FSDP(n, process_group=g)\n",
            "2 left FSDP(n, process_group=g): process_group: pass a device_mesh instead",
        ),
        ("m = FSDP(n, **options)\n", "2 left FSDP(n, **options): arguments are passed by * or **"),
        ("m = FSDP(n, auto_wrap_policy=policy())\n", "the policy `policy()` is not known here"),
        ("m = FSDP(n, param_init_fn=f)\n", "param_init_fn: call to_empty"),
        ("m = FSDP(n, mixed_precision=p)\n", "the value of mixed_precision, `p`, is not known here"),
        ("from fsdp_flat import ShardingStrategy as S\nm = FSDP(n, None, S.NO_SHARD)\n", "use DistributedDataParallel"),
        ("from fsdp_flat import ShardingStrategy as S\nm = FSDP(n, None, S.HYBRID_SHARD)\n", "without device_mesh"),
        ("m = FSDP(n)\nFSDP.fsdp_modules(m)\n", "3 left FSDP.fsdp_modules(m): fsdp_modules has no counterpart"),
        ("m = FSDP(n)\nwith m.no_sync(mode='sharded'):\n    pass\n", "no_sync with arguments"),
        ("m = FSDP(n)\nstack.enter_context(m.no_sync())\n", "no_sync outside of a `with` statement"),
        (
            "from fsdp_flat import StateDictType\nm = FSDP(n)\n"
            "with FSDP.state_dict_type(m, StateDictType.LOCAL_STATE_DICT):\n    m.state_dict()\n",
            "state dicts of type `LOCAL_STATE_DICT`",
        ),
        (
            "from fsdp_flat import StateDictType\ndef save(): pass\nm = FSDP(n)\n"
            "with FSDP.state_dict_type(m, StateDictType.FULL_STATE_DICT):\n    save()\n",
            "its block calls save, whose state dicts it may change too",
        ),
        ("m = FSDP(n)\nm.apply(f)\n", "apply of the wrapper has no counterpart, or does something else"),
        ("m = FSDP(n)\nm.module = k\n", "the inner module is assigned"),
        ("m = FSDP(n)\nm.module.state_dict()\n", "the inner module is assigned, or asked for its own state dict"),
        ("m = FSDP(n)\nclass fully_shard: pass\n", "the name fully_shard means something else here"),
        (
            "from fsdp_flat import StateDictType\nm = FSDP(n)\n"
            "with FSDP.state_dict_type(m, StateDictType.FULL_STATE_DICT):\n    library.save(m)\n",
            "its block calls library.save, whose state dicts it may change too",
        ),
        ("wrap_all(n, FSDP)\n", "2 left FSDP: the wrapper class is used as a value"),
        (
            "from accelerate import FullyShardedDataParallelPlugin as Plugin\na = Plugin()\n",
            "3 left Plugin(): change it by hand, or its settings in a file",
        ),
        (
            "from lightning.pytorch.strategies import FSDPStrategy\na = FSDPStrategy()\n",
            "3 left FSDPStrategy(): change it by hand, or its settings in a file",
        ),
        (
            "from fsdp_flat import MixedPrecision\ndtype = torch.bfloat16\np = MixedPrecision(param_dtype=dtype)\n"
            "def build(dtype):\n    return FSDP(n, mixed_precision=p)\n",
            "`dtype` is bound in several places",
        ),
        (
            "from fsdp_flat.wrap import ModuleWrapPolicy\nkinds = {Block}\nkinds.add(Other)\n"
            "m = FSDP(n, auto_wrap_policy=ModuleWrapPolicy(kinds))\n",
            "the classes of the policy, `kinds`, may be changed later",
        ),
        ("m = FSDP(n)\ncontext = m.no_sync if micro else nullcontext\n", "3 left m.no_sync: no_sync of the wrapper"),
        ("m = FSDP(n)\nget = m.state_dict\n", "3 left m.state_dict: state_dict of the wrapper"),
        (
            "from fsdp_flat import StateDictType\nm = FSDP(n)\nwhole = m.state_dict()\n"
            "FSDP.set_state_dict_type(m, StateDictType.SHARDED_STATE_DICT)\n",
            "4 left m.state_dict(): a state dict before set_state_dict_type",
        ),
        (
            "from fsdp_flat import StateDictType\nm = FSDP(n)\n"
            "before = FSDP.set_state_dict_type(m, StateDictType.SHARDED_STATE_DICT)\n",
            "the settings that set_state_dict_type returns get a name",
        ),
        (
            "from fsdp_flat import StateDictType\nm = FSDP(n)\n"
            "with FSDP.state_dict_type(m, StateDictType.FULL_STATE_DICT):\n    saver.save()\n",
            "its block calls saver.save, whose state dicts it may change too",
        ),
        (
            "from fsdp_flat import StateDictType\nm = FSDP(n)\n"
            "with FSDP.state_dict_type(m, StateDictType.FULL_STATE_DICT):\n    torch.save({'model': m}, 'm.pt')\n",
            "its block calls torch.save, whose state dicts it may change too",
        ),
    ],
)
def test_what_is_not_sure_stays_with_its_line_and_the_reason(text: str, reason: str) -> None:
    after, findings = rewritten(WRAP + text)
    assert after == WRAP + text
    assert [found for found in of_kind(findings, "left") if reason in found]


@pytest.mark.parametrize("name", ["torch_model", "schema_model", "optimized_model", "remaining"])
def test_a_model_whose_name_has_the_name_of_something_else_in_it_is_reported(name: str) -> None:
    _, findings = rewritten(WRAP + f"m = FSDP(n)\ndef save({name}):\n    return {name}.state_dict()\n")
    assert of_kind(findings, "left") == [f"4 left {name}.state_dict(): whether this is a wrapped model is not sure"]


def test_what_an_unread_name_is_assigned_goes_only_if_nothing_else_happens_there() -> None:
    after, _ = rewritten(WRAP + "device = init_distributed()\nm = FSDP(n, device_id=device)\n")
    assert "device = init_distributed()\n" in after
    assert "m = fully_shard(n)\n" in after
    listed = rewritten(WRAP + "m = FSDP(n)\n__all__ = ['FSDP', 'm']\n")[0]
    assert "FullyShardedDataParallel as FSDP" in listed


def test_code_of_one_model_is_rewritten_as_a_whole_or_not_at_all() -> None:
    text = WRAP + "a = FSDP(n)\nb = FSDP(k)\na.clip_grad_norm_(1.0)\nFSDP.fsdp_modules(a)\nb.clip_grad_norm_(2.0)\n"
    after, findings = rewritten(text)
    assert "a = FSDP(n)" in after
    assert "\na.clip_grad_norm_(1.0)" in after
    assert "b = fully_shard(k)" in after
    assert "clip_grad_norm_(b.parameters(), 2.0)" in after
    assert "2 left FSDP(n): other code of this model stays" in findings


def test_a_model_that_may_be_another_ones_is_reported_and_stays() -> None:
    text = WRAP + "m = FSDP(n)\ndef save(model, optimizer):\n    return model.state_dict(), optimizer.state_dict()\n"
    after, findings = rewritten(text)
    assert "return model.state_dict(), optimizer.state_dict()" in after
    assert of_kind(findings, "left") == ["4 left model.state_dict(): whether this is a wrapped model is not sure"]
    conditional = WRAP + "m = n\nif sharded:\n    m = FSDP(m)\nwith m.no_sync():\n    pass\n"
    assert of_kind(rewritten(conditional)[1], "left") == [
        "5 left m.no_sync(): whether this is a wrapped model is not sure"
    ]


def test_models_are_followed_through_functions_attributes_and_files() -> None:
    other = WRAP + "def save(model):\n    return FSDP.optim_state_dict(model, 0)\n"
    text = (
        WRAP
        + "class Trainer:\n    def __init__(self, model):\n        self.model = FSDP(model)\n\n"
        + "    def step(self):\n        self.model.clip_grad_norm_(1.0)\n        clip(self.model)\n"
        + "        return self.model.module.head\n\n\n"
        + "def clip(m):\n    if isinstance(m, FSDP):\n        m.clip_grad_norm_(2.0)\n"
    )
    done = rewrite_files({Path("a.py"): text.encode(), Path("b.py"): other.encode()})
    after = done[Path("a.py")].data.decode()
    for line in (
        "from fsdp_flat import FSDPModule, fully_shard\n",
        "        self.model = fully_shard(model)\n",
        "        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)\n",
        "        return self.model.head\n",
        "    if isinstance(m, FSDPModule):\n",
    ):
        assert line in after
    assert "get_optimizer_state_dict(model, 0, options=StateDictOptions(full_state_dict=True))" in (
        done[Path("b.py")].data.decode()
    )


def test_every_byte_outside_of_the_changes_stays() -> None:
    text = (
        "# -*- coding: latin-1 -*-\r\n"
        + WRAP.replace("\n", "\r\n")
        + "x = {  1:2 ,\r\n\t3 : '\xe9' }  # odd\r\nm = FSDP( n )  # kept\r\n"
    )
    data = text.encode("latin-1")
    after = rewrite_files({Path("a.py"): data})[Path("a.py")].data
    assert after == data.replace(b"FullyShardedDataParallel as FSDP", b"fully_shard").replace(
        b"FSDP( n )", b"fully_shard(n)"
    )


def test_the_command_prints_a_patch_a_report_and_the_loss_check(tmp_path: Path, run: Run, run_json: RunJson) -> None:
    script = tmp_path / "train.py"
    script.write_text(WRAP + "m = FSDP(n)\nif __name__ == '__main__':\n    pass\n")
    before = script.read_text()
    status, found = run_json("to-fully-shard", tmp_path)
    assert (status, found["changed"], found["num_files"]) == (1, [str(script)], 1)
    assert "+m = fully_shard(n)" in found["patch"]
    assert {each["kind"] for each in found["findings"]} == {"changed", "differs"}
    assert f"torchrun --nproc-per-node 2 -m fsdp_flat.run {script}" in found["next"]
    assert script.read_text() == before
    status, text, errors = run("to-fully-shard", "--write", tmp_path)
    assert (status, text) == (0, "")
    assert "m = fully_shard(n)" in script.read_text()
    assert f"{script}:2: changed: FSDP(n)" in errors
    assert run("to-fully-shard", tmp_path)[0] == 0


def test_a_file_that_cannot_be_parsed_is_not_touched(tmp_path: Path, run: Run) -> None:
    script = tmp_path / "train.py"
    script.write_text(WRAP + "m = FSDP(\n")
    status, _, errors = run("to-fully-shard", "--write", tmp_path)
    assert (status, script.read_text()) == (2, WRAP + "m = FSDP(\n")
    assert "error: libcst cannot parse it" in errors


SETTINGS = """\
# of accelerate config
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_sharding_strategy: SHARD_GRAD_OP  # or FULL_SHARD
  # classes
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_use_orig_params: true
mixed_precision: 'no'
"""


def test_settings_of_accelerate_move_to_version_2() -> None:
    done = rewrite_files({Path("fsdp.yaml"): SETTINGS.encode()})[Path("fsdp.yaml")]
    assert (
        done.data.decode()
        == """\
# of accelerate config
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: false  # or FULL_SHARD
  # classes
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
mixed_precision: 'no'
"""
    )
    assert [found.kind for found in done.findings] == ["changed", "differs", "differs"]
    again = rewrite_files({Path("fsdp.yaml"): done.data})[Path("fsdp.yaml")]
    assert (again.data, again.findings) == (done.data, [])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("SHARD_GRAD_OP", "NO_SHARD", "the strategy NO_SHARD has no counterpart"),
        ("fsdp_use_orig_params: true", "fsdp_own: 3", "the setting own is not known"),
        ("_wrap: Block", "_wrap: [Block", "the file is not YAML"),
        ("_wrap: Block\n", "_wrap: &b Block\n  fsdp_state_dict_type: *b\n", "is an alias"),
        ("use_orig_params: true", "state_dict_type: LOCAL_STATE_DICT", "LOCAL_STATE_DICT"),
    ],
)
def test_settings_that_version_2_does_not_have_stay(old: str, new: str, reason: str) -> None:
    data = SETTINGS.replace(old, new).encode()
    done = rewrite_files({Path("fsdp.yaml"): data})[Path("fsdp.yaml")]
    assert done.data == data
    assert [(found.line, found.kind) for found in done.findings] == [(1 if "YAML" in reason else 3, "left")]
    assert reason in done.findings[0].text


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lists_quotes_anchors_and_comments_of_settings_stay(newline: str) -> None:
    """YAML is read by ruamel.yaml."""
    text = newline.join(
        [
            "fsdp_config:   # of ours",
            "    'fsdp_transformer_layer_cls_to_wrap':",
            "    - Block",
            '    - "Other: one"',
            "    fsdp_sharding_strategy: &kind 'FULL_SHARD'",
            "    fsdp_forward_prefetch: false",
            "    fsdp_offload_params: false   # no",
            "",
            "# the end",
            "mixed_precision: bf16",
        ]
    )
    done = rewrite_files({Path("fsdp.yaml"): text.encode()})[Path("fsdp.yaml")]
    expected = text.replace("fsdp_sharding_strategy: &kind 'FULL_SHARD'", "fsdp_reshard_after_forward: true")
    expected = expected.replace(f"    fsdp_forward_prefetch: false{newline}", "")
    added = f"    fsdp_state_dict_type: FULL_STATE_DICT{newline}    fsdp_version: 2{newline}"
    assert done.data.decode() == expected.replace(f"# no{newline}", f"# no{newline}{added}")
    assert [found.kind for found in done.findings] == ["changed", "differs", "differs", "differs"]


def test_without_ruamel_yaml_the_settings_stay_and_the_report_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    done = rewrite_files({Path("fsdp.yaml"): SETTINGS.encode()})[Path("fsdp.yaml")]
    assert done.data == SETTINGS.encode()
    assert "pip install ruamel.yaml" in done.findings[0].text


def test_arguments_of_the_trainer_move_to_version_2() -> None:
    text = (
        "from transformers import TrainingArguments\n"
        'a = TrainingArguments("out", fsdp="shard_grad_op auto_wrap", bf16=True,\n'
        '    fsdp_config={"transformer_layer_cls_to_wrap": ["Block"], "use_orig_params": True})\n'
        'b = TrainingArguments("out", fsdp="full_shard")\n'
        'c = TrainingArguments("out", fsdp="hybrid_shard", fsdp_config={})\n'
        'd = TrainingArguments("out", fsdp="full_shard", fsdp_config=config)\n'
    )
    after, findings = rewritten(text)
    assert after == text.replace('"use_orig_params": True}', '"reshard_after_forward": False, "version": 2}').replace(
        'fsdp="full_shard")', 'fsdp="full_shard", fsdp_config={"reshard_after_forward": True, "version": 2})'
    )
    assert [found.split(":")[-1].strip() for found in of_kind(findings, "left")] == [
        "the option hybrid_shard has no counterpart in version 2",
        "fsdp_config is `config`, not written out here",
    ]
    assert len(of_kind(findings, "differs")) == 3
    assert rewritten(after)[0] == after
