"""Makes two hosts on one machine: network namespaces joined by a link of a given rate.

It needs Linux, root, and the programs of iproute2 (``ip``, ``tc``) and util-linux (``unshare``, ``nsenter``). Each
namespace exists as long as a process in it, the first of which ends with this process, so nothing has to be removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

# Name of each host's end of the link.
INTERFACE = "fsdp0"
_ADDRESS = "10.0.0.{}"
_PORT = 29500
_PROGRAMS = ("ip", "tc", "unshare", "nsenter")
# Bytes that the link takes at once, and how long it keeps others until it can take them.
_BURST, _LATENCY = "256kb", "50ms"


class NoNetworkError(RuntimeError):
    """Reports that this machine cannot make hosts; the text says why."""


@dataclass(frozen=True)
class TwoHosts:
    """Holds the ids of two processes, each in the network namespace of a host, and the processes started there."""

    pids: tuple[int, int]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs ``command`` on a host, 0 or 1."""
        return ["nsenter", "--target", str(self.pids[host]), "--net", *command]

    def start(
        self, ranks_per_host: int, program: Sequence[str], logs: Sequence[Path], *, folder: Path
    ) -> list[subprocess.Popen[bytes]]:
        """Start a Python program on the ranks of both hosts by torchrun, in a folder that they share.

        Args:
            ranks_per_host: ranks, of one thread each.
            program: ``-m module`` or a file, and arguments.
            logs: for each host, the file that gets its output.
        """
        processes = []
        for host, path in enumerate(logs):
            where = ["--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", str(ranks_per_host)]
            where += ["--master-addr", _ADDRESS.format(1), "--master-port", str(_PORT)]
            command = self.command(host, [sys.executable, "-m", "torch.distributed.run", *where, *program])
            threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            with path.open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env={**os.environ, **threads, "GLOO_SOCKET_IFNAME": INTERFACE},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        self.processes.extend(processes)
        return processes

    def cut(self) -> None:
        """Let nothing pass the link from now on; no connection is closed."""
        _run(self.command(0, ["ip", "link", "set", "dev", INTERFACE, "down"]))

    def pids_on(self, host: int) -> list[int]:
        """Return the ids of the processes on a host, other than the one that keeps it."""
        own = os.stat(f"/proc/{self.pids[host]}/ns/net").st_ino
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.stat(folder / "ns/net").st_ino == own and int(folder.name) != self.pids[host]:
                    found.append(int(folder.name))
        return found

    def vanish(self, host: int) -> None:
        """End all processes on a host, without a notice to the other."""
        self.cut()
        self.end(host)

    def end(self, host: int) -> None:
        """End all processes on a host."""
        for pid in self.pids_on(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def sent_over_link() -> int:
    """Return the bytes that this process's host has sent over the link, with the headers of packets."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    raise NoNetworkError(f"This process is on no host that two_hosts made: it has no interface {INTERFACE!r}.")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoNetworkError(f"{' '.join(command)} failed: {done.stderr.strip() or done.returncode}")


@contextmanager
def two_hosts(gbit: float) -> Iterator[TwoHosts]:
    """Make two hosts, joined by a link of ``gbit`` Gbit/s each way, for the block; their processes end with it.

    Raises:
        NoNetworkError: this machine cannot; the text says why.
    """
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if sys.platform != "linux" or os.geteuid() != 0 or missing:
        why = f"the programs {', '.join(missing)}" if missing else "root on Linux"
        raise NoNetworkError(f"Hosts on one machine need {why}.")
    with ExitStack() as stack:
        keepers = []
        for _ in range(2):
            # It ends when the pipe is closed, at the latest with this process.
            keeper = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
            stack.callback(_end, keeper)
            _wait_for_namespace(keeper)
            keepers.append(keeper.pid)
        hosts = TwoHosts((keepers[0], keepers[1]))
        ends = [["name", INTERFACE, "netns", str(pid)] for pid in keepers]
        _run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
        for host in (0, 1):
            rate = ["rate", f"{round(gbit * 1000)}mbit", "burst", _BURST, "latency", _LATENCY]
            for command in (
                ["ip", "link", "set", "dev", "lo", "up"],
                ["ip", "address", "add", f"{_ADDRESS.format(host + 1)}/24", "dev", INTERFACE],
                ["ip", "link", "set", "dev", INTERFACE, "up"],
                ["tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *rate],
            ):
                _run(hosts.command(host, command))
        try:
            yield hosts
        finally:
            # First what may not have reached its host yet, or would start further processes there.
            for process in hosts.processes:
                process.kill()
                process.wait()
            for host in (0, 1):
                hosts.end(host)


def _wait_for_namespace(keeper: subprocess.Popen[bytes]) -> None:
    own = os.stat("/proc/self/ns/net").st_ino
    while os.stat(f"/proc/{keeper.pid}/ns/net").st_ino == own:
        if keeper.poll() is not None:
            assert keeper.stderr is not None
            raise NoNetworkError(f"unshare --net failed: {keeper.stderr.read().decode().strip()}")
        time.sleep(0.01)


def _end(keeper: subprocess.Popen[bytes]) -> None:
    keeper.kill()
    keeper.communicate()
