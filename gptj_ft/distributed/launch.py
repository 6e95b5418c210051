"""Connect the ranks of a run: started here by --nproc, or by torchrun, accelerate or Slurm.

torchrun's environment names the ranks as torch.distributed's ``env://`` reads it. `Membership` also reads that of
Slurm and the number of ranks on a machine. --nproc starts ranks with `subprocess` instead of torch's
``elastic.multiprocessing``: rank 0 has to remain the user's own process, which has the terminal and gets Ctrl-C.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import math
import os
import platform
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from gptj_ft.distributed.admission import host_control, join_control
from gptj_ft.distributed.control import ENDING_SECONDS, PeerFailed
from gptj_ft.distributed.process_group import NCCL, NO_TIMEOUT, ProcessGroup
from gptj_ft.errors import UsageError
from gptj_ft.system.group import ALONE, Group
from gptj_ft.system.paths import make_home
from gptj_ft.system.plain_text import shortened
from gptj_ft.system.scratch import scratch_folder

START = "GPTJ_FT_START_SECONDS"  # until every rank has connected
START_SECONDS = 300.0
STORE = "GPTJ_FT_STORE"  # rendezvous file of --nproc
TOKEN = "GPTJ_FT_TOKEN"  # shared secret; --nproc makes one
FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm numbers the steps of shells, scripts and containers from here
MOST_RANKS, MOST_PORT, MOST_NUMBER = 2**20, 65535, 2**63 - 1
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Membership:
    """The place of a process among the ranks of a run."""

    rank: int
    size: int
    local_size: int  # ranks on this machine
    address: tuple[str, int] | None = None  # host and port of the rendezvous; None: it is a file
    store: Path | None = None  # rendezvous file, for ranks of one machine
    local_rank: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str], has_terminal: Callable[[], bool] | None = None) -> Membership | None:
        """Read the environment of a launcher; None: single process.

        Raises:
            UsageError: it is incomplete or contains a value that is no number.
        """
        if {"RANK", "WORLD_SIZE"} <= environment.keys():
            size = _number(environment, "WORLD_SIZE", least=1, most=MOST_RANKS)
            rank = _number(environment, "RANK", most=size - 1)
            local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, least=1, most=size)
            local_rank = _number(environment, "LOCAL_RANK", rank % local_size, most=size - 1)
        elif _is_slurm_step(environment, has_terminal or _has_terminal):
            size = _number(environment, "SLURM_NTASKS", least=1, most=MOST_RANKS)
            rank = _number(environment, "SLURM_PROCID", most=size - 1)
            local_size, local_rank = _slurm_local_size(environment), _number(environment, "SLURM_LOCALID", 0)
        elif "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_ADDR" in environment:
            # Without accelerators, accelerate starts a single process, silently.
            raise UsageError("accelerate launch starts several processes only with --multi_gpu, on CPUs, too: add it")
        else:
            return None
        if size == 1:
            return None
        if STORE in environment:
            return cls(rank, size, local_size, None, Path(environment[STORE]), local_rank)
        host = environment.get("MASTER_ADDR") or _first_slurm_host(environment)
        if not host:
            raise UsageError("RANK and WORLD_SIZE are set, MASTER_ADDR is not: start it by torchrun, or set all three")
        # The launcher itself uses MASTER_PORT on its machine.
        port = 1 + _number(environment, "MASTER_PORT", _default_port(environment), least=1, most=MOST_PORT - 1)
        port = _number(environment, "GPTJ_FT_PORT", port, least=1, most=MOST_PORT)
        return cls(rank, size, local_size, (host, port), None, local_rank)


def _number(
    environment: Mapping[str, str], name: str, default: int | None = None, least: int = 0, most: int = MOST_NUMBER
) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        number = int(text or "")
    except ValueError:
        raise UsageError(f"{name} is {shortened(text or '')!r} in the environment, and should be a number") from None
    if not least <= number <= most:
        raise UsageError(f"{name} is {shortened(text or '')} in the environment, and should be from {least} to {most}")
    return number


def start_seconds() -> float:
    """Return the seconds until every rank must have connected."""
    text = os.environ.get(START)
    with suppress(ValueError):
        if 0.0 < (seconds := float(text or START_SECONDS)) < math.inf:
            return seconds
    raise UsageError(f"{START} is {shortened(text or '')!r} in the environment, and should be a number of seconds")


def _is_slurm_step(environment: Mapping[str, str], has_terminal: Callable[[], bool]) -> bool:
    """Tell whether srun has started several tasks; a shell in an allocation is a single process."""
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= environment.keys() or environment.get("SLURM_NTASKS", "1") == "1":
        return False
    if _number(environment, "SLURM_STEP_ID") >= FIRST_SPECIAL_STEP:
        return False
    # Under `salloc`, a shell of `srun --pty` and the tasks of `srun` have the same job name; tasks have no terminal.
    return environment.get("SLURM_JOB_NAME") not in ("bash", "sh", "interactive") or not has_terminal()


def _has_terminal() -> bool:
    """Tell whether this process has a controlling terminal, even if its input and output are redirected."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True


