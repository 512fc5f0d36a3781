"""accelerate's FSDP, versions 1 and 2: accumulation, clipping, validation, and resuming in the middle of an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.sides import OURS, SCRIPTS, THEIRS, assert_goes_on, assert_units, numbers, run
from tests.support import assert_close
from tests.support.scripts import command

SCRIPT = "accelerate_train.py"


@pytest.mark.parametrize(
    "words",
    [
        ("--fsdp-version", 1, "--state-dict-type", "FULL_STATE_DICT"),
        ("--fsdp-version", 1, "--state-dict-type", "SHARDED_STATE_DICT", "--flat-params", "--mixed-precision", "bf16"),
        ("--fsdp-version", 2, "--state-dict-type", "FULL_STATE_DICT", "--mixed-precision", "bf16"),
        ("--fsdp-version", 2, "--state-dict-type", "SHARDED_STATE_DICT"),
    ],
    ids=["1-full", "1-sharded-flat-bf16", "2-full-bf16", "2-sharded"],
)
def test_a_script_with_the_plugin_trains_as_on_torch_and_resumes_in_mid_epoch(
    words: tuple[object, ...], tmp_path: Path
) -> None:
    ours = run(OURS, SCRIPT, *words, "--folder", tmp_path / "ours")
    # Sharded, accelerate reads FSDP1's optimizer state into the entries that the optimizer has.
    first = ["--step-before-load"] if "--flat-params" in words else []
    assert_goes_on(run(OURS, SCRIPT, *words, "--folder", tmp_path / "ours", "--resume", *first), ours)
    theirs = run(THEIRS, SCRIPT, *words, "--folder", tmp_path / "theirs")
    tolerance = 2e-2 if "bf16" in words else 1e-5
    assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


YAML = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 1
num_processes: 2
main_process_port: 0
use_cpu: {use_cpu}
fsdp_config:
  fsdp_version: {version}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: TinyLayer
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_reshard_after_forward: {reshard}
  fsdp_cpu_ram_efficient_loading: {efficient}
  fsdp_sync_module_states: {efficient}
  fsdp_use_orig_params: true
"""


@pytest.mark.parametrize(
    ("version", "use_cpu", "reshard", "efficient"),
    [(1, "false", "FULL_SHARD", "true"), (2, "true", "true", "false")],
)
def test_accelerate_launch_with_a_yaml_trains_as_the_plugin_under_torchrun(
    version: int, use_cpu: str, reshard: str, efficient: str, tmp_path: Path
) -> None:
    config = tmp_path / "fsdp.yaml"
    config.write_text(YAML.format(version=version, use_cpu=use_cpu, reshard=reshard, efficient=efficient))
    launch = ("-m", "accelerate.commands.launch", "--config_file", config)
    output = command(*launch, *OURS, SCRIPTS / SCRIPT, "--folder", tmp_path)
    assert_units(output, "fsdp_flat")
    plugin = run(OURS, SCRIPT, "--fsdp-version", version, "--folder", tmp_path)
    assert numbers(output) == plugin
    assert len(plugin) > 20
    if version == 1:
        assert "take a step" not in output
        output = command(*launch, *OURS, SCRIPTS / SCRIPT, "--folder", tmp_path, "--resume")
        assert "take a step" in output, "a sharded load that reads no optimizer state says so"
