"""Connect the ranks of a run: rank 0 admits those that prove the secret, and proves it to them.

The port is open to everybody who reaches it. A client that does not introduce itself in time, or wrongly, is dropped;
it delays no rank.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any

from pydantic import Field

from gptj_ft.distributed.control import LINE_BYTES, NAME_SHOWN, SILENT_SECONDS, Control, Message, PeerFailed, Welcome
from gptj_ft.system.plain_text import escape_controls, shortened

HELLO_BYTES, HELLO_SECONDS = 4096, 10.0  # for a stranger to introduce itself
MOST_STRANGERS = 64  # the oldest is dropped: file descriptors are few


class _Hello(Message):
    """Introduction of a rank to rank 0; the proof answers rank 0's nonce."""

    rank: Annotated[int, Field(ge=1)]
    name: str
    nonce: Annotated[str, Field(min_length=32, max_length=32)]
    proof: str


class _Stranger:
    """An accepted connection that has not yet proved to be a rank of the run."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self.deadline = connection, time.monotonic() + HELLO_SECONDS
        self.nonce, self._read = secrets.token_hex(16), b""
        self.send({"nonce": self.nonce})

    def send(self, line: Mapping[str, Any]) -> None:
        """Send a short line; an empty buffer takes it at once."""
        with suppress(OSError):
            self.connection.send(json.dumps(line).encode() + b"\n")

    def read(self) -> _Hello | None:
        """Read; return the hello if it is complete.

        Raises:
            ValueError, OSError: it ended, or is malformed.
        """
        try:
            read = self.connection.recv(HELLO_BYTES)
        except BlockingIOError:
            return None
        self._read += read
        if not read or len(self._read) > HELLO_BYTES:
            raise ValueError("ended")
        return _Hello.model_validate(json.loads(self._read)) if self._read.endswith(b"\n") else None


def _proof(token: str, nonce: str, rank: int) -> str:
    """Return the answer of a rank to the other's nonce; the rank in it keeps it from being sent back as one's own."""
    return hmac.new(token.encode(), f"{nonce} {rank}".encode(), "sha256").hexdigest()


class _Door:
    """Where ranks connect to rank 0: those that have proved the token, and strangers that have not yet."""

    def __init__(self, listener: socket.socket, size: int, token: str) -> None:
        listener.setblocking(False)
        self._listener, self._size, self._token = listener, size, token
        self._strangers = dict[socket.socket, _Stranger]()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self.admitted = dict[int, socket.socket]()  # by rank
        self.hosts = dict[int, str]()  # names of machines by rank, as the ranks tell them

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come."""
        return [rank for rank in range(1, self._size) if rank not in self.admitted]

    def wait(self) -> None:
        """Take in clients and their introductions, for at most half a second."""
        ready = [key.fileobj for key, _ in self._selector.select(0.5)]
        if self._listener in ready:
            if len(self._strangers) >= MOST_STRANGERS:
                self._drop(next(iter(self._strangers.values())))
            with suppress(OSError):
                connection, _ = self._listener.accept()
                self._strangers[connection] = _Stranger(connection)
                self._selector.register(connection, selectors.EVENT_READ)
        for stranger in list(self._strangers.values()):
            try:
                hello = stranger.read() if stranger.connection in ready else None
                if hello is not None:
                    self._admit(stranger, hello)
                elif time.monotonic() > stranger.deadline:
                    self._drop(stranger)
            except (OSError, ValueError, RecursionError):
                self._drop(stranger)

    def _admit(self, stranger: _Stranger, hello: _Hello) -> None:
        """Exchange proofs.

        Raises:
            ValueError: the client is not a rank of this run, or this rank has come already.
        """
        proof = _proof(self._token, stranger.nonce, hello.rank)
        is_known = hmac.compare_digest(hello.proof.encode(), proof.encode())
        if not is_known or hello.rank not in self.missing:
            stranger.send({"refused": True})
            raise ValueError("not a rank of this run")
        stranger.send({"proof": _proof(self._token, hello.nonce, 0)})
        self._forget(stranger)
        self.admitted[hello.rank], self.hosts[hello.rank] = stranger.connection, hello.name

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger.connection]

    def _drop(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.connection.close()

    def close(self, keeps_ranks: bool) -> None:
        """Drop the strangers; without ``keeps_ranks`` also the ranks."""
        for stranger in list(self._strangers.values()):
            self._drop(stranger)
        self._selector.close()
        for connection in () if keeps_ranks else self.admitted.values():
            connection.close()


def host_control(
    listener: socket.socket,
    size: int,
    token: str,
    name: str,
    seconds: float,
    check_children: Callable[[], None] = lambda: None,
    ends_process: bool = True,
    store_port: int = 0,
) -> Control:
    """Accept the connections of all other ranks, on rank 0. Other clients are dropped and delay nothing.

    Args:
        listener: listening socket.
        token: secret of the run. Rank 0 and each other rank prove to each other that they know it, and never send it.
        name: name of this machine for messages.
        seconds: time for all to connect.
        check_children: called about twice a second; may raise if a rank has died.
        ends_process: see `Control`.
        store_port: port of the rendezvous for tensors, which only ranks of the run learn.

    Raises:
        PeerFailed: a rank has not connected, or is gone again.
    """
    door, is_complete = _Door(listener, size, token), False
    try:
        _wait_for_all(door, size, seconds, check_children)
        names = [f"process {rank + 1} ({shortened(door.hosts.get(rank, name), NAME_SHOWN)})" for rank in range(size)]
        welcome = Welcome(names=names, store_port=store_port)
        for rank, connection in door.admitted.items():
            connection.settimeout(SILENT_SECONDS)
            try:
                connection.sendall(welcome.to_line())
            except OSError as error:
                raise PeerFailed(f"{names[rank]} is gone", 1, rank) from error
        is_complete = True
    finally:
        door.close(keeps_ranks=is_complete)
    return Control(0, welcome, door.admitted, ends_process)


def _wait_for_all(door: _Door, size: int, seconds: float, check_children: Callable[[], None]) -> None:
    """Wait until all ranks have come.

    Raises:
        PeerFailed: the time is over.
    """
    deadline = time.monotonic() + seconds
    next_check = 0.0
    while door.missing:
        door.wait()
        if time.monotonic() >= next_check:
            check_children()
            next_check = time.monotonic() + 0.5
        if (missing := door.missing) and time.monotonic() > deadline:
            number = ", ".join(str(rank + 1) for rank in missing)
            text = f"{len(missing)} of {size} processes have not come within {seconds:g} s: number {number}"
            raise PeerFailed(f"{text}; look at what they say, and whether the ports are open", 1, -1)


def join_control(
    address: tuple[str, int], rank: int, token: str, name: str, seconds: float, ends_process: bool = True
) -> Control:
    """Connect to rank 0 at an address, from another rank. Other arguments: as `host_control`.

    Raises:
        PeerFailed: nobody answers there, the one who answers does not know the token, or refuses this rank's.
    """
    deadline = time.monotonic() + seconds
    where = f"process 1 at {address[0]}:{address[1]}"
    while True:
        try:
            connection = socket.create_connection(address, timeout=5.0)
            if _is_accepted(connection, rank, token, name, where):
                break
            reason = "the connection ended"  # strangers crowd it, or rank 0 has not started listening yet
        except (OSError, ValueError, RecursionError) as error:
            reason = str(error)
        if time.monotonic() > deadline:
            raise PeerFailed(f"{where} cannot be reached: {shortened(reason, 200)}", 1, 0)
        time.sleep(0.1)
    try:
        welcome = Welcome.model_validate(json.loads(_read_line(connection, LINE_BYTES, deadline)))
    except (OSError, ValueError, RecursionError) as error:
        raise PeerFailed("process 1 is gone, before all had come", 1, 0) from error
    names = [escape_controls(each) for each in welcome.names]
    return Control(rank, welcome.model_copy(update={"names": names}), {0: connection}, ends_process)


def _is_accepted(connection: socket.socket, rank: int, token: str, name: str, where: str) -> bool:
    """Exchange proofs with rank 0; false if the connection ends before.

    Raises:
        PeerFailed: a proof is wrong.
    """
    end, nonce = time.monotonic() + HELLO_SECONDS, secrets.token_hex(16)
    try:
        theirs = str(json.loads(_read_line(connection, HELLO_BYTES, end))["nonce"])
        hello = _Hello(rank=rank, name=name[:NAME_SHOWN], nonce=nonce, proof=_proof(token, theirs, rank))
        connection.sendall(hello.to_line())
        answer = json.loads(_read_line(connection, HELLO_BYTES, end))
        proof = answer.get("proof", "")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        connection.close()
        return False
    if not hmac.compare_digest(str(proof).encode(errors="replace"), _proof(token, nonce, 0).encode()):
        connection.close()
        text = "is GPTJ_FT_TOKEN the same everywhere, and each rank started once?"
        raise PeerFailed(f"{where} does not accept process {rank + 1}: {text}", 1, 0)
    return True


def _read_line(connection: socket.socket, most: int, deadline: float) -> bytes:
    """Read one line, byte by byte: bytes behind it are for `Control`."""
    line = bytearray()
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        read = connection.recv(1)
        if not read or len(line) > most or time.monotonic() > deadline:
            raise ValueError("the connection ended")
        line += read
    return bytes(line)
