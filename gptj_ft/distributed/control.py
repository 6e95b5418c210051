"""The control plane of a run: facts, errors and liveness, over a TCP star around rank 0.

Every rank has one connection to rank 0, with JSON lines in both directions. A dead process closes its connection, which
its peer sees at once. A silent machine is detected by missing heartbeats. A failure of one rank reaches all ranks, so
that all end with one message and one exit code.

torch.distributed does not provide this:

* Object collectives unpickle, so that whoever reaches the port could run code. They also need the same order of calls
  on all ranks, while here a store's thread commits a step and the main thread is already in the next one: topics match
  the calls.
* A TCPStore does not report dead clients, and its waits ignore signals.
* The agent of torchrun sees only its own machine. It ends the other ranks without the name or the exit code of the
  failed one. `--nproc` and srun have no agent.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from gptj_ft.errors import GptjFtError, Interrupted
from gptj_ft.system.plain_text import escape_controls, one_line

BEAT_SECONDS, SILENT_SECONDS = 2.0, 20.0
# Time for the main thread to notice a failure before its process is ended: while processes connect; in training, where
# it may compute a layer; in a transfer, which fails at once, or never if its connection was not made yet.
STARTING_SECONDS, ENDING_SECONDS, TRANSFER_SECONDS = 2.0, 15.0, 2.0
LINE_BYTES = 64 * 2**20  # longest message
HELLO_BYTES, HELLO_SECONDS = 4096, 10.0  # for a stranger to introduce itself
_STDERR = 2
_MALFORMED = "sent a malformed message: is it another version?"


class PeerFailed(GptjFtError):
    """Another rank has failed or is gone. The exit code is that of the rank."""

    def __init__(self, message: str, exit_code: int, rank: int, is_gone: bool = True) -> None:
        super().__init__(message)
        self.exit_code, self.rank, self.is_gone = exit_code, rank, is_gone


class Control:
    """The connection of one rank to the others.

    Args:
        names: name of each rank, for messages.
        sockets: connections, by rank: rank 0 has one to each other rank, the others have one to rank 0.
        ends_process: whether to end the process if its main thread does not notice a failure. False in tests, whose
            ranks are threads.
    """

    def __init__(
        self, rank: int, names: list[str], sockets: Mapping[int, socket.socket], ends_process: bool = True
    ) -> None:
        self.rank, self.size, self.names = rank, len(names), names
        self._sockets, self._ends_process = dict(sockets), ends_process
        self._changed = threading.Condition()
        self._send_locks = {peer: threading.Lock() for peer in sockets}
        self._facts: dict[tuple[str, int], dict[int, dict[str, Any]]] = defaultdict(dict)  # on rank 0, incomplete
        self._answers: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self._turns: dict[str, int] = defaultdict(int)  # calls of `gather` by topic
        self._last_heard = dict.fromkeys(sockets, time.monotonic())
        self._left, self._dead = set[int](), set[int]()
        self._failure: PeerFailed | None = None
        self._closed = self._noticed = False
        self._transfers: dict[int, float] = {}  # start of each transfer that a thread waits for
        self.ending_seconds, self.silent_seconds = STARTING_SECONDS, SILENT_SECONDS
        for each in self._sockets.values():
            each.settimeout(SILENT_SECONDS)
        for run in (self._listen, self._beat):
            threading.Thread(target=run, daemon=True).start()

    def gather(self, topic: str, facts: Mapping[str, Any], among: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Return the facts of every rank, in rank order; from any thread.

        Args:
            topic: pairs the calls of the ranks; may repeat, and some ranks may use it more often than others.
            facts: JSON values by name.
            among: ranks that call; default: all.

        Raises:
            PeerFailed: another rank has failed or is gone.
        """
        ranks = list(among) or list(range(self.size))
        # Another subgroup may use the same topic, so its turns are counted apart.
        if len(ranks) < self.size:
            topic = f"{topic} of {ranks}"
        with self._changed:
            key = topic, self._turns[topic]
            self._turns[topic] += 1
        if self.rank == 0:
            self._add_facts(0, key, dict(facts), ranks)
        else:
            self._send(0, {"topic": key, "facts": facts, "among": ranks})
        with self._changed:
            while key not in self._answers:
                if self._failure:
                    self._noticed = True
                    raise self._failure
                self._changed.wait()
            return self._answers.pop(key)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark that this thread waits for a transfer."""
        self._transfers[threading.get_ident()] = time.monotonic()
        try:
            yield
        finally:
            del self._transfers[threading.get_ident()]

    def failure_behind(self, error: BaseException) -> PeerFailed:
        """Return the failure that has broken a transfer; its message may arrive a moment later than the error."""
        self._noticed = True
        deadline = time.monotonic() + 3 * BEAT_SECONDS
        with self._changed:
            while self._failure is None and self._changed.wait(deadline - time.monotonic()):
                pass
        return self._failure or PeerFailed(f"a connection between the processes failed: {error}", 1, -1)

    def close(self, error: BaseException | None = None) -> None:
        """Leave. An error is sent to the other ranks; without one, rank 0 waits until all have left."""
        self._closed = True
        if error is not None and not isinstance(error, PeerFailed):
            text = str(error) or type(error).__name__
            code = int(getattr(error, "exit_code", 1))
            if isinstance(error, KeyboardInterrupt):
                text, code = "stopped", Interrupted.exit_code
            self._tell({"failed": {"rank": self.rank, "text": text, "code": code}})
        elif error is None:
            self._tell({"left": self.rank})
            if self.rank == 0:
                with self._changed:
                    self._changed.wait_for(lambda: self._failure or self._left >= set(self._sockets), SILENT_SECONDS)
        # Not `close`: with unread input it would reset the connection, and the peer would lose our last messages.
        for each in self._sockets.values():
            with suppress(OSError):
                each.shutdown(socket.SHUT_WR)

    def _tell(self, line: Mapping[str, Any], but: int = -1, among: Sequence[int] = ()) -> None:
        for peer in among or self._sockets:
            if peer != but and peer in self._sockets and peer not in self._dead:
                with suppress(PeerFailed):
                    self._send(peer, line)

    def _send(self, peer: int, line: Mapping[str, Any]) -> None:
        try:
            with self._send_locks[peer]:
                self._sockets[peer].sendall(json.dumps(line).encode() + b"\n")
        except OSError:
            self._lose(peer)
            raise self._failure or PeerFailed(f"{self.names[peer]} is gone", 1, peer) from None

    def _listen(self) -> None:
        """Receive messages until every connection has ended."""
        buffers = dict.fromkeys(self._sockets, b"")
        with selectors.DefaultSelector() as selector:
            for peer, each in self._sockets.items():
                selector.register(each, selectors.EVENT_READ, peer)
            while selector.get_map():
                for ready, _ in selector.select(BEAT_SECONDS):
                    peer = ready.data
                    try:
                        read = self._sockets[peer].recv(1 << 20)
                    except OSError:
                        read = b""
                    if not read or len(buffers[peer]) > LINE_BYTES:
                        selector.unregister(self._sockets[peer])
                        self._lose(peer)
                        continue
                    self._last_heard[peer] = time.monotonic()
                    *lines, buffers[peer] = (buffers[peer] + read).split(b"\n")
                    try:
                        for line in lines:
                            self._receive(peer, json.loads(line))
                    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                        self._lose(peer, _MALFORMED)
                for peer, heard in self._last_heard.items():
                    if time.monotonic() - heard > self.silent_seconds and peer not in self._left:
                        self._lose(peer, "does not answer any more")

    def _receive(self, peer: int, line: dict[str, Any]) -> None:
        if not isinstance(line, dict):
            raise TypeError(line)
        if "facts" in line:
            topic, turn = line["topic"]
            among = [int(rank) for rank in line["among"]]
            if peer not in among or not set(among) <= set(range(self.size)):
                raise ValueError(among)
            self._add_facts(peer, (str(topic), int(turn)), dict(line["facts"]), among)
        elif "all" in line:
            topic, turn = line["topic"]
            self._set_answer((topic, turn), line["all"])
        elif "left" in line:
            with self._changed:
                self._left.add(peer)
                self._changed.notify_all()
        elif "failed" in line:
            failed = line["failed"]
            rank, code, is_gone = int(failed["rank"]), int(failed["code"]), bool(failed.get("gone"))
            # A rank may report only its own failure; rank 0 passes on those of others.
            if not 0 < code < 256 or rank not in range(self.size) or (self.rank == 0 and rank != peer):
                raise ValueError(failed)
            if self.rank == 0:
                self._tell(line, but=peer)
            reason = escape_controls(str(failed["text"]))  # it goes to the terminal
            self._fail(PeerFailed(f"{self.names[rank]}{'' if is_gone else ':'} {reason}", code, rank, is_gone))
        elif "beat" not in line:
            raise ValueError(line)

    def _add_facts(self, peer: int, key: tuple[str, int], facts: dict[str, Any], among: Sequence[int]) -> None:
        """Add the facts of a rank, on rank 0; when they are complete, answer all ranks that gather them."""
        with self._changed:
            messages = self._facts[key]
            messages[peer] = facts
            if len(messages) < len(among):
                return
            del self._facts[key]
        every = [messages[rank] for rank in among]
        self._tell({"topic": key, "all": every}, among=among)
        if self.rank in among:
            self._set_answer(key, every)

    def _set_answer(self, key: tuple[str, int], every: list[dict[str, Any]]) -> None:
        with self._changed:
            self._answers[key] = every
            self._changed.notify_all()

    def _lose(self, peer: int, how: str = "is gone") -> None:
        if peer in self._left or peer in self._dead or self._closed:
            return
        self._dead.add(peer)
        if self.rank == 0:
            self._tell({"failed": {"rank": peer, "text": how, "code": 1, "gone": True}}, but=peer)
        self._fail(PeerFailed(f"{self.names[peer]} {how}", 1, peer))

    def _fail(self, failure: PeerFailed) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = failure
            self._changed.notify_all()
        if self._ends_process and not self._closed:
            threading.Thread(target=self._end_process, args=(time.monotonic(),), daemon=True).start()

    def _end_process(self, failed_at: float) -> None:
        """End the process unless its main thread does: it may wait for a transfer that never comes."""
        assert self._failure is not None
        is_late = False
        while not is_late:
            time.sleep(0.1)
            if self._noticed or self._closed:
                return  # the main thread ends, and may be saving
            now = time.monotonic()
            is_late = now > failed_at + self.ending_seconds or any(
                now > max(failed_at, since) + TRANSFER_SECONDS for since in list(self._transfers.values())
            )
        # Rank 0 speaks for all, unless it is the one that is gone.
        if self.rank == 0 or (self._failure.rank == 0 and self._failure.is_gone):
            with suppress(OSError):
                os.write(_STDERR, f"\ngptj-ft: {self._failure}\n".encode())
        os._exit(self._failure.exit_code)

    def _beat(self) -> None:
        while not self._closed:
            self._tell({"beat": self.rank})
            time.sleep(BEAT_SECONDS)


# ------------------------------------------------------------------ connecting


class _Stranger:
    """An accepted connection that has not yet proved to be a rank of the run."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self.deadline = connection, time.monotonic() + HELLO_SECONDS
        self.nonce, self._read = secrets.token_hex(16), b""
        with suppress(OSError):
            connection.send(json.dumps({"nonce": self.nonce}).encode() + b"\n")

    def read(self) -> dict[str, Any] | None:
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
        if not self._read.endswith(b"\n"):
            return None
        hello = json.loads(self._read)
        if not isinstance(hello, dict):
            raise ValueError("malformed")
        return hello