def _slurm_local_size(environment: Mapping[str, str]) -> int:
    """Return the tasks on this machine, from a list such as ``2(x3),1`` for four machines."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    tasks = list[int]()
    try:
        for part in text.split(","):
            count, _, times = part.partition("(x")
            tasks += [int(count)] * int(times.rstrip(")") or 1)
        return tasks[_number(environment, "SLURM_NODEID", 0)]
    except (ValueError, IndexError):
        raise UsageError(f"SLURM_STEP_TASKS_PER_NODE is {text!r} in the environment, and has no such machine") from None


def _default_port(environment: Mapping[str, str]) -> int:
    """Return the default MASTER_PORT; Slurm steps differ, because jobs may share a machine."""
    if "RANK" in environment or "SLURM_JOB_ID" not in environment:
        return 29500
    # Even, because the run takes the port after it; below 32768, where Linux's temporary ports begin.
    return 20000 + 2 * ((10 * _number(environment, "SLURM_JOB_ID") + _number(environment, "SLURM_STEP_ID")) % 4500)


def _first_slurm_host(environment: Mapping[str, str]) -> str:
    """Return the first host of a step. Lists such as ``a,b`` and ``node[01-03,7]`` are parsed; Slurm expands others."""
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
    """Join the ranks of a run inside the block; an error on one rank ends all.

    Args:
        num_processes: ranks to start on this machine (--nproc); None: as the environment says.
        arguments: command line of the started ranks.

    Raises:
        UsageError: a launcher as well as --nproc, or an address on a public network.
        PeerFailed: another rank has failed, or has not connected.
    """
    member = Membership.of(os.environ)
    if member is not None and num_processes not in (None, member.size):
        raise UsageError(f"--nproc {num_processes}, and a launcher has started {member.size} processes: leave it out")
    if member is None and num_processes in (None, 1):
        yield ALONE
        return
    if member is not None:
        with connected(member, token_of(member, os.environ)) as group:
            yield group
        return
    assert num_processes is not None
    with scratch_folder() as folder:
        member = Membership(0, num_processes, num_processes, None, folder / "store")
        token = secrets.token_hex(16)
        children = start_others(member, token, arguments)

        def check_children() -> None:
            for rank, process in enumerate(children, start=1):
                if process.poll() is not None:
                    raise PeerFailed(f"process {rank + 1} is gone, with exit code {process.returncode}", 1, rank)

        try:
            with connected(member, token, check_children) as group:
                yield group
        finally:
            end_others(children)


def token_of(member: Membership, environment: Mapping[str, str]) -> str:
    """Return the secret that the ranks share.

    Without ``GPTJ_FT_TOKEN``, ranks of one machine share a private file in the home folder, and ranks of several
    machines have no secret.
    """
    if given := environment.get(TOKEN):
        return given
    if member.store is not None or member.local_size < member.size:
        return ""
    path = make_home() / "token"
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        if not path.exists():
            with open(draft, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(secrets.token_hex(16))
            with suppress(FileExistsError):  # another rank was first
                os.link(draft, path)
            draft.unlink()
        if path.stat().st_mode & 0o077 or path.is_symlink():
            raise UsageError(f"{path} is the secret of this machine's runs, and others may read it: remove it")
        if text := path.read_text(encoding="ascii"):
            return text
        raise UsageError(f"{path}, the secret of this machine's runs, is empty: remove it")
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot keep {path}, the secret of this machine's runs: {error}; set {TOKEN}") from error


def start_others(member: Membership, token: str, arguments: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Start the other ranks on this machine; they die with this process."""
    # The secret goes by the environment: every user of the machine can read a command line.
    common = {**os.environ, TOKEN: token, "WORLD_SIZE": str(member.size), "LOCAL_WORLD_SIZE": str(member.size)}
    common |= {STORE: str(member.store), "OMP_NUM_THREADS": str(threads_of(member))}
    return [
        subprocess.Popen(
            # -P: no module is imported from the working directory, which may be a stranger's.
            [sys.executable, "-P", "-m", "gptj_ft", *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only rank 0, which tells the others
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        for rank in range(1, member.size)
    ]


def _die_with_parent() -> None:
    # A parent that is killed cannot end its children: the kernel does.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_others(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all started ranks have ended; kill those that need over 10 seconds."""
    deadline = time.monotonic() + 10.0
    for process in children:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))
    for process in children:
        if process.poll() is None:
            process.kill()
            process.wait()


