"""Parse launcher environments, connect ranks, gather facts, detect failures."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from support.thread_group import Hub, Member
from torch._subclasses.fake_tensor import FakeTensorMode

from gptj_ft.config.resolve import build
from gptj_ft.distributed import launch
from gptj_ft.distributed.admission import MOST_STRANGERS, host_control, join_control
from gptj_ft.distributed.control import Control, PeerFailed, Welcome
from gptj_ft.distributed.environment import check_same_environment
from gptj_ft.distributed.launch import Membership, interface_to, joined, token_of
from gptj_ft.distributed.pipeline import Partition
from gptj_ft.distributed.process_group import ProcessGroup
from gptj_ft.distributed.training import DistributedTraining
from gptj_ft.errors import DataError, Interrupted, UsageError
from gptj_ft.system import accelerator
from gptj_ft.system.group import ALONE
from gptj_ft.system.plain_text import escape_controls
from gptj_ft.training.finetune import use_threads
from gptj_ft.training.reporter import Reporter

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"}
SLURM = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "MASTER_ADDR": "10.0.0.1",
}  # fmt: skip


def test_launcher_environment_is_parsed() -> None:
    assert Membership.of(TORCHRUN) == Membership(1, 3, 1, ("10.0.0.1", 29401))
    assert Membership.of({**TORCHRUN, "GPTJ_FT_PORT": "5000"}) == Membership(1, 3, 1, ("10.0.0.1", 5000))
    assert Membership.of(SLURM) == Membership(2, 4, 2, ("10.0.0.1", 29501))


@pytest.mark.parametrize(
    ("devices", "way"),
    [(["a 1", "a 2"], "from device to device"), (["a 1", "a 1"], "through host"), (["a 1", ""], "through host")],
)
def test_nccl_needs_one_device_per_rank(monkeypatch, devices, way) -> None:
    said, links = [{"device": device} for device in devices], Partition(ALONE, (0, 1, 0, 1, 1)).links
    assert links == [(0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1)]
    monkeypatch.setenv("GPTJ_FT_NCCL", "1")
    monkeypatch.setattr(accelerator, "device_id", lambda device: "1")
    used = defaultdict[tuple[str, int], list[Any]](list)

    def begin(name: str, values: torch.Tensor, peer: int, way: Any, tag: int) -> Any:
        used[name, peer].append(way)
        return SimpleNamespace(wait=lambda: None)

    transport = SimpleNamespace(
        is_nccl_available=lambda: True, new_group=lambda **_: next(groups),
        isend=partial(begin, "isend"), irecv=partial(begin, "irecv"),
    )  # fmt: skip
    is_direct = way == "from device to device"
    for rank in range(2):
        groups = iter("abcd")
        control: Any = SimpleNamespace(
            rank=rank, size=2, names=[], gather=lambda *_: said, waiting=contextlib.nullcontext
        )
        process = ProcessGroup(control, 2, rank, transport=transport)
        with FakeTensorMode():
            assert way in process.connect(torch.device("cuda"), links)
        assert process.wire(torch.device("cuda")).type == ("cuda" if is_direct else "cpu")
    assert used["isend", 0] == used["irecv", 1]
    assert used["isend", 1] == used["irecv", 0]
    # Each way and each direction has its own: neither waits for what the other has asked for ahead.
    assert sorted(used["isend", 0] + used["isend", 1]) == (list("abcd") if is_direct else [])


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, 1),
        ({**TORCHRUN, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 1),  # of launchers that do not say it
        (TORCHRUN, 0),
        ({**SLURM, "SLURM_LOCALID": "1"}, 1),
        (SLURM, 0),
    ],
)
def test_local_rank_is_parsed(said: dict[str, str], number: int) -> None:
    member = Membership.of(said)
    assert member is not None
    assert member.local_rank == number


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("host-a", "host-a"), ("host-a,host-b", "host-a"), ("node[01-03,7],gpu1", "node01"), ("a.b[5,9]", "a.b5")],
)
def test_slurm_step_has_own_port(nodes: str, host: str) -> None:
    def address(job: int, step: int) -> tuple[str, int]:
        own = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_STEP_NODELIST": nodes, "MASTER_ADDR": ""}
        member = Membership.of({**SLURM, **own})
        assert member is not None
        assert member.address is not None
        return member.address

    assert address(7, 0)[0] == host
    ports = {address(job, step)[1] for job in range(100, 120) for step in range(10)}
    assert len(ports) == 200
    assert all(20000 < port < 29000 and port + 1 not in ports for port in ports)


def test_complex_slurm_host_list_needs_scontrol() -> None:
    with pytest.raises(UsageError, match=r"cannot tell the first host of r\[1-2\]n\[1-2\]: .*; set MASTER_ADDR"):
        Membership.of({**SLURM, "MASTER_ADDR": "", "SLURM_STEP_NODELIST": "r[1-2]n[1-2]"})


def test_slurm_local_size_follows_node() -> None:
    tasks = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3(x2),1"}
    found = [Membership.of({**tasks, "SLURM_NODEID": str(node)}) for node in range(3)]
    assert [member.local_size for member in found if member] == [3, 3, 1]
    with pytest.raises(UsageError, match=r"SLURM_STEP_TASKS_PER_NODE is '3\(x2\),1'"):
        Membership.of({**tasks, "SLURM_NODEID": "3"})


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_slurm_shell_is_single_process(name) -> None:
    step = {**SLURM, "SLURM_JOB_NAME": name}
    assert Membership.of(step, has_terminal=lambda: True) is None
    assert Membership.of(step, has_terminal=lambda: False) is not None
    assert Membership.of({**step, "SLURM_STEP_ID": "4294967290"}) is None  # of the shell that salloc opens


def test_accelerate_without_multi_gpu_is_rejected() -> None:
    silent = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(UsageError, match="accelerate launch starts several processes only with --multi_gpu"):
        Membership.of(silent)
    assert Membership.of({"ACCELERATE_MIXED_PRECISION": "no"}) is None


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {**SLURM, "SLURM_NTASKS": "1"},
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"},
    ],
)
def test_no_launcher_means_single_process(environment: dict[str, str]) -> None:
    assert Membership.of(environment) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "first"}, "RANK is 'first' in the environment"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"RANK": "-1"}, "RANK is -1 in the environment, and should be from 0 to 2"),
        ({"RANK": "3"}, "RANK is 3 in the environment, and should be from 0 to 2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is 0"),
        ({"MASTER_PORT": "65535"}, "MASTER_PORT is 65535"),
        ({"GPTJ_FT_PORT": "70000"}, "GPTJ_FT_PORT is 70000"),
    ],
)
def test_bad_launcher_variable_is_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Membership.of({**TORCHRUN, **change})


@pytest.mark.parametrize("text", ["soon", "", "-1", "0", "inf", "nan"])
def test_time_to_start_is_checked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.START, text)
    if text:
        with pytest.raises(UsageError, match=f"GPTJ_FT_START_SECONDS is '{text}' in the environment"):
            launch.start_seconds()
    else:
        assert launch.start_seconds() == 300.0


def test_public_network_needs_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe(socket.socket):
        def connect(self, address: Any) -> None:
            pass

        def getsockname(self) -> Any:
            return "127.0.0.1", 1

        def getpeername(self) -> Any:
            return "8.8.8.8", 29500

    with pytest.raises(UsageError, match=r"MASTER_ADDR host is 8.8.8.8, on a public network"):
        interface_to(("host", 29500), Probe)
    monkeypatch.setenv("GPTJ_FT_PUBLIC_NETWORK", "1")
    assert interface_to(("host", 29500), Probe)[1] == "127.0.0.1"


def test_launcher_conflicts_with_nproc(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="--nproc 2, and a launcher has started 3 processes"), joined(2):
        raise AssertionError


@pytest.fixture
def controls() -> Iterator[list[Control]]:
    """Three connected ranks, as threads of this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(3) as pool:
        address = listener.getsockname()
        first = pool.submit(host_control, listener, 3, "token", "a", 10.0, ends_process=False)
        others = [
            pool.submit(join_control, address, rank, "token", name, 10.0, ends_process=False)
            for rank, name in ((1, "b"), (2, "c"))
        ]
        members = [first.result(), *(other.result() for other in others)]
    yield members
    for each in members:
        each.close(KeyboardInterrupt())


