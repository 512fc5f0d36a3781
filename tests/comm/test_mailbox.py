"""Messages through shared memory: order, reuse, growth, and ranks that disagree or end."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.comm import RankGroup
from fsdp_flat.comm.shm import connect, transport_of
from fsdp_flat.comm.shm import transport as module
from fsdp_flat.comm.shm.transport import Messages, SharedMemoryTransport, wait_for
from fsdp_flat.errors import PeerFailureError, RankMismatchError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import RankFailure, assert_equal, on_ranks
from tests.support.patience import TIMEOUT_S, impatient, logged, wait_until

PAGE = 4096


EXACT = mock.patch.multiple(module, _SEGMENT_NBYTES=1, _IDLE_SENDS=64)


def shared_memory(timeout_s: float = 60) -> SharedMemoryTransport:
    """A new one, of a group of its own over all ranks."""
    made = transport_of(RankGroup.of(dist.new_group()))
    assert made is not None
    made.timeout_s = timeout_s  # of waits, and not of what connects ranks
    return made


def expected(box: SharedMemoryTransport, purpose: str, source: int, nbytes: int, *, unit: int = 0) -> Messages:
    """Expect fp32 elements, whose copy is the result."""
    like = torch.empty(nbytes // 4)
    return box.expect(purpose, [source], like, lambda messages: messages[source].clone(), unit=unit)


def await_arrival(messages: Messages) -> None:
    while not messages.is_completed():
        time.sleep(0.001)


def other(rank: int) -> int:
    return 1 - rank


@on_ranks(2)
def test_ranks_use_gloo_where_one_of_them_may_not_share_memory(rank: int) -> None:
    def refused(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    with mock.patch.object(os, "memfd_create", refused if rank == 1 else os.memfd_create):
        assert transport_of(RankGroup.of(dist.new_group())) is None


@on_ranks(2)
def test_memory_that_cannot_grow_is_an_error_that_names_the_way_out(rank: int) -> None:
    box = shared_memory()

    def refused(_fd: int, _nbytes: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    with mock.patch.object(os, "ftruncate", refused), pytest.raises(OSError, match="set FSDP_FLAT_SHARED_MEMORY=0"):
        box.send("transfer", {other(rank): torch.ones(3)})


@on_ranks(2)
def test_a_message_that_is_released_after_the_connections_is_silent(rank: int) -> None:
    box = shared_memory()
    message = expected(box, "transfer", other(rank), 12)
    box.send("transfer", {other(rank): torch.ones(3)})
    await_arrival(message)
    dist.barrier()
    box.leave()  # as at the end of the process
    assert_equal(message.wait(), torch.ones(3))


@on_ranks(2)
def test_messages_arrive_in_order_whether_or_not_they_are_expected_yet(rank: int) -> None:
    box, peer = shared_memory(), other(rank)
    for first in (True, False):
        messages = [expected(box, "transfer", peer, 12) for _ in range(3)] if first else []
        for index in range(3):
            box.send("transfer", {peer: torch.full((3,), 10.0 * index + rank)})
        if not first:
            dist.barrier()
            box.receive(peer)
            messages = [expected(box, "transfer", peer, 12) for _ in range(3)]
            assert all(message.is_completed() for message in messages)
        for index, message in enumerate(messages):
            assert_equal(message.wait(), torch.full((3,), 10.0 * index + peer))


@on_ranks(2)
@EXACT
def test_memory_that_nobody_has_read_is_not_used_again_and_memory_that_was_read_is(rank: int) -> None:
    box, peer = shared_memory(), other(rank)
    messages = [expected(box, "transfer", peer, 4 * PAGE) for _ in range(5)]
    for index in range(5):
        box.send("transfer", {peer: torch.full((PAGE,), float(index))})
    assert box.nbytes == 5 * 4 * PAGE
    assert box.unread_transfers() == {peer: 5 * 4 * PAGE}
    dist.barrier()
    for index, message in enumerate(messages):
        assert_equal(message.wait(), torch.full((PAGE,), float(index)))
    while box.unread_transfers():
        wait_for({box: [peer]}, "transfer")
    for index in range(20):
        message = expected(box, "transfer", peer, 4 * PAGE)
        box.send("transfer", {peer: torch.full((PAGE,), float(index))})
        assert_equal(message.wait(), torch.full((PAGE,), float(index)))
    assert box.nbytes == 5 * 4 * PAGE


@on_ranks(2)
@EXACT
def test_memory_grows_with_a_longer_message_and_the_reader_sees_all_of_it(rank: int) -> None:
    box, peer = shared_memory(), other(rank)
    for numel in (10, 5 * PAGE, 3, 9 * PAGE, 0):
        message = expected(box, "transfer", peer, 4 * numel)
        sent = torch.arange(numel, dtype=torch.float32) + rank
        box.send("transfer", {peer: sent})
        assert_equal(message.wait(), torch.arange(numel, dtype=torch.float32) + peer)
        while box.unread_transfers():
            wait_for({box: [peer]}, "transfer")
    assert box.nbytes == 9 * 4 * PAGE, "one local shard of memory, as long as the longest message"


@on_ranks(2)
@EXACT
def test_memory_that_was_idle_for_long_goes_back_to_the_system_and_serves_again(rank: int) -> None:
    box, peer = shared_memory(), other(rank)

    def swap(numel: int, how_many: int) -> None:
        messages = [expected(box, "transfer", peer, 4 * numel) for _ in range(how_many)]
        for index in range(how_many):
            box.send("transfer", {peer: torch.full((numel,), float(index + 1))})
        dist.barrier()
        for index, message in enumerate(messages):
            assert_equal(message.wait(), torch.full((numel,), float(index + 1)))
        while box.unread_transfers():
            wait_for({box: [peer]}, "transfer")

    swap(100 * PAGE, 4)
    assert box.nbytes == 4 * 400 * PAGE
    for _ in range(100):
        swap(1, 1)
    assert box.nbytes == 400 * PAGE
    swap(100 * PAGE, 4)
    assert box.nbytes == 4 * 400 * PAGE


@on_ranks(2)
def test_a_letter_that_is_dropped_does_not_keep_the_senders_memory(rank: int) -> None:
    box, peer = shared_memory(), other(rank)
    message = expected(box, "transfer", peer, 4)
    del message
    box.send("transfer", {peer: torch.ones(1)})
    dist.barrier()
    box.receive(peer)
    message = expected(box, "transfer", peer, 4)
    box.send("transfer", {peer: torch.full((1,), 2.0)})
    await_arrival(message)
    del message
    gc.collect()
    box.send("transfer", {})  # the next call confirms it
    while box.unread_transfers():
        wait_for({box: [peer]}, "transfer")


class FullSocket:
    """Refuses the first message, as a socket does whose reader has many to read."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._is_full = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._peer, name)

    def send(self, data: bytes) -> int:
        if self._is_full:
            self._is_full = False
            raise BlockingIOError
        return self._peer.send(data)