def threads_of(member: Membership, cores: int | None = None) -> int:
    """Return the CPU threads of a rank: the cores, by default all available, divided by the ranks of this machine."""
    # OMP_NUM_THREADS counts only with --nproc: torchrun sets it to 1 on any machine.
    if member.store is not None and (set_by_user := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        return max(1, int(set_by_user))
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // member.local_size)


@contextmanager
def connected(member: Membership, token: str, check_children: Callable[[], None] = lambda: None) -> Iterator[Group]:
    """Connect to the other ranks inside the block.

    Args:
        token: shared secret of the ranks; may be empty.
        check_children: called while rank 0 waits; may raise.
    """
    # torch warns of harmless events: an unknown name, an address of the other family.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch
    import torch.distributed as dist

    seconds, threads_alone = start_seconds(), torch.get_num_threads()
    torch.set_num_threads(threads_of(member))
    interface, host = interface_to(member.address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if os.environ.get(NCCL) == "1":
        # Streams in one of the driver's queues (8 by default) wait for each other. Receives are posted early, and
        # everything behind them in a queue would wait.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    file = None if member.store is None else dist.FileStore(str(member.store), -1)  # type: ignore[attr-defined]
    name = platform.node()
    if member.rank == 0:
        # Only ranks that have proved the token learn the store's port.
        with _listening(host, member) as listener, socket.create_server((host, 0)) as for_store:
            if file is not None:
                file.set("control", json.dumps(listener.getsockname()[:2]))
            store_port = for_store.getsockname()[1]
            control = host_control(listener, member.size, token, name, seconds, check_children, store_port=store_port)
            store = file or _tcp_store(host, store_port, member, for_store.detach())
    else:
        control = join_control(_control_address(file, member), member.rank, token, name, seconds)
        target = member.address[0] if member.address else host
        store = file or _tcp_store(target, control.store_port, member)
    if member.store is not None:
        # A dead rank of this machine closes its connection; one that is silent was stopped (Ctrl-Z), and may go on.
        control.silent_seconds = math.inf
    group = ProcessGroup(control, member.local_size, member.local_rank, threads_alone if member.store else None)
    try:
        dist.init_process_group("gloo", store=store, rank=member.rank, world_size=member.size, timeout=NO_TIMEOUT)
        control.ending_seconds = ENDING_SECONDS
        yield group
    except BaseException as error:
        group.close(error)
        raise
    group.close()


def wait_until(condition: Callable[[], bool]) -> bool:
    """Poll a condition for at most `start_seconds`; return its last value. torch's own waits ignore signals."""
    end = time.monotonic() + start_seconds()
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _listening(host: str, member: Membership) -> socket.socket:
    """Listen for the other ranks, on the given host address alone."""
    port = member.address[1] if member.address else 0
    try:
        return socket.create_server((host, port))
    except OSError as error:
        text = f"process 1 cannot meet the others at {host}:{port}: {error.strerror}"
        raise UsageError(f"{text}; GPTJ_FT_PORT names a port") from error


def _control_address(file: Any, member: Membership) -> tuple[str, int]:
    """Return the address of rank 0, which the launcher or rank 0's rendezvous file names."""
    if member.address is not None:
        host, port = member.address
        if not wait_until(lambda: _answers(host, port)):
            text = f"process {member.rank + 1} cannot meet the others at {host}:{port}"
            raise UsageError(f"{text}: nobody answers there; GPTJ_FT_PORT names a port")
        return host, port
    if not wait_until(lambda: file.check(["control"])):
        raise PeerFailed(f"process 1 has not come within {start_seconds():g} s", 1, 0)
    address, port = json.loads(file.get("control"))
    return address, port


def _tcp_store(host: str, port: int, member: Membership, listener: int | None = None) -> Any:
    """Open the rendezvous for tensors; by itself, rank 0 would listen on every interface."""
    import torch.distributed as dist

    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, member.size, member.rank == 0, timedelta(seconds=start_seconds()), wait_for_workers=False,
            master_listen_fd=listener,
        )  # fmt: skip
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise PeerFailed(
            f"process {member.rank + 1} cannot connect to {host}:{port}: {reason}", 1, member.rank
        ) from error


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError:
        return False
    return True


def interface_to(
    address: tuple[str, int] | None, open_socket: Callable[..., socket.socket] = socket.socket
) -> tuple[str, str]:
    """Return the network interface towards the rendezvous, and this machine's address on it.

    Raises:
        UsageError: the network is public: tensors are not encrypted and reveal the texts.
    """
    if address is None:
        return "lo" if sys.platform == "linux" else "lo0", "127.0.0.1"
    import psutil

    with open_socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # sends nothing: the kernel only chooses a route
        except OSError as error:
            raise UsageError(f"MASTER_ADDR {address[0]} cannot be reached: {error}") from error
        host, remote = probe.getsockname()[0], probe.getpeername()[0]
    if not (ipaddress.ip_address(remote).is_private or os.environ.get("GPTJ_FT_PUBLIC_NETWORK") == "1"):
        raise UsageError(
            f"MASTER_ADDR {address[0]} is {remote}, on a public network: what processes send each other is not "
            "encrypted and gives texts away; use a private one, or set GPTJ_FT_PUBLIC_NETWORK=1"
        )
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == host for entry in entries):
            return name, host
    return "", host