def at_once(controls: list[Control], work: Any) -> list[Any]:
    with ThreadPoolExecutor(len(controls)) as pool:
        return [future.result() for future in [pool.submit(work, each) for each in controls]]


def test_gather_matches_topics_and_ranks(controls: list[Control]) -> None:
    def work(each: Control) -> list[list[dict[str, Any]]]:
        topics = ["loss", "stop", "loss"]
        return [each.gather(topic, {"rank": each.rank, "turn": turn, "x": 0.1}) for turn, topic in enumerate(topics)]

    for found in at_once(controls, work):
        assert found == [[{"rank": rank, "turn": turn, "x": 0.1} for rank in range(3)] for turn in range(3)]


def test_subgroup_gathers_without_rank_zero(controls: list[Control]) -> None:
    """Rank 0 forwards messages of a group that it is not in."""

    def work(each: Control) -> list[list[dict[str, Any]]]:
        found = [each.gather("norm", {"rank": each.rank}, [1, 2]) for _ in range(3)] if each.rank else []
        return [*found, each.gather("norm", {"rank": -each.rank})]

    first, second, third = at_once(controls, work)
    together = [{"rank": 0}, {"rank": -1}, {"rank": -2}]
    assert first == [together]
    assert second == third == [[{"rank": 1}, {"rank": 2}]] * 3 + [together]


