"""Each check of the rehearsal finds a defect: in small programs, and planted into the library."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from fsdp_flat.core.gradients import FlatGradBuffer
from tests.rehearsal import seam
from tests.rehearsal.check import Finding
from tests.rehearsal.fake_device import DEVICE
from tests.rehearsal.kit import Rehearsal, rehearsal, train


def found(run: Rehearsal) -> list[str]:
    return sorted(run.kinds())


def test_a_read_that_does_not_wait_for_a_write_on_another_stream_is_a_conflict() -> None:
    with rehearsal(with_library=False) as run:
        side = run.machine.new_stream(name="side")
        x = torch.zeros(4, device=DEVICE)
        with side:
            x + 1
    assert found(run) == ["conflict"]
    assert "aten::add reads on side" in run.findings[0].text
    assert "aten::zeros writes on compute" in run.findings[0].text
    with pytest.raises(AssertionError, match="1 defects"):
        run.check()


@pytest.mark.parametrize("how", ["wait_stream", "wait_event"])
def test_a_wait_orders_a_read_after_a_write(how: str) -> None:
    with rehearsal(with_library=False) as run:
        side = run.machine.new_stream(name="side")
        x = torch.zeros(4, device=DEVICE)
        if how == "wait_stream":
            side.wait_stream(run.machine.current_stream())
        else:
            side.wait_event(run.machine.current_stream().record_event())
        with side:
            x + 1
    run.check()


def test_a_write_that_does_not_wait_for_a_read_is_a_conflict() -> None:
    with rehearsal(with_library=False) as run:
        side = run.machine.new_stream(name="side")
        x = torch.zeros(4, device=DEVICE)
        side.wait_stream(run.machine.compute)
        with side:
            y = x + 1
        x.view(2, 2)[0].mul_(2)
    assert found(run) == ["conflict"]
    assert y.shape == (4,)


@pytest.mark.parametrize("write", ["foreach", "out", "in place", "backward"])
def test_writes_of_every_kind_are_seen(write: str) -> None:
    with rehearsal(with_library=False) as run:
        side = run.machine.new_stream(name="side")
        x, y = torch.zeros(4, device=DEVICE), torch.zeros(4, device=DEVICE)
        side.wait_stream(run.machine.compute)
        with side:
            held = x + 1
            if write == "foreach":
                torch._foreach_copy_([x, x], [y, y])
            elif write == "out":
                torch.add(y, y, out=x)
            elif write == "in place":
                x.narrow(0, 0, 2).add_(1)
            else:
                leaf = y.clone().requires_grad_()
                leaf.grad = x
                (leaf * 2).sum().backward()
        x + 1
    assert found(run) == ["conflict"]
    assert held is not None


def test_memory_that_dies_before_another_stream_has_read_it_is_reused_too_early() -> None:
    with rehearsal(with_library=False) as run:
        side = run.machine.new_stream(name="side")
        x = torch.zeros(4, device=DEVICE)
        side.wait_stream(run.machine.compute)
        with side:
            y = x + 1
        del x
        z = torch.zeros(4, device=DEVICE)
        assert y is not z
    assert found(run) == ["freed memory"]


def test_memory_that_dies_after_its_stream_has_waited_may_be_reused() -> None:
    with rehearsal(with_library=False) as run:
        side = run.machine.new_stream(name="side")
        x = torch.zeros(4, device=DEVICE)
        side.wait_stream(run.machine.compute)
        with side:
            y = x + 1
        del x
        run.machine.compute.wait_stream(side)
        z = torch.zeros(4, device=DEVICE)
        assert y is not z
    run.check()


def test_a_storage_resized_to_nothing_too_early_is_reused_by_its_stream() -> None:
    with rehearsal(with_library=False) as run:
        side = run.machine.new_stream(name="side")
        with side:
            x = torch.zeros(4, device=DEVICE)
        run.machine.compute.wait_stream(side)
        y = x + 1
        x.untyped_storage().resize_(0)
        with side:
            x.untyped_storage().resize_(16)
            x.zero_()
        assert y is not None
    assert found(run) == ["freed memory"]


def test_a_collective_runs_on_a_stream_of_its_own_until_it_is_waited_for() -> None:
    with rehearsal() as run:
        x, y = torch.zeros(4, device=DEVICE), torch.zeros(16, device=DEVICE)
        work = torch.distributed.all_gather_into_tensor(y, x, async_op=True)
        x.add(1)
        assert not run.findings, "both read"
        work.wait()
        y.add_(1)
        assert not run.findings
        torch.distributed.all_reduce(x, async_op=True)
        x.add(1)
    assert found(run) == ["conflict"]


@pytest.mark.parametrize("program", ["x.sum().item()", "bool(x.sum())", "float(x.sum())", "torch.equal(x, x)"])
def test_a_value_that_the_host_reads_makes_it_wait(program: str) -> None:
    with rehearsal(with_library=False) as run:
        eval(program, {"x": torch.zeros(4, device=DEVICE), "torch": torch})
    assert found(run) == ["host wait: a value is read"]


@pytest.mark.parametrize(
    "program",
    [
        "x.tolist()",
        "x.cpu()",
        "x.to('cpu')",
        "y.to(x.device)",
        "x.copy_(y)",
        "y.copy_(x)",
        "torch._foreach_copy_([x], [y])",
        "x.copy_(y.pin_memory())",
        "torch.tensor([1.0], device=x.device)",
    ],
)
def test_a_blocking_copy_makes_the_host_wait(program: str) -> None:
    with rehearsal(with_library=False) as run:
        eval(program, {"x": torch.zeros(4, device=DEVICE), "y": torch.zeros(4), "torch": torch})
    assert found(run) == ["host wait: blocking copy"]


@pytest.mark.parametrize(
    "program",
    [
        "x.copy_(y.pin_memory(), non_blocking=True)",
        "x.copy_(torch.zeros(4, pin_memory=True), non_blocking=True)",
        "torch.empty_like(y, pin_memory=True).copy_(x, non_blocking=True)",
        "x.to('cpu', non_blocking=True)",
        "x.mul_(torch.tensor(2.0))",
        "x.storage_offset() + x.numel()",
    ],
)
def test_what_does_not_make_the_host_wait_is_no_finding(program: str) -> None:
    with rehearsal(with_library=False) as run:
        held = eval(program, {"x": torch.zeros(4, device=DEVICE), "y": torch.zeros(4), "torch": torch})
    assert held is not None
    run.check()


def test_the_host_must_not_look_at_a_copy_before_it_is_there() -> None:
    with rehearsal(with_library=False) as run:
        there = torch.zeros(4, device=DEVICE).to("cpu", non_blocking=True)
        there + 1
    assert found(run) == ["conflict"]


def test_a_rehearsal_in_which_nothing_ran_does_not_pass() -> None:
    with rehearsal(with_library=False) as run:
        pass
    with pytest.raises(AssertionError, match="nothing was recorded"):
        run.check()


# -- planted into the library ----------------------------------------------------------------------------------------


@functools.cache
def findings_of(defect: str | None, use_orig_params: bool) -> frozenset[Finding]:
    with rehearsal() as run:
        if defect is None:
            train(run, run.wrap(use_orig_params=use_orig_params))
        else:
            with seam.planted(defect):
                train(run, run.wrap(use_orig_params=use_orig_params))
    return frozenset(run.findings)


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize("defect", seam.PLANTED)
def test_a_defect_planted_into_the_library_is_found(defect: str, use_orig_params: bool) -> None:
    added = findings_of(defect, use_orig_params) - findings_of(None, use_orig_params)
    assert {finding.kind for finding in added} & {"conflict", "freed memory"}
    assert any("fsdp_flat/" in finding.text for finding in added), "the report says where in the library"


@pytest.mark.parametrize("method", ["add_grad", "close"])
def test_a_wait_of_the_host_inside_backward_is_found(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = getattr(FlatGradBuffer, method)

    def wait_first(*args: Any) -> Any:
        torch.accelerator.synchronize()
        return plain(*args)

    with rehearsal() as run:
        model = run.wrap()
        train(run, model, num_steps=1)
        run.check_waits_come_last()
        monkeypatch.setattr(FlatGradBuffer, method, wait_first)
        train(run, model, num_steps=1)
    assert "host wait: device synchronize" in run.kinds()
    with pytest.raises(AssertionError, match="backward goes on after a wait"):
        run.check_waits_come_last()