@on_ranks(2)
@EXACT
def test_a_message_that_is_collected_while_headers_are_read_leaves_the_others_in_order(rank: int) -> None:
    box = shared_memory()
    if rank == 0:
        for index in range(4):
            box.send("transfer", {1: torch.full((PAGE,), float(index))})
            if index == 0:
                dist.barrier()
        dist.barrier()
        while box.unread_transfers():
            wait_for({box: [1]}, "transfer")
        return
    dropped = [expected(box, "transfer", 0, 4 * PAGE)]
    await_arrival(dropped[0])
    dist.barrier()
    dist.barrier()
    messages = [expected(box, "transfer", 0, 4 * PAGE) for _ in range(3)]
    mapped = module._mapped

    def collecting(fd: int, nbytes: int) -> Any:
        dropped.clear()  # the garbage collector may run at any allocation
        return mapped(fd, nbytes)

    with (
        mock.patch.object(module, "_mapped", collecting),
        mock.patch.dict(box._peers, {0: FullSocket(box._peers[0])}),
    ):
        for index, message in enumerate(messages, 1):
            assert_equal(message.wait(), torch.full((PAGE,), float(index)))
    assert not dropped
    box.send("transfer", {})  # the next call confirms it


@on_ranks(2)
def test_a_forked_child_that_drops_letters_tells_nobody(rank: int) -> None:
    box, peer = shared_memory(), other(rank)
    message = expected(box, "transfer", peer, 4)
    box.send("transfer", {peer: torch.ones(1)})
    await_arrival(message)
    child = os.fork()
    if child == 0:
        del message
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    box.receive(peer)
    assert box.unread_transfers() == {peer: 4}
    dist.barrier()
    message.wait()
    while box.unread_transfers():
        wait_for({box: [peer]}, "transfer")


