"""Rewriting imports: what comes out, to the byte, and that it means fsdp_flat."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import pytest
import torch.distributed.fsdp

pytest.importorskip("libcst", reason="the migration tool needs it")

import fsdp_flat
from fsdp_flat import core
from fsdp_flat.compat import semi_private
from fsdp_flat.compat.torch_names import ABSENT_ATTRIBUTES, FSDP2_NAMES, counterpart
from fsdp_flat.tools.migrate_source import migrate_source

CASES = {
    "from import": (
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision\n",
        "from fsdp_flat import FullyShardedDataParallel as FSDP, MixedPrecision\n",
    ),
    "wrap": (
        "from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, enable_wrap, wrap\n",
        "from fsdp_flat.wrap import size_based_auto_wrap_policy, enable_wrap, wrap\n",
    ),
    "other submodules": (
        "from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType\n"
        "from torch.distributed.fsdp.api import CPUOffload\n"
        "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n",
        "from fsdp_flat.fully_sharded_data_parallel import StateDictType\n"
        "from fsdp_flat.api import CPUOffload\n"
        "from fsdp_flat.sharded_grad_scaler import ShardedGradScaler\n",
    ),
    "brackets, comments and a trailing comma": (
        "from torch.distributed.fsdp import (  # sharding\n"
        "    # the wrapper\n"
        "    FullyShardedDataParallel as FSDP,  # 1\n"
        "    CPUOffload,  # 2\n"
        "    # last\n"
        ")  # done\n",
        "from fsdp_flat import (  # sharding\n"
        "    # the wrapper\n"
        "    FullyShardedDataParallel as FSDP,  # 1\n"
        "    CPUOffload,  # 2\n"
        "    # last\n"
        ")  # done\n",
    ),
    "FSDP2 stays": (
        "from torch.distributed.fsdp import CPUOffload, fully_shard, FSDPModule, MixedPrecision  # noqa: F401\n",
        "from fsdp_flat import CPUOffload, MixedPrecision  # noqa: F401\n"
        "from torch.distributed.fsdp import fully_shard, FSDPModule  # noqa: F401\n",
    ),
    "FSDP2 stays, in brackets": (
        "from torch.distributed.fsdp import (\n"
        "    # ours\n"
        "    CPUOffload,  # 1\n"
        "    # theirs\n"
        "    fully_shard as shard,  # 2\n"
        "    # ours again\n"
        "    MixedPrecision  # 3\n"
        "    # last\n"
        ")\n",
        "from fsdp_flat import (\n"
        "    # ours\n"
        "    CPUOffload,  # 1\n"
        "    # ours again\n"
        "    MixedPrecision  # 3\n"
        "    # last\n"
        ")\n"
        "from torch.distributed.fsdp import (\n"
        "    # theirs\n"
        "    fully_shard as shard  # 2\n"
        ")\n",
    ),
    "a backslash": (
        "from torch.distributed.fsdp import CPUOffload, \\\n    MixedPrecision\n",
        "from fsdp_flat import CPUOffload, \\\n    MixedPrecision\n",
    ),
    "several statements on a line": (
        "import os; from torch.distributed.fsdp import CPUOffload, fully_shard; import sys\n",
        "import os; from fsdp_flat import CPUOffload; from torch.distributed.fsdp import fully_shard; import sys\n",
    ),
    "a module under another name": (
        "import os, torch.distributed.fsdp as fsdp\nkind = fsdp.ShardingStrategy.FULL_SHARD\n",
        "import os, fsdp_flat as fsdp\nkind = fsdp.ShardingStrategy.FULL_SHARD\n",
    ),
    "a module from its parent": (
        "from torch.distributed import fsdp, get_rank\nfrom torch.distributed.fsdp import wrap as w\n"
        "kind = fsdp.MixedPrecision, w.wrap\n",
        "from torch.distributed import get_rank\nimport fsdp_flat as fsdp\nfrom fsdp_flat import wrap as w\n"
        "kind = fsdp.MixedPrecision, w.wrap\n",
    ),
    "a module that FSDP2 is used through": (
        "import torch.distributed.fsdp as fsdp\nkinds = fsdp.CPUOffload, fsdp.fully_shard\n",
        "import torch.distributed.fsdp as fsdp\nimport fsdp_flat\nkinds = fsdp_flat.CPUOffload, fsdp.fully_shard\n",
    ),
    "whole paths": (
        "import torch\n"
        "import torch.distributed as dist\n"
        "import torch.distributed.fsdp\n"
        "kind = torch.distributed.fsdp.ShardingStrategy.FULL_SHARD\n"
        "policy = dist.fsdp.wrap.always_wrap_policy\n",
        "import torch\n"
        "import torch.distributed as dist\n"
        "import fsdp_flat.wrap\n"
        "import torch.distributed\n"
        "import fsdp_flat\n"
        "kind = fsdp_flat.ShardingStrategy.FULL_SHARD\n"
        "policy = fsdp_flat.wrap.always_wrap_policy\n",
    ),
    "the import that torch came by": (
        "import torch.distributed.fsdp\n"
        "import torch.distributed.fsdp.wrap  # policies\n"
        "policy = torch.distributed.fsdp.wrap.always_wrap_policy\n"
        "offload = torch.distributed.fsdp.CPUOffload(bool(torch.tensor(1)))\n",
        "import torch.distributed\n"
        "import fsdp_flat\n"
        "import torch.distributed  # policies\n"
        "import fsdp_flat.wrap\n"
        "policy = fsdp_flat.wrap.always_wrap_policy\n"
        "offload = fsdp_flat.CPUOffload(bool(torch.tensor(1)))\n",
    ),
    "a function": (
        "def f():\n"
        "    import torch.distributed.fsdp.sharded_grad_scaler, sys\n"
        "    return torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler\n"
        "scaler = f()\n",
        "def f():\n"
        "    import torch.distributed, sys\n"
        "    import fsdp_flat.sharded_grad_scaler\n"
        "    return fsdp_flat.sharded_grad_scaler.ShardedGradScaler\n"
        "scaler = f()\n",
    ),
    "try": (
        "try:\n\tfrom torch.distributed.fsdp import CPUOffload\nexcept ImportError:\n\tCPUOffload = None\n",
        "try:\n\tfrom fsdp_flat import CPUOffload\nexcept ImportError:\n\tCPUOffload = None\n",
    ),
    "one line of try": (
        "try: from torch.distributed.fsdp import CPUOffload, FSDPModule\nexcept ImportError: pass\n",
        "try: from fsdp_flat import CPUOffload; from torch.distributed.fsdp import FSDPModule\n"
        "except ImportError: pass\n",
    ),
    "type checking": (
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from torch.distributed.fsdp import CPUOffload\ndef f(x: CPUOffload): ...\n",
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from fsdp_flat import CPUOffload\ndef f(x: CPUOffload): ...\n",
    ),
    "private names that have a counterpart": (
        "from torch.distributed.fsdp._common_utils import clean_tensor_name\n"
        "from torch.distributed.fsdp._flat_param import FlatParameter\n"
        "from torch.distributed.fsdp.wrap import _or_policy\n"
        "import torch.distributed.fsdp._common_utils as utils\nname = utils.clean_tensor_name('x')\n",
        "from fsdp_flat import clean_tensor_name\n"
        "from fsdp_flat import FlatParameter\n"
        "from fsdp_flat.wrap import _or_policy\n"
        "import fsdp_flat\nname = fsdp_flat.clean_tensor_name('x')\n",
    ),
    "names that only look alike": (
        "import torch\nimport torch.distributed.fsdp as fsdp\n"
        "def f(fsdp=None, **k): return k\n"
        "class A:\n    fsdp = 1\n    def g(self, torch): return self.fsdp, torch.distributed.fsdp.CPUOffload\n"
        "x = f(fsdp=2), A.fsdp, fsdp.CPUOffload, 'torch.distributed.fsdp is not FSDP2'\n",
        "import torch\nimport fsdp_flat as fsdp\n"
        "def f(fsdp=None, **k): return k\n"
        "class A:\n    fsdp = 1\n    def g(self, torch): return self.fsdp, torch.distributed.fsdp.CPUOffload\n"
        "x = f(fsdp=2), A.fsdp, fsdp.CPUOffload, 'torch.distributed.fsdp is not FSDP2'\n",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_imports_are_rewritten_to_the_byte_and_the_result_runs(case: str) -> None:
    before, after = CASES[case]
    assert migrate_source(before.encode()).data.decode() == after
    exec(after, {"__name__": "migrated"})


@pytest.mark.parametrize("case", CASES)
def test_a_second_run_changes_nothing(case: str) -> None:
    result = migrate_source(migrate_source(CASES[case][0].encode()).data)
    assert result.data.decode() == CASES[case][1]
    assert [found for found in result.findings if found.kind != "differs"] == []


@pytest.mark.parametrize(
    "data",
    [
        b"import torch.distributed.fsdp as F\r\n\r\nx = '''\r\n'''\r\n",
        "# -*- coding: latin-1 -*-\nname = 'é'\nimport torch.distributed.fsdp as F".encode("latin-1"),
        "\ufeff# é\nimport torch.distributed.fsdp as F\n".encode(),
        b"#!/usr/bin/env python\n\n\nimport torch.distributed.fsdp as F ;  \t# odd\n\n",
        b"if 1:\r\n\timport torch.distributed.fsdp as F\r\nx = 1\ny = [ 1,\n2 ]   \n",
    ],
    ids=["crlf", "latin-1", "bom", "blanks", "mixed line ends"],
)
def test_encoding_line_ends_and_blanks_stay(data: bytes) -> None:
    assert migrate_source(data).data == data.replace(b"import torch.distributed.fsdp as F", b"import fsdp_flat as F")


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nfrom torch.distributed import get_rank\n",
        "from torch.distributed.fsdp import fully_shard, FSDPModule\n",
        "from torch.distributed.fsdp._fully_shard import FSDPState\n",
        "from .fsdp import FullyShardedDataParallel\n",
        "from fairscale.nn import FullyShardedDataParallel as FSDP\n",
        '"""About torch.distributed.fsdp."""\n',
        'name = "torch.distributed.fsdp.fully_shard"\n',
    ],
)
def test_files_without_fsdp1_are_left_and_not_reported(source: str) -> None:
    data = source.encode()
    result = migrate_source(data)
    assert result.data is data
    assert result.findings == []


@pytest.mark.parametrize(
    ("source", "line", "text"),
    [
        ("from torch.distributed.fsdp import *\n", 1, "does not say which names"),
        ("\nfrom torch.distributed.fsdp import _runtime_utils\n", 2, "_runtime_utils has no counterpart"),
        ("from torch.distributed.fsdp._flat_param import FlatParamHandle\n", 1, "FlatParamHandle has no counterpart"),
        ("import torch\nx = torch.distributed.fsdp._runtime_utils._lazy_init\n", 2, "after fsdp_flat.install()"),
        ('import importlib\nm = importlib.import_module("torch.distributed.fsdp.wrap")\n', 2, "the string"),
        (
            "try:\n    import torch.distributed.fsdp as F\nexcept ImportError:\n    import fairscale.nn as F\nF.X\n",
            5,
            "may come from another import",
        ),
    ],
)
def test_what_cannot_be_judged_is_left_and_reported_with_its_line(source: str, line: int, text: str) -> None:
    result = migrate_source(source.encode())
    assert result.data.decode() == source
    assert [(found.line, found.kind) for found in result.findings] == [(line, "check")]
    assert text in result.findings[0].text


def test_fsdp2_beside_fsdp1_is_reported() -> None:
    result = migrate_source(b"from torch.distributed.fsdp import CPUOffload, fully_shard\n")
    assert [(found.line, found.kind) for found in result.findings] == [(1, "changed"), (1, "check")]
    assert "fully_shard is FSDP2" in result.findings[1].text


def test_a_module_that_is_handed_on_stays_and_is_reported() -> None:
    before = "import torch.distributed.fsdp as F\nif not hasattr(F, 'FSDPModule'):\n    F.FSDPModule = None\n"
    used = "kind = F.CPUOffload\n"
    result = migrate_source((before + used).encode())
    assert result.data.decode() == before.replace("\n", "\nimport fsdp_flat\n", 1) + used.replace("F.", "fsdp_flat.")
    assert [(found.line, found.kind) for found in result.findings] == [(2, "check"), (3, "check"), (4, "changed")]
    assert migrate_source(before.encode()).data.decode() == before


@pytest.mark.parametrize(
    "data", [b"def f(:\n", b"# coding: nowhere\n", b"x = '\xff'\n", b"if 1:\n\tx\n        y\n", b"x = 1\n\x0cy = 2\n"]
)
def test_a_file_that_cannot_be_parsed_is_an_error_and_stays(data: bytes) -> None:
    named = data + b"# torch.distributed.fsdp\n"
    result = migrate_source(named)
    assert result.data is named
    assert migrate_source(data).findings == []  # of no interest
    assert [found.kind for found in result.findings] == ["error"]


@pytest.mark.parametrize("module", ["", ".wrap", ".api", ".sharded_grad_scaler", ".fully_sharded_data_parallel"])
def test_every_public_name_of_fsdp1_has_a_counterpart_that_can_be_imported(module: str) -> None:
    peer = import_module("torch.distributed.fsdp" + module)
    own = [
        name
        for name, value in vars(peer).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith("torch.distributed.fsdp")
    ]
    assert len(own) >= 1
    for name in own:
        ours = counterpart(f"{peer.__name__}.{name}")
        if name in FSDP2_NAMES:
            assert ours is None
            continue
        assert ours is not None, name
        found = getattr(import_module(ours.rpartition(".")[0]), ours.rpartition(".")[2])
        assert found is not getattr(peer, name)
    assert set(torch.distributed.fsdp.__all__) - set(fsdp_flat.__all__) <= set(FSDP2_NAMES)


def test_attributes_called_absent_are_absent_here_and_known_to_fsdp1() -> None:
    folder = Path(inspect.getfile(torch.distributed.fsdp)).parent
    peer = "".join(path.read_text() for path in folder.glob("*.py"))
    for name in ABSENT_ATTRIBUTES:
        assert name in peer
        for kind in (fsdp_flat.FullyShardedDataParallel, semi_private.FlatParamHandle, core.ParamGroup):
            assert not hasattr(kind, name), (kind, name)