@pytest.mark.parametrize("failing", [0, 1])
def test_error_reaches_all_with_exit_code(controls: list[Control], failing: int) -> None:
    controls[failing].close(DataError("row 7 is damaged"))
    for rank in {0, 1, 2} - {failing}:
        with pytest.raises(
            PeerFailed, match=rf"process {failing + 1} \({'abc'[failing]}\): row 7 is damaged"
        ) as caught:
            controls[rank].gather("loss", {})
        assert caught.value.exit_code == DataError.exit_code
        assert not caught.value.is_gone


def test_early_stop_reaches_all_ranks(controls: list[Control]) -> None:
    controls[2].close(KeyboardInterrupt())
    with pytest.raises(PeerFailed, match=r"process 3 \(c\): stopped") as caught:
        controls[1].gather("plan", {})
    assert caught.value.exit_code == Interrupted.exit_code


@pytest.mark.parametrize("gone", [0, 2])
def test_dead_rank_is_detected_at_once(controls: list[Control], gone: int) -> None:
    began = time.monotonic()
    controls[gone]._closed = True  # it says nothing more
    for each in controls[gone]._sockets.values():
        each.shutdown(socket.SHUT_RDWR)
    for rank in {0, 1, 2} - {gone}:
        with pytest.raises(PeerFailed, match=rf"process {gone + 1} \({'abc'[gone]}\) is gone"):
            controls[rank].gather("loss", {})
    assert time.monotonic() - began < 3.0


@pytest.mark.thorough
def test_silent_rank_counts_as_dead(controls: list[Control]) -> None:
    controls[0].silent_seconds = 3.0  # heartbeats of the others come every two
    controls[1]._closed = True  # no heartbeat any more, and the connection stands
    with pytest.raises(PeerFailed, match=r"process 2 \(b\) does not answer any more"):
        controls[0].gather("loss", {})