@on_ranks(2)
def test_another_length_or_purpose_than_expected_is_an_error_that_says_both_and_stays(rank: int) -> None:
    for purpose, numel, match in (
        ("gather", 2, r"came to an all-gather \(8 bytes\) where rank 1 came to an all-gather \(12 bytes\)"),
        ("reduction", 3, r"came to a reduce-scatter \(12 bytes\) where rank 1 came to an all-gather \(12 bytes\)"),
    ):
        box = shared_memory()
        if rank == 0:
            box.send(purpose, {1: torch.ones(numel)})
        else:
            message = expected(box, "gather", 0, 12)
            with pytest.raises(RankMismatchError, match=match):
                message.wait()
            with pytest.raises(RankMismatchError, match=match):
                message.wait()
            with pytest.raises(RankMismatchError, match=match):
                box.send("gather", {})
            with pytest.raises(RankMismatchError, match=match):
                expected(box, "gather", 0, 4).wait()
            assert not message.is_completed()
        dist.barrier()


@pytest.mark.parametrize("case", ["one root", "by hand", "without gradients"])
@on_ranks(2)
def test_ranks_that_run_units_of_one_size_in_another_order_are_told(case: str, rank: int) -> None:
    group = dist.new_group()
    blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if case == "one root":
        model: Any = FSDP(blocks, process_group=group, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})).module
        text = r"Ranks run different units, .*'weight' of unit '0' .*, rank 1 has parameter 'weight' of unit '1'"
    else:
        model = nn.Sequential(*(FSDP(block, process_group=group) for block in blocks))
        text = r"Ranks run different units, .*, rank 1 has another parameter 'weight' of unit 'Linear'"
    if case == "without gradients":
        # Only steps with gradients compare units before their first all-gather; otherwise the transport compares.
        text = r"came to the all-gather of another unit \(40 bytes\) where .* came to the all-gather of unit 'Linear'"
    for _ in range(2):
        with pytest.raises(RankMismatchError, match=text), torch.set_grad_enabled(case != "without gradients"):
            model[rank](torch.ones(2, 4))
    dist.barrier()


@on_ranks(2)
def test_what_one_rank_alone_does_to_a_model_and_its_class_do_not_make_it_another_unit(rank: int) -> None:
    kind = type(f"Linear{rank}", (nn.Linear,), {})
    model, twin = (FSDP(nn.Sequential(FSDP(kind(4, 4)), kind(4, 4))) for _ in range(2))
    if rank == 0:
        model.check_is_root()
    twin.load_state_dict(model.state_dict())
    x = torch.ones(2, 4)
    assert_equal(twin(x), model(x))


@on_ranks(2)
def test_a_dropped_letter_does_not_swallow_another_message(rank: int) -> None:
    box = shared_memory()
    if rank == 0:
        box.send("transfer", {1: torch.ones(1)})
    else:
        message = expected(box, "gather", 0, 8)
        del message
        message = expected(box, "transfer", 0, 4)
        with pytest.raises(
            RankMismatchError, match=r"came to a transfer \(4 bytes\) where rank 1 came to an all-gather \(8 bytes\)"
        ):
            message.wait()
    dist.barrier()


