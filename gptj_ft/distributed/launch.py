"""Find the other processes of a run: those started here by ``--nproc``, or by torchrun, accelerate or Slurm.

`Membership.of` reads what a launcher has left in the environment; `start_others` makes processes of its own on this
machine; `joined` connects them. A run of one process imports nothing of it.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import platform
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from gptj_ft.distributed.control import ENDING_SECONDS, PeerFailed, host_control, join_control
from gptj_ft.distributed.process_group import NCCL, NO_TIMEOUT, ProcessGroup
from gptj_ft.errors import UsageError
from gptj_ft.system.group import ALONE, Group

START_SECONDS = float(os.environ.get("GPTJ_FT_START_SECONDS", "300"))  # for all to come: libraries load, jobs start
STORE, TOKEN = "GPTJ_FT_STORE", "GPTJ_FT_TOKEN"  # of the processes that `start_others` makes
FIRST_OF_ITS_OWN_STEPS = 0xFFFFFFF0  # shells, scripts and containers of a job have steps from here on
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Membership:
    """A process's place among those of its run.

    Attributes:
        rank: number of the process, from 0.
        size: number of processes.
        local_size: processes on this machine.
        address: host and port of the rendezvous; ``None``: all are on this machine, and meet in a file.
        store: file of the rendezvous; ``None``: there is an address.
        local_rank: number of the process among those of this machine, from 0.
    """

    rank: int
    size: int
    local_size: int
    address: tuple[str, int] | None = None
    store: Path | None = None
    local_rank: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Membership | None:
        """Read what a launcher says; ``None``: there is one process.

        Raises:
            UsageError: a part of it is missing, or no number.
        """
        names = ("RANK", "WORLD_SIZE")
        if "RANK" in environment and "WORLD_SIZE" in environment:
            rank, size = (_number(environment, name) for name in names)
            local = _number(environment, "LOCAL_WORLD_SIZE", 1)
            here = _number(environment, "LOCAL_RANK", rank % max(1, local))
        elif _is_slurm_step(environment):
            rank, size = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_NTASKS")
            local, here = _slurm_tasks_here(environment), _number(environment, "SLURM_LOCALID", 0)
        elif "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_ADDR" in environment:
            # It has been asked for several, and has started this one alone: without accelerators, it does so silently.
            raise UsageError("accelerate launch starts several processes only with --multi_gpu, on CPUs, too: add it")
        else:
            return None
        if size == 1:
            return None
        if STORE in environment:
            return cls(rank, size, local, None, Path(environment[STORE]), here)
        host = environment.get("MASTER_ADDR") or _first_slurm_host(environment)
        if not host:
            raise UsageError("RANK and WORLD_SIZE are set, MASTER_ADDR is not: start it by torchrun, or set all three")
        # Another port than the launcher's own, which is in use on its machine.
        port = _number(environment, "GPTJ_FT_PORT", _number(environment, "MASTER_PORT", _own_port(environment)) + 1)
        return cls(rank, size, local, (host, port), None, here)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(f"{name} is {text!r} in the environment, and should be a number") from None


def _is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Tell whether ``srun`` has started several tasks; a shell in an allocation is one process, whatever it has."""
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= environment.keys() or environment.get("SLURM_NTASKS", "1") == "1":
        return False
    if _number(environment, "SLURM_STEP_ID") >= FIRST_OF_ITS_OWN_STEPS:
        return False
    # Of `salloc` both a shell by `srun --pty` and tasks by `srun` have this name; tasks have no terminal.
    return environment.get("SLURM_JOB_NAME") not in ("bash", "sh", "interactive") or not _has_terminal()


