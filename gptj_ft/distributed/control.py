"""Connect the processes of a run through process 0: facts, errors, and who is still there.

Every process has one TCP connection to process 0, on which lines of JSON go both ways. A process that dies closes its
connection, which is seen at once; one that falls silent, because a cable or the power is gone, is noticed by the lack
of its heartbeats. Whatever happens to one process is told to all, so that all end with one message and one exit code.
"""

from __future__ import annotations

import hmac
import json
import os
import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from gptj_ft.errors import GptjFtError, Interrupted

BEAT_SECONDS, SILENT_SECONDS = 2.0, 20.0
# That the main thread has to notice a failure, until the process is ended under it: while processes connect, and later,
# when it may be in the middle of a layer. A transfer notices at once; or never, if its connection is not yet made.
STARTING_SECONDS, ENDING_SECONDS, TRANSFER_SECONDS = 2.0, 15.0, 2.0
LINE_BYTES = 64 * 2**20  # at most
_STDERR = 2


class PeerFailed(GptjFtError):
    """Another process of the run has failed, and has said why, or is gone; the exit code is that process's."""

    def __init__(self, message: str, exit_code: int, rank: int, is_gone: bool = True) -> None:
        super().__init__(message)
        self.exit_code, self.rank, self.is_gone = exit_code, rank, is_gone