def test_nonsense_message_ends_run(controls: list[Control]) -> None:
    controls[1]._sockets[0].sendall(b"not a line of ours\n")
    with pytest.raises(PeerFailed, match=r"process 2 \(b\) sent a malformed message"):
        controls[0].gather("loss", {})


def test_orderly_leaving_is_no_failure(controls: list[Control]) -> None:
    at_once(controls, lambda each: each.gather("end", {}))
    at_once(controls, lambda each: each.close())
    assert all(each._failure is None for each in controls)


@pytest.mark.parametrize(
    "line", [b"[1]\n", b"null\n", b"[" * 100_000, '{"rank": 1, "proof": "\u00e9"}\n'.encode(), b""]
)
def test_strangers_neither_end_nor_delay_start(line: bytes) -> None:
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as pool:
        address = listener.getsockname()
        first = pool.submit(host_control, listener, 2, "token", "a", 10.0, ends_process=False)
        with socket.create_connection(address) as stranger:
            with contextlib.suppress(OSError):
                stranger.sendall(line)
            second = pool.submit(join_control, address, 1, "token", "b", 10.0, ends_process=False).result()
            assert at_once([first.result(), second], lambda each: each.gather("x", {})) == [[{}, {}]] * 2
    assert time.monotonic() - began < 5
    first.result().close(KeyboardInterrupt())
    second.close(KeyboardInterrupt())


@pytest.mark.parametrize("failing", [0, 1])
def test_failed_rank_ends_waits_of_both(controls: list[Control], failing: int) -> None:
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(each.gather, f"topic of {each.rank}", {}) for each in controls]
        controls[failing].fail(DataError("a bad row"))
        try:
            errors = [wait.exception(timeout=10) for wait in waits]
        finally:  # a thread that still waits would hold the test
            at_once(controls, lambda each: each._fail(PeerFailed("the end", 1, 0)))
    assert [str(error) for error in errors if error] == [
        "a bad row" if rank == failing else f"{controls[rank].names[failing]}: a bad row" for rank in range(3)
    ]
    assert {error.exit_code for error in errors} == {DataError.exit_code}
    at_once(controls, lambda each: each.close(DataError("a bad row")))


@pytest.mark.parametrize(
    "message", [b"[1]\n", b'{"kind": "failed", "rank": 1, "text": "", "code": 0}\n', b"[" * 100_000 + b"\n"]
)
def test_malformed_message_ends_run_with_error(controls: list[Control], message: bytes) -> None:
    controls[1]._sockets[0].sendall(message)
    with pytest.raises(PeerFailed, match=r"process 2 \(b\) sent a malformed message") as caught:
        controls[0].gather("loss", {})
    assert caught.value.exit_code == 1


def test_idle_strangers_are_dropped_for_ranks() -> None:
    with contextlib.ExitStack() as opened, ThreadPoolExecutor(2) as pool:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = listener.getsockname()
        first = pool.submit(host_control, listener, 2, "token", "a", 10.0, ends_process=False)
        for _ in range(2 * MOST_STRANGERS):
            opened.enter_context(socket.create_connection(address))
        join_control(address, 1, "token", "b", 5.0, ends_process=False).close(KeyboardInterrupt())
        first.result().close(KeyboardInterrupt())


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "line", [b"", b'{"nonce": "x"}\n', b'{"nonce": "x"}\n{"proof": "\xff"}\n', b"[1]\n", b"[" * 9000]
)
def test_rank_accepts_no_stranger_as_first(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptj_ft.distributed.admission.HELLO_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()

        def pretend() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].sendall(line)

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(PeerFailed, match="cannot be reached"):
            join_control(address, 1, "token", "b", 0.3, ends_process=False)