def _proof(token: str, nonce: str, rank: int) -> str:
    return hmac.new(token.encode(), f"{nonce} {rank}".encode(), "sha256").hexdigest()


def host_control(
    listener: socket.socket,
    size: int,
    token: str,
    name: str,
    seconds: float,
    check_children: Callable[[], None] = lambda: None,
    ends_process: bool = True,
) -> Control:
    """Accept the connections of all other ranks, on rank 0. Other clients are dropped and delay nothing.

    Args:
        listener: listening socket.
        token: secret of the run. Ranks prove that they know it by the answer to a challenge.
        name: name of this machine for messages.
        seconds: time for all to connect.
        check_children: called twice a second; may raise if a rank has died.
        ends_process: see `Control`.

    Raises:
        PeerFailed: a rank has not connected.
    """
    sockets: dict[int, socket.socket] = {}
    names = [f"process 1 ({name})"] + [f"process {rank + 1}" for rank in range(1, size)]
    deadline, strangers = time.monotonic() + seconds, dict[socket.socket, _Stranger]()
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def drop(stranger: _Stranger) -> None:
            selector.unregister(stranger.connection)
            del strangers[stranger.connection]
            stranger.connection.close()

        while len(sockets) < size - 1:
            ready = [key.fileobj for key, _ in selector.select(0.5)]
            if not ready:
                check_children()
            if time.monotonic() > deadline:
                missing = [str(rank + 1) for rank in range(1, size) if rank not in sockets]
                number = ", ".join(missing)
                text = f"{len(missing)} of {size} processes have not come within {seconds:g} s: number {number}"
                raise PeerFailed(f"{text}; look at what they say, and whether the ports are open", 1, -1)
            if listener in ready:
                with suppress(OSError):
                    connection, _ = listener.accept()
                    strangers[connection] = _Stranger(connection)
                    selector.register(connection, selectors.EVENT_READ)
            for stranger in list(strangers.values()):
                try:
                    hello = stranger.read() if stranger.connection in ready else None
                    if hello is None:
                        if time.monotonic() > stranger.deadline:
                            drop(stranger)
                        continue
                    rank, proof, host = hello["rank"], str(hello["proof"]).encode(), one_line(str(hello["name"]))
                    is_known = hmac.compare_digest(proof, _proof(token, stranger.nonce, rank).encode())
                    # The exact type: `True` is an int and equals 1.
                    if not is_known or type(rank) is not int or rank not in range(1, size) or rank in sockets:
                        raise ValueError("not a rank of this run")
                except (OSError, ValueError, LookupError, RecursionError):
                    drop(stranger)
                    continue
                selector.unregister(stranger.connection)
                sockets[rank], names[rank] = stranger.connection, f"process {rank + 1} ({host})"
                del strangers[stranger.connection]
        for stranger in list(strangers.values()):
            drop(stranger)
    for connection in sockets.values():
        connection.settimeout(SILENT_SECONDS)
        connection.sendall(json.dumps({"names": names}).encode() + b"\n")
    return Control(0, names, sockets, ends_process)


def join_control(
    address: tuple[str, int], rank: int, token: str, name: str, seconds: float, ends_process: bool = True
) -> Control:
    """Connect to rank 0 at an address, from another rank. Other arguments and errors: as `host_control`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection(address, timeout=5.0)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerFailed(f"process 1 at {address[0]}:{address[1]} cannot be reached: {error}", 1, 0) from None
            time.sleep(0.1)
    connection.settimeout(seconds)
    try:
        nonce = str(json.loads(_read_line(connection))["nonce"])
        hello = {"rank": rank, "proof": _proof(token, nonce, rank), "name": name}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        names = json.loads(_read_line(connection))["names"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise PeerFailed("process 1 is gone, before all had come", 1, 0) from error
    return Control(rank, names, {0: connection}, ends_process)


def _read_line(connection: socket.socket) -> bytes:
    """Read one line, byte by byte: bytes behind it are for `Control`."""
    line = b""
    while not line.endswith(b"\n"):
        read = connection.recv(1)
        if not read or len(line) > LINE_BYTES:
            raise ValueError("the connection ended")
        line += read
    return line