class Control:
    """The connection of one process to the others of its run.

    Args:
        rank: number of this process.
        names: name of each process for messages, by rank.
        sockets: connection to each other process for process 0, to process 0 for the others; by rank.
        ends_process: whether a failure that the main thread does not notice, for it waits for one that is gone, ends
            the process; not in tests, where several ranks are threads of one.
    """

    def __init__(
        self, rank: int, names: list[str], sockets: Mapping[int, socket.socket], ends_process: bool = True
    ) -> None:
        self.rank, self.size, self.names = rank, len(names), names
        self._sockets, self._ends_process = dict(sockets), ends_process
        self._changed = threading.Condition()
        self._sending = {peer: threading.Lock() for peer in sockets}
        self._facts: dict[tuple[str, int], dict[int, dict[str, Any]]] = defaultdict(dict)
        self._answers: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self._turns: dict[str, int] = defaultdict(int)  # how often each topic has come
        self._heard = dict.fromkeys(sockets, time.monotonic())
        self._left, self._dead = set[int](), set[int]()
        self._failure: PeerFailed | None = None
        self._closed = self._noticed = False
        self._transfers: dict[int, float] = {}  # that a thread waits for, since when
        self.ending_seconds = STARTING_SECONDS
        for each in self._sockets.values():
            each.settimeout(SILENT_SECONDS)
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._listen, self._beat)]
        for thread in self._threads:
            thread.start()

    def gather(self, topic: str, facts: Mapping[str, Any], among: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Return the facts of every process on a topic, by rank; from any thread.

        Args:
            topic: subject; it may come again, and to some processes more often than to others.
            facts: JSON values by name.
            among: ranks of the processes that come to it; default: all.

        Raises:
            PeerFailed: a process has failed, or is gone.
        """
        ranks = list(among) or list(range(self.size))
        if len(ranks) < self.size:
            topic = f"{topic} of {ranks}"
        with self._changed:
            key = topic, self._turns[topic]
            self._turns[topic] += 1
        if self.rank == 0:
            self._take(0, key, dict(facts), ranks)
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
        """Mark the time in which this thread waits for a transfer."""
        self._transfers[threading.get_ident()] = time.monotonic()
        try:
            yield
        finally:
            del self._transfers[threading.get_ident()]

    def failure_behind(self, error: BaseException) -> PeerFailed:
        """Return the cause of a failed transfer: the news of it may come a moment later than the failure."""
        self._noticed = True
        deadline = time.monotonic() + 3 * BEAT_SECONDS
        with self._changed:
            while self._failure is None and self._changed.wait(deadline - time.monotonic()):
                pass
        return self._failure or PeerFailed(f"a connection between the processes failed: {error}", 1, -1)

    def close(self, error: BaseException | None = None) -> None:
        """Leave; an error is told to the others first.

        Without an error, process 0 leaves when all others have.
        """
        self._closed = True
        if error is not None and not isinstance(error, PeerFailed):
            text = str(error) or type(error).__name__
            code = int(getattr(error, "exit_code", 1))  # a command's own way to end has one, too
            if isinstance(error, KeyboardInterrupt):
                text, code = "stopped", Interrupted.exit_code
            self._tell({"failed": {"rank": self.rank, "text": text, "code": code}})
        elif error is None:
            self._tell({"left": self.rank})
            if self.rank == 0:
                with self._changed:
                    self._changed.wait_for(lambda: self._failure or self._left >= set(self._sockets), SILENT_SECONDS)
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
            with self._sending[peer]:
                self._sockets[peer].sendall(json.dumps(line).encode() + b"\n")
        except OSError:
            self._gone(peer)
            raise self._failure or PeerFailed(f"{self.names[peer]} is gone", 1, peer) from None

    def _listen(self) -> None:
        """Read what others say, until all have left."""
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
                        self._gone(peer)
                        continue
                    self._heard[peer] = time.monotonic()
                    *lines, buffers[peer] = (buffers[peer] + read).split(b"\n")
                    try:
                        for line in lines:
                            self._hear(peer, json.loads(line))
                    except (ValueError, KeyError, TypeError):
                        self._gone(peer, "says what nobody understands: is it another version?")
                for peer, heard in self._heard.items():
                    if time.monotonic() - heard > SILENT_SECONDS and peer not in self._left:
                        self._gone(peer, "does not answer any more")

    def _hear(self, peer: int, line: dict[str, Any]) -> None:
        if "facts" in line:
            topic, turn = line["topic"]
            self._take(peer, (topic, turn), line["facts"], line["among"])
        elif "all" in line:
            topic, turn = line["topic"]
            self._answer((topic, turn), line["all"])
        elif "left" in line:
            with self._changed:
                self._left.add(peer)
                self._changed.notify_all()
        elif "failed" in line:
            if self.rank == 0:
                self._tell(line, but=peer)
            failed = line["failed"]
            rank, is_gone = int(failed["rank"]), bool(failed.get("gone"))
            text = f"{self.names[rank]}{'' if is_gone else ':'} {failed['text']}"
            self._fail(PeerFailed(text, failed["code"], rank, is_gone))

    def _take(self, peer: int, key: tuple[str, int], facts: dict[str, Any], among: Sequence[int]) -> None:
        """Take a process's facts, in process 0; give them to all that come to the topic when they are complete."""
        with self._changed:
            found = self._facts[key]
            found[peer] = facts
            if len(found) < len(among):
                return
            del self._facts[key]
        every = [found[rank] for rank in among]
        self._tell({"topic": key, "all": every}, among=among)
        if self.rank in among:
            self._answer(key, every)

    def _answer(self, key: tuple[str, int], every: list[dict[str, Any]]) -> None:
        with self._changed:
            self._answers[key] = every
            self._changed.notify_all()

    def _gone(self, peer: int, how: str = "is gone") -> None:
        if peer in self._left or peer in self._dead or self._closed:
            return
        self._dead.add(peer)
        text = f"{self.names[peer]} {how}"
        if self.rank == 0:
            self._tell({"failed": {"rank": peer, "text": how, "code": 1, "gone": True}}, but=peer)
        self._fail(PeerFailed(text, 1, peer))

    def _fail(self, failure: PeerFailed) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = failure
            self._changed.notify_all()
        if self._ends_process and not self._closed:
            threading.Thread(target=self._end, args=(time.monotonic(),), daemon=True).start()

    def _end(self, failed: float) -> None:
        """End the process if its main thread does not: it may wait for a transfer that will never come.

        Args:
            failed: time of the failure.
        """
        assert self._failure is not None
        is_late = False
        while not is_late:
            time.sleep(0.1)
            if self._noticed or self._closed:
                return  # it ends by itself, and may be saving
            now = time.monotonic()
            is_late = now > failed + self.ending_seconds or any(
                now > max(failed, since) + TRANSFER_SECONDS for since in list(self._transfers.values())
            )
        if self.rank == 0 or (self._failure.rank == 0 and self._failure.is_gone):
            with suppress(OSError):
                os.write(_STDERR, f"\ngptj-ft: {self._failure}\n".encode())
        os._exit(self._failure.exit_code)

    def _beat(self) -> None:
        while not self._closed:
            self._tell({"beat": self.rank})
            time.sleep(BEAT_SECONDS)


def host_control(
    listener: socket.socket,
    size: int,
    token: str,
    name: str,
    seconds: float,
    look: Callable[[], None] = lambda: None,
    ends_process: bool = True,
) -> Control:
    """Accept the connections of all other processes, in process 0.

    Args:
        listener: socket that listens.
        size: number of processes.
        token: secret of this run; who does not know it is not let in.
        name: name of this process for messages.
        seconds: time for all to come.
        look: called now and then; may raise, if one is known not to come.
        ends_process: see `Control`.

    Raises:
        PeerFailed: somebody has not come; says who.
    """
    sockets: dict[int, socket.socket] = {}
    names = [f"process 1 ({name})"] + [f"process {rank + 1}" for rank in range(1, size)]
    deadline = time.monotonic() + seconds
    while len(sockets) < size - 1:
        listener.settimeout(0.5)
        try:
            connection, _ = listener.accept()
            connection.settimeout(10.0)
            hello = json.loads(_line(connection))
        except TimeoutError:
            look()
            if time.monotonic() < deadline:
                continue
            missing = [str(rank + 1) for rank in range(1, size) if rank not in sockets]
            text = f"{len(missing)} of {size} processes have not come within {seconds:g} s: number {', '.join(missing)}"
            raise PeerFailed(f"{text}; look at what they say, and whether the ports are open", 1, -1) from None
        except (OSError, ValueError):
            continue
        rank = hello.get("rank")
        if not hmac.compare_digest(str(hello.get("token")), token) or rank not in range(1, size) or rank in sockets:
            connection.close()
            continue
        sockets[rank], names[rank] = connection, f"process {rank + 1} ({hello['name']})"
    for connection in sockets.values():
        connection.sendall(json.dumps({"names": names}).encode() + b"\n")
    return Control(0, names, sockets, ends_process)


def join_control(
    address: tuple[str, int], rank: int, token: str, name: str, seconds: float, ends_process: bool = True
) -> Control:
    """Connect to process 0, from another one. Args and errors: as `host_control`; it is at ``address``."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection(address, timeout=5.0)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerFailed(f"process 1 at {address[0]}:{address[1]} cannot be reached: {error}", 1, 0) from None
            time.sleep(0.1)
    connection.sendall(json.dumps({"rank": rank, "token": token, "name": name}).encode() + b"\n")
    connection.settimeout(seconds)
    try:
        names = json.loads(_line(connection))["names"]
    except (OSError, ValueError) as error:
        raise PeerFailed("process 1 is gone, before all had come", 1, 0) from error
    return Control(rank, names, {0: connection}, ends_process)


def _line(connection: socket.socket) -> bytes:
    """Read one line, byte by byte: what follows it is for somebody else."""
    line = b""
    while not line.endswith(b"\n"):
        read = connection.recv(1)
        if not read or len(line) > LINE_BYTES:
            raise ValueError("the connection ended")
        line += read
    return line