@on_ranks(2)
def test_short_messages_share_memory_and_files(rank: int) -> None:
    box, peer = shared_memory(), other(rank)
    before = len(os.listdir("/proc/self/fd"))
    messages = [expected(box, "transfer", peer, 4000) for _ in range(100)]
    for index in range(100):
        box.send("transfer", {peer: torch.full((1000,), float(index))})
    dist.barrier()
    for index, message in enumerate(messages):
        assert_equal(message.wait(), torch.full((1000,), float(index)))
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    dist.barrier()


@on_ranks(4)
def test_a_message_to_several_ranks_is_written_once(rank: int) -> None:
    box = shared_memory()
    if rank == 0:
        box.send("transfer", dict.fromkeys((1, 2, 3), torch.ones(module._SEGMENT_NBYTES // 4)))
        assert box.nbytes == module._SEGMENT_NBYTES
    else:
        assert_equal(
            expected(box, "transfer", 0, module._SEGMENT_NBYTES).wait(), torch.ones(module._SEGMENT_NBYTES // 4)
        )
    dist.barrier()


@on_ranks(2)
def test_a_rank_that_reads_nothing_is_named_after_the_groups_timeout(rank: int) -> None:
    box = shared_memory(timeout_s=TIMEOUT_S)

    def send_many() -> None:
        for _ in range(100_000):
            box.send("gather", {1: torch.ones(1)})

    if rank == 0:
        told = r"was in an all-gather \(.*\), which failed \(nothing has come from rank\(s\) \[1\]"
        with impatient(), pytest.raises(PeerFailureError, match=told):
            send_many()
    dist.barrier()


@on_ranks(2)
def test_a_rank_that_does_not_come_is_named_after_the_groups_timeout(rank: int) -> None:
    box = shared_memory(timeout_s=TIMEOUT_S)
    if rank == 0:
        message = expected(box, "gather", 1, 4)
        assert not message.is_completed()
        told = r"nothing has come from rank\(s\) \[1\] within the group's 1 s"
        with impatient(), pytest.raises(PeerFailureError, match=told):
            message.wait()
    dist.barrier()


@on_ranks(2)
def test_a_rank_that_waits_long_says_for_which_rank_and_unit(rank: int) -> None:
    box = shared_memory()
    box.names[7] = "layers.0"
    dist.barrier()
    if rank == 1:
        wait_until("rank 0 has waited")
        box.send("reduction", {0: torch.ones(1)}, unit=7)
    else:
        with impatient(), logged("rank 0 has waited") as said:
            expected(box, "reduction", 1, 4, unit=7).wait()
        (text,) = said
        told = "rank 0 of the group has waited 0 s for rank(s) [1] in the reduce-scatter of unit 'layers.0' ("
        assert text.startswith(told)
    dist.barrier()


def end_in_the_middle(seen: Path, child_s: float) -> None:
    """Rank 1 sends one message of two and is gone, with a child that lives on and with notes that it has not read."""
    box = shared_memory()
    if dist.get_rank() == 1:
        box.send("gather", {0: torch.ones(2)})
        if os.fork() == 0:
            time.sleep(child_s)
            os._exit(0)
        while not (seen.parent / "sent").exists():
            time.sleep(0.01)
        os._exit(7)
    box.send("gather", {1: torch.ones(2)})
    (seen.parent / "sent").touch()
    messages = [expected(box, "gather", 1, 8) for _ in range(2)]
    time.sleep(0.5)
    assert_equal(messages[0].wait(), torch.ones(2))
    with pytest.raises(PeerFailureError, match="Rank 1 of the group has ended or closed its connections while rank 0"):
        messages[1].wait()
    with pytest.raises(PeerFailureError, match="Rank 1 of the group has ended"):
        box.send("gather", {1: torch.ones(2)})
    seen.touch()


def test_a_rank_that_has_ended_is_named_at_once(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 1: died with exit code 7"):
        ranks(2).run(end_in_the_middle, tmp_path / "seen", 3.0)
    assert (tmp_path / "seen").exists()


def open_files() -> set[tuple[int, str]]:
    """The descriptors of this process with what each refers to, which a number alone does not say."""
    files = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            files.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return files


@on_ranks(2)
def test_files_and_connections_of_a_group_go_with_it(rank: int) -> None:
    group = dist.new_group(use_local_synchronization=True)
    dist.barrier()  # both have made theirs
    before = open_files()
    box = transport_of(RankGroup.of(group))
    assert box is not None
    message = expected(box, "gather", other(rank), 4)
    box.send("gather", {other(rank): torch.ones(1)})
    message.wait()
    opened = open_files() - before
    assert len(opened) == 4, "a socket, own memory as a file and mapped, the other's mapped"
    dist.barrier()
    del box, message
    gc.collect()
    assert opened <= open_files(), "the group is there"
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert not opened & open_files()


OBSTACLES = {
    "switched off": mock.patch.dict(os.environ, {"FSDP_FLAT_SHARED_MEMORY": "0"}),
    "no shared memory": mock.patch.object(connect, "_shares_memory", return_value=False),
    "another host": mock.patch.object(connect, "_host", return_value=b"elsewhere"),
    "no connections": mock.patch.object(socket.socket, "connect", side_effect=ConnectionRefusedError),
}


@on_ranks(2, 4)
@pytest.mark.parametrize("obstacle", list(OBSTACLES))
def test_ranks_that_cannot_all_share_memory_do_without(obstacle: str, rank: int, num_ranks: int) -> None:
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(connect, "_SETUP_S", 1.0))
        if rank == num_ranks - 1:
            patches.enter_context(OBSTACLES[obstacle])
        rank_group = RankGroup.of(dist.new_group())
        assert transport_of(rank_group) is None
    assert transport_of(rank_group) is None, "and nobody is asked again"


def listen_with_a_silent_stranger(timeout_s: float) -> socket.socket | None:
    """Listen, where another process of this user has connected before any rank, and says nothing."""
    listener = LISTEN(timeout_s)
    assert listener is not None
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(listener.getsockname())
    STRANGERS.append(stranger)
    return listener


LISTEN, STRANGERS = connect._listen, list[socket.socket]()


@on_ranks(3)
def test_a_stranger_that_says_nothing_holds_up_nobody(rank: int) -> None:
    with mock.patch.object(connect, "_listen", listen_with_a_silent_stranger):
        assert transport_of(RankGroup.of(dist.new_group())) is not None
    STRANGERS.pop().close()


# The interpreter may be in a folder that others cannot read, so it starts as root.
FLOOD = """
import os, re, socket
parent = os.getppid()
os.setgid(65534)
os.setuid(65534)
print("started", flush=True)
while os.getppid() == parent:
    for name in re.findall(r"@(fsdp_flat-\\w+)", open("/proc/net/unix").read()):
        try:
            for _ in range(50):
                each = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                each.setblocking(False)
                each.connect(b"\\0" + name.encode())
                each.close()
        except OSError:
            pass
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@on_ranks(2)
def test_another_user_that_connects_all_the_time_does_not_stop_ranks_from_starting(rank: int) -> None:
    with ExitStack() as stack, subprocess.Popen([sys.executable, "-c", FLOOD], stdout=subprocess.PIPE) as flood:
        try:
            assert flood.stdout is not None
            flood.stdout.readline()
            dist.barrier()
            stack.enter_context(mock.patch.object(connect, "_SETUP_S", 2.0))
            for _ in range(3):
                group = dist.new_group()
                transport_of(RankGroup.of(group))  # or gloo, if no connection came through
                value = torch.ones(1)
                dist.all_reduce(value, group=group)
                assert value == 2
        finally:
            flood.kill()