@pytest.mark.usefixtures("_same_threads")
def test_launched_run_listens_locally_without_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.START, "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    before = listening()

    def wait() -> None:
        with launch.connected(Membership(0, 2, 2, ("127.0.0.1", port)), "the token"):
            raise AssertionError

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(wait)
        while ("127.0.0.1", port) not in (opened := listening() - before):
            time.sleep(0.01)
        assert {host for host, _ in opened} == {"127.0.0.1"}
        told = b""
        for address in opened:
            with socket.create_connection(address, 0.2) as stranger, contextlib.suppress(TimeoutError):
                stranger.sendall(b'{"rank": 1}\n')
                told += stranger.recv(1000)
        assert set(json.loads(told)) == {"nonce"}  # no store answers before all have come
        with pytest.raises(PeerFailed, match="1 of 2 processes have not come"):
            first.result()


def listening() -> set[tuple[str, int]]:
    return {tuple(each.laddr) for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def test_secret_of_a_machine_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTJ_FT_HOME", str(tmp_path))
    one, several = Membership(0, 2, 2, ("127.0.0.1", 1)), Membership(0, 2, 1, ("10.0.0.1", 1))
    token = token_of(one, {})
    assert len(token) == 32
    assert token_of(one, {}) == token
    assert token_of(one, {"GPTJ_FT_TOKEN": "mine"}) == "mine"
    for damaged in ("tok\u00e9", ""):
        (tmp_path / "token").write_text(damaged, encoding="utf-8")
        with pytest.raises(UsageError, match="token"):
            token_of(one, {})
    assert token_of(several, {}) == ""
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(UsageError, match="others may read it"):
        token_of(one, {})


HOSTILE_VALUES = (
    None, True, -1, 0, 1, 2, 2**63, 10**4000, 1e308, math.inf, math.nan, "", "loss", "\xe9", "\x1b[2J\x07", "\ud800",
    "x" * 100_000, [], [0, 1], [1, 1], [[0]], {}, {"x": 1.0}, {"x": "\x1b[2J"}, {"y": []},
)  # fmt: skip
VALID_MESSAGES: tuple[dict[str, Any], ...] = (
    {"kind": "facts", "topic": "loss", "turn": 0, "facts": {"x": 1.0}, "among": [0, 1]},
    {"kind": "answer", "topic": "loss", "turn": 0, "every": [{"x": 1.0}, {"x": 1.0}]},
    {"kind": "failed", "rank": 1, "text": "no", "code": 3, "gone": False},
    {"kind": "left"},
    {"kind": "beat"},
    {"rank": 1, "name": "b", "nonce": "0" * 32, "proof": ""},
)


def hostile_message(random: Random) -> bytes:
    """Return a line of random bytes, a wrong value, or a message with wrong fields."""
    form = random.random()
    if form < 0.1:
        return random.randbytes(random.randrange(300)) + b"\n"
    message: Any = random.choice(HOSTILE_VALUES)
    if form > 0.2:
        message = dict(random.choice(VALID_MESSAGES))
        for _ in range(random.randrange(3)):
            message[random.choice([*message, "surplus"])] = random.choice(HOSTILE_VALUES)
        if random.random() < 0.2:
            del message[random.choice([*message])]
    line = json.dumps(message).encode()
    return (line[: random.randrange(len(line))] if random.random() < 0.1 else line) + b"\n"


MANY = [200, pytest.param(10_000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_messages", MANY)
def test_hostile_strangers_cost_a_start_nothing(num_messages: int) -> None:
    random = Random(num_messages)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        address = listener.getsockname()
        first = pool.submit(host_control, listener, 2, "token", "a", 1000.0, ends_process=False)
        for _ in range(num_messages):
            with socket.create_connection(address) as stranger, contextlib.suppress(OSError):
                stranger.sendall(hostile_message(random))
        second = join_control(address, 1, "token", "b", 10.0, ends_process=False)
        assert at_once([first.result(), second], lambda each: each.gather("x", {})) == [[{}, {}]] * 2
        at_once([first.result(), second], lambda each: each.close())


@pytest.mark.parametrize("num_messages", MANY)
def test_hostile_peer_is_named_or_harmless(num_messages: int) -> None:
    random, outcomes, opened = Random(num_messages), defaultdict[str, int](int), deque[socket.socket]()
    welcome = Welcome(names=["process 1 (a)", "process 2 (b)"], store_port=0)
    with ThreadPoolExecutor(1) as pool:
        for number in range(num_messages):
            rank, (own, peers) = number % 2, socket.socketpair()
            control = Control(rank, welcome, {1 - rank: own}, ends_process=False)
            found = pool.submit(control.gather, "loss", {"x": 1.0})
            with peers, contextlib.suppress(OSError):
                peers.sendall(message := hostile_message(random))
                peers.sendall(json.dumps(VALID_MESSAGES[rank]).encode() + b"\n")
            try:
                outcome = "answered" if found.result(10) == [{"x": 1.0}] * 2 else "changed"
            except PeerFailed as error:
                text, peer = str(error), f"process {2 - rank} ({'ba'[rank]})"
                is_clean = escape_controls(text) == text and error.exit_code in range(1, 256)
                outcome = "named" if text.startswith((peer, "process 2 (b)")) and is_clean else text
            assert outcome in ("named", "answered"), message
            outcomes[outcome] += 1
            control.close(KeyboardInterrupt())
            opened.append(own)
            if len(opened) > 50:  # its thread has ended
                opened.popleft().close()
    for own in opened:
        own.close()
    assert min(outcomes["named"], outcomes["answered"]) > num_messages // 100, "each occurs; the counts vary with time"


@pytest.mark.parametrize("facts", [{}, {"x": "text"}, {"x": [1.0]}, {"x": 1.0, "y": 1}])
def test_facts_of_another_shape_name_the_peer(facts: dict[str, Any], controls: list[Control]) -> None:
    def work(each: Control) -> None:
        with pytest.raises(PeerFailed, match=r"process 3 \(c\) sent a malformed message"):
            each.gather("loss", {"x": 1.0})

    line = {**VALID_MESSAGES[0], "facts": facts, "among": [0, 1, 2]}
    controls[2]._sockets[0].sendall(json.dumps(line).encode() + b"\n")
    at_once(controls[:2], work)


def test_rank_that_left_ends_the_others_wait(controls: list[Control]) -> None:
    controls[2].close()
    with pytest.raises(PeerFailed, match=r"process 3 \(c\) left before the others"):
        controls[0].gather("loss", {"x": 1.0})


def test_wrong_token_cannot_join() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(3) as pool:
        address = listener.getsockname()
        first = pool.submit(host_control, listener, 2, "token", "a", 10.0, ends_process=False)
        stranger = pool.submit(join_control, address, 1, "guess", "x", 3.0, ends_process=False)
        with pytest.raises(PeerFailed, match=r"process 1 at .* does not accept process 2: is GPTJ_FT_TOKEN the same"):
            stranger.result()
        second = pool.submit(join_control, address, 1, "token", "b", 10.0, ends_process=False)
        assert at_once([first.result(), second.result()], lambda each: each.gather("x", {})[1]) == [{}, {}]
        first.result().close(KeyboardInterrupt())
        second.result().close(KeyboardInterrupt())


def test_missing_ranks_are_named() -> None:
    message = r"2 of 3 processes have not come within 0.1 s: number 2, 3"
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(PeerFailed, match=message):
        host_control(listener, 3, "token", "a", 0.1)


@pytest.mark.thorough
def test_dead_child_ends_start(tmp_path: Path) -> None:
    """--nproc watches its children instead of waiting five minutes for a dead one."""
    code = (
        "import sys\nfrom gptj_ft.distributed import launch\n"
        "import subprocess\n"
        "dead = [sys.executable, '-c', 'raise SystemExit(9)']\n"
        "launch.start_others = lambda *_: [subprocess.Popen(dead)]\n"
        "with launch.joined(2):\n    pass\n"
    )
    environment = {**os.environ, "GPTJ_FT_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert "process 2 is gone, with exit code 9" in done.stderr


STOPPED = """
import os, signal, subprocess, sys, time
from gptj_ft.distributed import control, launch
control.SILENT_SECONDS = 1.0

def start(member, token, _):
    own = {launch.TOKEN: token, launch.STORE: str(member.store), "RANK": "1", "WORLD_SIZE": "2"}
    started.append(subprocess.Popen([sys.executable, __file__], env={**os.environ, **own, "LOCAL_WORLD_SIZE": "2"}))
    return started

started, launch.start_others = [], start
with launch.joined(None if "RANK" in os.environ else 2) as group:
    group.gather("before", {})
    if started:
        started[0].send_signal(signal.SIGSTOP)
        time.sleep(4.0)
        started[0].send_signal(signal.SIGCONT)
    print(group.gather("after", {"rank": group.rank}))
"""


@pytest.mark.thorough
def test_stopped_rank_of_one_machine_may_go_on(tmp_path: Path) -> None:
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED)
    environment = {**os.environ, "GPTJ_FT_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=90)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["[{'rank': 0}, {'rank': 1}]"] * 2), done.stderr


def test_single_process_does_not_import_launch() -> None:
    code = "import sys, gptj_ft.cli.app; print(json.dumps([m for m in sys.modules if 'launch' in m or 'control' in m]))"
    done = subprocess.run([sys.executable, "-c", f"import json; {code}"], capture_output=True, text=True, check=True)
    assert "gptj_ft.distributed.launch" not in json.loads(done.stdout)


def test_thread_mismatch_needs_explicit_threads() -> None:
    said = [{"facts": {"torch": "2", "threads": threads}} for threads in (8, 6)]
    message = "process 2 has threads 6, process 1 has 8: .* on all machines; use --set threads=6"
    with pytest.raises(UsageError, match=message):
        check_same_environment(said)
    check_same_environment(said, threads=4)


def test_fewer_threads_give_warning() -> None:
    told: list[str] = []
    group = Member(Hub(2), 0)

    class Listener(Reporter):
        def on_message(self, message: str) -> None:
            told.append(message)

    reporter = Listener()
    now = torch.get_num_threads()
    for group.threads_alone in (None, now, now + 1):
        use_threads(build({}), DistributedTraining(group), reporter)
    (text,) = told
    assert f"with {now} thread" in text
    assert f"one alone with {now + 1}" in text
    assert f"--set threads={now}" in text
    try:
        use_threads(build({"threads": now + 1}), DistributedTraining(group), reporter)
        assert (torch.get_num_threads(), len(told)) == (now + 1, 1)
    finally:
        torch.set_num_threads(now)


def test_cores_are_divided_by_ranks() -> None:
    assert [launch.threads_of(Membership(0, 4, here), cores=8) for here in (1, 2, 3, 16)] == [8, 4, 2, 1]


@pytest.fixture
def _same_threads() -> Iterator[None]:
    """Restore the number of threads that joining changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("_same_threads")
@pytest.mark.parametrize("meets_in", ["a file", "a socket"])
def test_waiting_rank_heeds_signal(meets_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"GPTJ_FT_STORE": str(tmp_path / "store"), "GPTJ_FT_TOKEN": "token"}
    if meets_in == "a socket":
        place = {"MASTER_ADDR": "127.0.0.1", "GPTJ_FT_PORT": str(port), "MASTER_PORT": "1"}
    member = Membership.of({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **place})
    assert member is not None
    began = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt), launch.connected(member, "token"):
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 10


def test_rank_zero_death_at_start_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as pool:
        address = listener.getsockname()
        dying = pool.submit(host_control, listener, 3, "token", "a", 1.0)
        second = pool.submit(join_control, address, 1, "token", "b", 10.0, ends_process=False)
        with pytest.raises(PeerFailed, match="1 of 3 processes have not come"):
            dying.result()
        with pytest.raises(PeerFailed, match="process 1 is gone, before all had come"):
            second.result()