def _has_terminal() -> bool:
    """Tell whether a terminal controls this process, wherever its input and output go."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True


def _slurm_tasks_here(environment: Mapping[str, str]) -> int:
    """Return the tasks of a step on this machine: ``2(x3),1`` is for four machines."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    tasks = list[int]()
    try:
        for part in text.split(","):
            count, _, times = part.partition("(x")
            tasks += [int(count)] * int(times.rstrip(")") or 1)
        return tasks[_number(environment, "SLURM_NODEID", 0)]
    except (ValueError, IndexError):
        raise UsageError(f"SLURM_STEP_TASKS_PER_NODE is {text!r} in the environment, and has no such machine") from None


def _own_port(environment: Mapping[str, str]) -> int:
    """Return the port that a launcher would have; that of a Slurm step is its own, for jobs share machines."""
    if "RANK" in environment or "SLURM_JOB_ID" not in environment:
        return 29500
    return 20000 + 2 * ((10 * _number(environment, "SLURM_JOB_ID") + _number(environment, "SLURM_STEP_ID")) % 4500)


def _first_slurm_host(environment: Mapping[str, str]) -> str:
    """Return the first host of a step: of ``host-a,host-b`` and ``node[01-03,7]`` it is seen; else Slurm knows it."""
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    if match := re.fullmatch(r"([^,\[\]]+)(\[(\d+)[-,\d]*\])?(,.*)?", nodes):
        return match[1] + (match[3] or "")
    if not nodes:
        return ""
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"cannot tell the first host of {nodes}: {error}; set MASTER_ADDR") from error
    return done.stdout.split()[0]


@contextmanager
def joined(num_processes: int | None = None, arguments: Sequence[str] = ()) -> Iterator[Group]:
    """Be one of the processes of a run, inside the block; a failure of one ends all.

    Args:
        num_processes: number of processes to make here; ``None``: as the environment says.
        arguments: the command line for the others.

    Raises:
        UsageError: both a launcher and a number of processes, or an address on a public network.
        PeerFailed: another process has failed, or has not come.
    """
    member = Membership.of(os.environ)
    if member is not None and num_processes not in (None, member.size):
        raise UsageError(f"--nproc {num_processes}, and a launcher has started {member.size} processes: leave it out")
    if member is None and num_processes in (None, 1):
        yield ALONE
        return
    if member is not None:
        with connected(member, os.environ.get(TOKEN, "")) as group:
            yield group
        return
    assert num_processes is not None
    with tempfile.TemporaryDirectory(prefix="gptj-ft-") as folder:
        member = Membership(0, num_processes, num_processes, None, Path(folder) / "store")
        token = secrets.token_hex(16)
        others = start_others(member, token, arguments)

        def look() -> None:
            for rank, process in enumerate(others, start=1):
                if process.poll() is not None:
                    raise PeerFailed(f"process {rank + 1} is gone, with exit code {process.returncode}", 1, rank)

        try:
            with connected(member, token, look) as group:
                yield group
        finally:
            end_others(others)


