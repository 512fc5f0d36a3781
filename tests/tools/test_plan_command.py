"""``fsdp-flat plan`` and ``describe``: models by import path and by file, and bad input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import CPUOffload, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, plan
from fsdp_flat.errors import OptionError
from fsdp_flat.tools.plan_search import largest_batch
from fsdp_flat.tools.step_memory import BytesByKind, Moment, StepPhase
from fsdp_flat.tools.step_plan import StepPlan
from fsdp_flat.tools.text import BYTES_A_SECOND, FLOPS, speed_of
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support.models import Block, Stack
from tests.tools.conftest import Run, RunJson

STACK = "tests.support.models:Stack"
HERE = "tests.tools.test_plan_command"


def raises() -> nn.Module:
    raise KeyError("a size")


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output = model(batch)
    return output.float().exp().log_softmax(-1).sum()


def test_a_plan_is_that_of_the_function(run_json: RunJson, run: Run) -> None:
    arguments = (STACK, "--ranks", 4, "--batch", "16x8", "--wrap", "Block", "--strategy", "SHARD_GRAD_OP")
    status, found = run_json("plan", *arguments)
    expected = plan(
        Stack(),
        4,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        batch=torch.empty(16, 8),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    )
    assert (status, found["peak_nbytes"], found["sent_nbytes"]) == (0, expected.peak_nbytes, expected.sent_nbytes)
    status, text, _ = run("plan", *arguments)
    assert (status, text.endswith(f"\n\n{expected}\n")) == (0, True)
    assert text.startswith(
        "precision: as-built: float32 parameters, gradients and optimizer states\noptimizer: AdamW\n"
    )


def test_a_plan_that_fits_nothing_has_status_one(run_json: RunJson) -> None:
    status, found = run_json("plan", STACK, "--ranks", 2, "--batch", "16x8", "--wrap", "Block", "--fit", "1kB")
    assert (status, found["fits"]) == (1, False)
    assert len(found["choices"]) > 1


def test_a_plan_that_fits_has_status_zero_and_a_picture(run_json: RunJson, tmp_path: Path) -> None:
    status, found = run_json(
        "plan",
        STACK,
        "--ranks",
        2,
        "--batch",
        "16x8",
        "--wrap",
        "Block",
        "--fit",
        "1MB",
        "--picture",
        tmp_path / "plan.png",
    )
    assert (status, found["fits"]) == (0, True)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_largest_batch_fits_and_one_row_more_does_not(recomputes: bool, run_json: RunJson) -> None:
    how = ["--recompute"] if recomputes else []
    status, found = run_json("plan", STACK, "--ranks", 4, "--batch", "autox8", "--fit", "60kB", *how)
    assert (status, found["fits"]) == (0, True)
    assert found["assumed"]["units"] == "modules of Block (--wrap)"
    shape, says = found["assumed"]["batch"].split(", ")
    assert says == "the largest that fits 60.0 kB"
    rows = int(shape.removesuffix("x8"))
    wrap = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "checkpointing": recomputes}
    fits, larger = (plan(Stack(), 4, batch=torch.empty(each, 8), **wrap).peak_nbytes for each in (rows, rows + 1))
    assert found["peak_nbytes"] == fits <= 60_000 < larger


def test_a_batch_of_one_row_that_does_not_fit_is_shown(run: Run) -> None:
    status, text, _ = run("plan", STACK, "--ranks", 2, "--batch", "autox8", "--fit", "1kB")
    assert status == 1
    assert "\nbatch: 1x8, which does not fit 1.00 kB\n" in text


class Config:
    n_positions = 12


class Language(nn.Module):
    """Has a config as those of transformers."""

    config = Config()

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(7, 8), nn.Sequential(Block(), Block())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.dtype == torch.long
        return self.blocks(self.embed(tokens))


def test_rows_are_as_long_as_the_config_of_the_model_says(run_json: RunJson) -> None:
    _, found = run_json("plan", f"{HERE}:Language", "--ranks", 2, "--batch", "auto", "--fit", "60kB")
    assert found["assumed"]["length"] == "12 tokens, the model's own (n_positions); --batch autox2048 sets another"
    assert found["assumed"]["batch"].split(",")[0].endswith("x12")


@pytest.mark.parametrize(
    "peak",
    [lambda rows: 10 * rows, lambda rows: 5000 + 7 * rows**2, lambda rows: max(4000, 90 * rows), lambda rows: 5],
    ids=["proportional", "quadratic", "flat at first", "flat"],
)
@pytest.mark.parametrize("limit", [1, 10, 999, 5007, 12_345])
def test_the_largest_batch_is_found_in_few_plans_for_any_growth_of_the_peak(
    peak: Callable[[int], int], limit: int
) -> None:
    tried: list[int] = []

    def planned(rows: int) -> StepPlan:
        tried.append(rows)
        moment = Moment(StepPhase.BACKWARD, 0.0, "", BytesByKind(activations=peak(rows)))
        return StepPlan((), 1, 1, 0, phases=(moment,))

    rows, found = largest_batch(planned, limit)
    most = 1 << 20
    assert rows == max([1, *[rows for rows in range(1, 3000) if peak(rows) <= limit]]) or rows == most
    assert (rows == most) == (peak(most) <= limit)
    assert found.fits == (peak(1) <= limit)
    assert len(tried) == len(set(tried)) <= 20


def test_describe_lists_the_units_that_wrapping_makes(run_json: RunJson) -> None:
    status, found = run_json("describe", STACK, "--ranks", 2, "--wrap", "Block")
    assert (status, [unit["name"] for unit in found["units"]]) == (
        0,
        ["Stack", "blocks.0", "blocks.1", "blocks.2"],
    )


def test_a_saved_model_is_unpickled_only_if_that_is_allowed(tmp_path: Path, run: Run, run_json: RunJson) -> None:
    with torch.device("meta"):
        torch.save(nn.Linear(4, 3), tmp_path / "model.pt")
    status, text, errors = run("describe", tmp_path / "model.pt", "--ranks", 2)
    assert (status, text) == (2, "")
    assert "--allow-pickle" in errors
    status, found = run_json("describe", tmp_path / "model.pt", "--ranks", 2, "--allow-pickle")
    assert (status, found["units"][0]["numel"]) == (0, 15)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("nothing", "nothing is no file; name a model by module:function, as in train:build."),
        ("nothing:build", "nothing:build cannot be imported: No module named 'nothing'."),
        ("torch:nothing", "torch:nothing cannot be imported: "),
        ("builtins:dict", "builtins:dict gives a dict; expected a torch.nn.Module."),
        ("nothing.json", "nothing.json is no config.json of a hub model: FileNotFoundError"),
        ("../b/model.py:GPT", "../b/model.py:GPT is no name of a module: write it as an import does"),
        ("torch.nn:Linear", "torch.nn:Linear() raises TypeError: "),
        ("tests.tools.test_plan_command:raises", "tests.tools.test_plan_command:raises() raises KeyError: 'a size'."),
        ("..", ".. is a folder; "),
    ],
)
def test_a_name_without_a_model_is_one_line(model: str, told: str, run: Run) -> None:
    status, text, errors = run("plan", model, "--ranks", 2)
    assert (status, text, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(f"fsdp-flat plan: {told}")


def test_unknown_classes_strategies_and_shapes_are_named(run: Run) -> None:
    assert "The model has no Blok; it has Block, " in run("plan", STACK, "--ranks", 2, "--wrap", "Blok")[2]
    assert "--strategy is one of FULL_SHARD, " in run("plan", STACK, "--ranks", 2, "--strategy", "FULL")[2]
    assert "--batch is a shape like 4x2048, or auto; got 4,8." in run("plan", STACK, "--ranks", 2, "--batch", "4,8")[2]


BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FUSED = partial(torch.optim.AdamW, fused=True)


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        (["--precision", "bf16"], {"mixed_precision": BF16}),
        (["--optimizer", "sgd"], {"optimizer": torch.optim.SGD}),
        (["--fused"], {"optimizer": FUSED}),
        (["--optimizer", "none"], {"optimizer": None}),
        (["--bandwidth", "8Gbit/s", "--flops", "2TFLOPS"], {"bandwidth": 1e9, "flops": 2e12}),
        (["--offload"], {"cpu_offload": CPUOffload(True)}),
        (["--offload-optimizer"], {"cpu_offload": CPUOffload(offload_optimizer=True)}),
        (["--offload-activations"], {"offload_activations": True}),
        (["--replicas", "2"], {"num_replicas": 2, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}),
        (["--strategy", "shard_grad_op"], {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
        (["--accumulate"], {"accumulates": True}),
        (["--recompute", "--device", "cpu"], {"checkpointing": True, "device_type": "cpu"}),
        (["--loss", f"{HERE}:loss"], {"loss": loss}),
        (
            ["--api", "fully_shard", "--precision", "bf16", "--reduce-dtype", "bf16"],
            {
                "api": "fully_shard",
                "mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
            },
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_each_flag_is_an_argument_of_the_function(
    flags: list[str], arguments: dict[str, Any], run_json: RunJson
) -> None:
    status, found = run_json("plan", STACK, "--ranks", 4, "--batch", "4096x8", "--wrap", "Block", *flags)
    expected = plan(Stack(), 4, auto_wrap_policy=ModuleWrapPolicy({Block}), batch=torch.empty(4096, 8), **arguments)
    assert status == 0
    assert [phase["total"] for phase in found["phases"].values()] == [each.nbytes.total for each in expected.phases]
    numbers = ("host_nbytes", "sent_nbytes", "seconds", "exposed_seconds")
    assert {name: found[name] for name in numbers} == {name: getattr(expected, name) for name in numbers}
    plain = plan(Stack(), 4, auto_wrap_policy=ModuleWrapPolicy({Block}), batch=torch.empty(4096, 8))
    found, without = ((each.phases, each.seconds, each.host_nbytes) for each in (expected, plain))
    assert found != without, "the flag changes the plan"


def test_parameters_in_low_precision_have_states_in_it(run_json: RunJson) -> None:
    arguments = (STACK, "--ranks", 2, "--batch", "16x8", "--precision")
    bf16, low = (run_json("plan", *arguments, precision)[1] for precision in ("bf16", "pure-bf16"))
    assert low["assumed"]["precision"] == "pure-bf16: bfloat16 parameters, gradients and optimizer states"
    assert bf16["shard_nbytes"] == 2 * low["shard_nbytes"]
    ratio = bf16["phases"]["forward"]["optimizer"] / low["phases"]["forward"]["optimizer"]
    assert ratio == pytest.approx(2, rel=0.02)


def test_equal_units_are_one_row_with_sizes_that_a_person_reads(run: Run) -> None:
    text = run("describe", STACK, "--ranks", 2, "--wrap", "Block")[1]
    row = next(line for line in text.splitlines() if line.startswith("blocks."))
    assert row.split() == [
        *("blocks.0", "to", "blocks.2", "3", "FULL_SHARD", "float32"),
        *("3", "289", "289", "580", "B", "580", "B", "1.16", "kB"),
    ]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--batch", "16x9"], "Stack cannot run on --batch 16x9: RuntimeError: a and b must have same reduction dim"),
        (["--batch", "0x8"], "--batch is a shape of positive sizes"),
        (["--fit", "1GB"], "--fit needs a --batch"),
        (["--batch", "autox8"], "--batch auto needs --fit, the memory of a rank, as 80GB."),
        (["--batch", "auto", "--fit", "80"], "--fit must be a number of bytes with a unit"),
        (["--batch", "auto", "--fit", "1MB"], "Stack has no config that says how long its input is (max_position_"),
        (["--picture", "plan.png"], "--picture needs a --batch"),
        (["--batch", "16x8", "--bandwidth", "50Gb/s"], "--bandwidth is a positive number a second"),
        (["--batch", "16x8", "--flops", "0"], "--flops is a positive number a second"),
        (["--batch", "16x8", "--optimizer", "Adamm"], "--optimizer is none, module:function, or one of ASGD, "),
        (["--batch", "16x8", "--optimizer", "RMSprop", "--fused"], "RMSprop has no fused implementation"),
        (["--batch", "16x8", "--optimizer", "LBFGS"], "LBFGS cannot run on parameters without values"),
        (["--batch", "16x8", "--loss", f"{HERE}:nothing"], f"{HERE}:nothing cannot be imported: "),
        (["--batch", "16x8", "--device", "gpu"], "device_type='gpu' names no device"),
    ],
)
def test_a_flag_that_does_not_fit_is_one_line(
    flags: list[str], told: str, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    status, text, errors = run("plan", STACK, "--ranks", 2, *flags)
    assert (status, text, errors.count("\n")) == (2, "", 1), errors
    assert errors.startswith(f"fsdp-flat plan: {told}")
    assert not caplog.records, "torch logs nothing beside it"


@pytest.mark.parametrize(
    ("content", "told"),
    [("[1]", "has no"), ("{", "JSONDecodeError"), ('{"model_type": "unheard"}', "unheard")],
)
def test_a_config_of_no_model_is_one_line(content: str, told: str, tmp_path: Path, run: Run) -> None:
    if "unheard" in content:
        pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "config.json").write_text(content)
    status, text, errors = run("plan", tmp_path / "config.json", "--ranks", 2)
    assert (status, text, errors.count("\n")) == (2, "", 1)
    assert told in errors


def test_a_file_that_torch_cannot_read_is_one_line(tmp_path: Path, run: Run) -> None:
    (tmp_path / "model.pt").write_text("no model")
    status, text, errors = run("describe", tmp_path / "model.pt", "--ranks", 2, "--allow-pickle")
    assert (status, text, errors.count("\n")) == (2, "", 1)
    assert "is no model of torch.save" in errors


@pytest.mark.parametrize(
    ("text", "units", "number"),
    [
        ("50GB/s", BYTES_A_SECOND, 50e9),
        ("400 Gbit/s", BYTES_A_SECOND, 50e9),
        ("5e10", BYTES_A_SECOND, 5e10),
        ("989TFLOPS", FLOPS, 989e12),
        ("4e14", FLOPS, 4e14),
        ("1P", FLOPS, 1e15),
    ],
)
def test_speeds_are_read_with_prefixes_and_units(text: str, units: dict[str, float], number: float) -> None:
    assert speed_of("--speed", text, units) == pytest.approx(number)
    with pytest.raises(OptionError, match="--speed is a positive number a second"):
        speed_of("--speed", f"{text}x", units)