def start_others(member: Membership, token: str, arguments: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Start the other processes of a run on this machine; they end with this one, whatever ends it."""
    os.environ[TOKEN] = token
    common = {**os.environ, "WORLD_SIZE": str(member.size), "LOCAL_WORLD_SIZE": str(member.size)}
    common |= {STORE: str(member.store), "OMP_NUM_THREADS": str(threads_of(member))}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "gptj_ft", *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for process 0, which tells the others
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        for rank in range(1, member.size)
    ]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_others(others: Sequence[subprocess.Popen[bytes]], seconds: float = 10.0) -> None:
    """See to it that no process is left: they end by themselves, or are killed."""
    deadline = time.monotonic() + seconds
    for process in others:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))
    for process in others:
        if process.poll() is None:
            process.kill()
            process.wait()


def threads_of(member: Membership) -> int:
    """Return the threads that each process of this machine computes with: the cores, shared out.

    OMP_NUM_THREADS counts where processes are started by ``--nproc``; torchrun sets it to 1 whatever there is.
    """
    if member.store is not None and (given := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        return max(1, int(given))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // member.local_size)


@contextmanager
def connected(member: Membership, token: str, look: Callable[[], None] = lambda: None) -> Iterator[Group]:
    """Connect with the other processes, inside the block; meanwhile look whether they are there.

    Raises:
        UsageError: the address is on a public network.
        PeerFailed: another process has failed, or has not come.
    """
    # Its sockets warn of what is no fault: a name that is not known, an address of the other kind.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch
    import torch.distributed as dist

    threads_alone = torch.get_num_threads()
    torch.set_num_threads(threads_of(member))
    interface, host = interface_to(member.address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if os.environ.get(NCCL) == "1":
        # Streams that share one of the driver's queues, 8 if it is not told, wait for each other: for receives that are
        # asked for ahead, everything would.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    store: Any
    if member.store is not None:
        store = dist.FileStore(str(member.store), -1)  # type: ignore[attr-defined]
    else:
        assert member.address is not None
        store = _meet(member)
    name = platform.node()
    if member.rank == 0:
        with socket.create_server((host, 0)) as listener:
            token = token or secrets.token_hex(16)
            store.set("control", json.dumps([host, listener.getsockname()[1], token]))
            control = host_control(listener, member.size, token, name, START_SECONDS, look)
    else:
        try:
            if not comes(lambda: store.check(["control"])):
                raise PeerFailed(f"process 1 has not come within {START_SECONDS:g} s", 1, 0)
            there, port, token = json.loads(store.get("control"))
        except RuntimeError as error:
            raise PeerFailed("process 1 is gone, before all had come", 1, 0) from error
        control = join_control((there, port), member.rank, token, name, START_SECONDS)
    alone = threads_alone if member.store else None
    group = ProcessGroup(control, member.local_size, member.local_rank, alone)
    try:
        dist.init_process_group("gloo", store=store, rank=member.rank, world_size=member.size, timeout=NO_TIMEOUT)
        control.ending_seconds = ENDING_SECONDS
        yield group
    except BaseException as error:
        group.close(error)
        raise
    group.close()


def comes(is_there: Callable[[], bool]) -> bool:
    """Wait until something is there, but not longer than processes wait for each other; tell whether it is.

    A signal ends it at once; torch's own ways to wait heed none, and write a line of their own at every attempt.
    """
    end = time.monotonic() + START_SECONDS
    while not is_there():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _meet(member: Membership) -> Any:
    import torch.distributed as dist

    assert member.address is not None
    host, port = member.address
    where = f"process {member.rank + 1} cannot meet the others at {host}:{port}"
    if member.rank and not comes(lambda: _answers(host, port)):
        raise UsageError(f"{where}: nobody answers there; GPTJ_FT_PORT names a port")
    try:
        seconds = timedelta(seconds=START_SECONDS)
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, member.size, member.rank == 0, seconds, wait_for_workers=False
        )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{where}: {reason}; GPTJ_FT_PORT names a port") from error


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError:
        return False
    return True


def interface_to(address: tuple[str, int] | None) -> tuple[str, str]:
    """Return the network interface that leads to the rendezvous, and this machine's address on it.

    Raises:
        UsageError: it is on a public network: what is sent gives the texts away, and is not encrypted.
    """
    if address is None:
        return "lo" if sys.platform == "linux" else "lo0", "127.0.0.1"
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError as error:
            raise UsageError(f"MASTER_ADDR {address[0]} cannot be reached: {error}") from error
        host, there = probe.getsockname()[0], probe.getpeername()[0]
    if not (ipaddress.ip_address(there).is_private or os.environ.get("GPTJ_FT_PUBLIC_NETWORK") == "1"):
        raise UsageError(
            f"MASTER_ADDR {address[0]} is {there}, on a public network: what processes send each other is not "
            "encrypted and gives texts away; use a private one, or set GPTJ_FT_PUBLIC_NETWORK=1"
        )
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == host for entry in entries):
            return name, host
    return "", host
