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

import json
import os
import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from gptj_ft.errors import GptjFtError, Interrupted
from gptj_ft.system.plain_text import escape_controls

BEAT_SECONDS, SILENT_SECONDS = 2.0, 20.0
# Time for the main thread to notice a failure before its process is ended: while processes connect; in training, where
# it may compute a layer; in a transfer, which fails at once, or never if its connection was not made yet.
STARTING_SECONDS, ENDING_SECONDS, TRANSFER_SECONDS = 2.0, 15.0, 2.0
LINE_BYTES, LINE_SECONDS = 64 * 2**20, 60.0  # longest message, and time for it to arrive
MOST_PENDING = 1000  # topics that wait for facts; a run has a handful
NAME_SHOWN, TEXT_SHOWN = 64, 10_000  # characters of a machine's name and of an error
_STDERR = 2
_MALFORMED = "sent a malformed message: is it another version?"
_EARLY = "left before the others"


class Message(BaseModel):
    """A message between ranks, one JSON line; values of other types and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    def to_line(self) -> bytes:
        return json.dumps(self.model_dump()).encode() + b"\n"


Rank = Annotated[int, Field(ge=0, lt=2**20)]
Topic = Annotated[str, Field(max_length=1000)]
Turn = Annotated[int, Field(ge=0, lt=2**53)]


class _Facts(Message):
    """Facts of the sender, for rank 0."""

    kind: Literal["facts"] = "facts"
    topic: Topic
    turn: Turn  # number of earlier calls with this topic
    facts: dict[str, Any]
    among: list[Rank]  # ranks that gather


class _Answer(Message):
    """Facts of all that gather, from rank 0."""

    kind: Literal["answer"] = "answer"
    topic: Topic
    turn: Turn
    every: list[dict[str, Any]]


class _Failed(Message):
    """Failure of a rank; rank 0 passes it on."""

    kind: Literal["failed"] = "failed"
    rank: Rank
    text: Annotated[str, Field(max_length=TEXT_SHOWN)]
    code: Annotated[int, Field(gt=0, lt=256)]
    gone: bool = False


class _Left(Message):
    """Orderly end of the sender."""

    kind: Literal["left"] = "left"


class _Beat(Message):
    """Heartbeat."""

    kind: Literal["beat"] = "beat"


_AnyMessage = Annotated[_Facts | _Answer | _Failed | _Left | _Beat, Field(discriminator="kind")]
_MESSAGES: TypeAdapter[_Facts | _Answer | _Failed | _Left | _Beat] = TypeAdapter(_AnyMessage)


class Welcome(Message):
    """Names of all ranks, when the last one has joined."""

    names: list[Annotated[str, Field(max_length=2 * NAME_SHOWN + 100)]]
    store_port: Annotated[int, Field(ge=0, lt=65536)]  # rendezvous of tensors; 0: none


@dataclass
class _Gathering:
    """Facts that rank 0 has for a topic."""

    among: Sequence[int]
    messages: dict[int, dict[str, Any]] = field(default_factory=dict)


class PeerFailed(GptjFtError):
    """Another rank has failed or is gone. The exit code is that of the rank."""

    def __init__(self, message: str, exit_code: int, rank: int, is_gone: bool = True) -> None:
        super().__init__(message)
        self.exit_code, self.rank, self.is_gone = exit_code, rank, is_gone


class Control:
    """The connection of one rank to the others.

    Args:
        welcome: names of the ranks.
        sockets: connections, by rank: rank 0 has one to each other rank, the others have one to rank 0.
        ends_process: whether to end the process if its main thread does not notice a failure. False in tests, whose
            ranks are threads.
    """

    def __init__(
        self, rank: int, welcome: Welcome, sockets: Mapping[int, socket.socket], ends_process: bool = True
    ) -> None:
        self.rank, self.size, self.names = rank, len(welcome.names), welcome.names
        self.store_port = welcome.store_port
        self._sockets, self._ends_process = dict(sockets), ends_process
        self._changed = threading.Condition()
        self._send_locks = {peer: threading.Lock() for peer in sockets}
        self._facts: dict[tuple[str, int], _Gathering] = {}  # on rank 0, incomplete
        self._awaited: dict[tuple[str, int], Sequence[int]] = {}  # ranks in the answers to come
        self._answers: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self._turns: dict[tuple[int, str], int] = defaultdict(int)  # calls of `gather` by rank and topic
        self._last_heard = dict.fromkeys(sockets, time.monotonic())
        self._left, self._dead = set[int](), set[int]()
        self._failure: PeerFailed | None = None
        self._closed = self._noticed = self._told = False
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
            key = topic, self._turns[self.rank, topic]
            self._turns[self.rank, topic] += 1
            self._awaited[key] = ranks
        if self.rank == 0:
            self._add_facts(0, key, dict(facts), ranks)
        else:
            self._send(0, _Facts(topic=topic, turn=key[1], facts=dict(facts), among=ranks))
            self._require_rank_zero()
        with self._changed:
            while key not in self._answers:
                if self._failure:
                    self._noticed = True
                    raise self._failure
                self._changed.wait()
            every = self._answers.pop(key)
        for rank, theirs in zip(ranks, every, strict=True):
            if not is_alike(theirs, facts):
                self._lose(rank, f"{_MALFORMED} (topic {topic!r})")
                self._noticed = True
                raise self._failure or PeerFailed(f"{self.names[rank]} {_MALFORMED}", 1, rank)
        return every

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

    def fail(self, error: BaseException) -> None:
        """Send an error to the other ranks, and end every `gather` of this one; `close` with the error follows."""
        if not isinstance(error, PeerFailed):
            text = str(error) or type(error).__name__
            code = int(getattr(error, "exit_code", 1))
            if isinstance(error, KeyboardInterrupt):
                text, code = "stopped", Interrupted.exit_code
            text = text[:TEXT_SHOWN].encode(errors="replace").decode()  # names of files may have lone surrogates
            if not self._told:
                self._tell(_Failed(rank=self.rank, text=text, code=code))
            self._told = True
            error = PeerFailed(text, code, self.rank)
        with self._changed:
            self._failure, self._noticed = self._failure or error, True
            self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """Leave. An error is sent to the other ranks; without one, rank 0 waits until all have left."""
        self._closed = True
        if error is not None:
            self.fail(error)
        else:
            self._tell(_Left())
            if self.rank == 0:
                with self._changed:
                    self._changed.wait_for(lambda: self._failure or self._left >= set(self._sockets), SILENT_SECONDS)
        # Not `close`: with unread input it would reset the connection, and the peer would lose our last messages.
        for each in self._sockets.values():
            with suppress(OSError):
                each.shutdown(socket.SHUT_WR)

    def _tell(self, message: Message, but: int = -1, among: Sequence[int] = ()) -> None:
        for peer in among or self._sockets:
            if peer != but and peer in self._sockets and peer not in self._dead:
                with suppress(PeerFailed):
                    self._send(peer, message)

    def _send(self, peer: int, message: Message) -> None:
        try:
            with self._send_locks[peer]:
                self._sockets[peer].sendall(message.to_line())
        except OSError:
            self._lose(peer)
            raise self._failure or PeerFailed(f"{self.names[peer]} is gone", 1, peer) from None

    def _listen(self) -> None:
        """Receive messages until every connection has ended."""
        buffers = dict.fromkeys(self._sockets, b"")
        begun = dict[int, float]()  # start of the unfinished message in each buffer
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
                    if not read:
                        selector.unregister(self._sockets[peer])
                        self._lose(peer)
                        continue
                    now = self._last_heard[peer] = time.monotonic()
                    *lines, buffers[peer] = (buffers[peer] + read).split(b"\n")
                    if lines:
                        begun.pop(peer, None)
                    is_late = bool(buffers[peer]) and now - begun.setdefault(peer, now) > LINE_SECONDS
                    try:
                        for line in lines:
                            self._receive(peer, _MESSAGES.validate_python(json.loads(line)))
                        if is_late or len(buffers[peer]) > LINE_BYTES:
                            raise ValueError("a message without an end")
                    except (ValueError, RecursionError):
                        selector.unregister(self._sockets[peer])
                        self._lose(peer, _MALFORMED)
                for peer, heard in self._last_heard.items():
                    if time.monotonic() - heard > self.silent_seconds and peer not in self._left:
                        self._lose(peer, "does not answer any more")

    def _receive(self, peer: int, message: _Facts | _Answer | _Failed | _Left | _Beat) -> None:
        """Take in a message from a peer.

        Raises:
            ValueError: this peer may not send it.
        """
        if isinstance(message, _Facts):
            among, key = message.among, (message.topic, message.turn)
            turn = self._turns[peer, message.topic]
            is_subset = len(set(among)) == len(among) and set(among) <= set(range(self.size))
            if self.rank != 0 or peer not in among or not is_subset or message.turn != turn:
                raise ValueError(among)
            if len(self._facts) > MOST_PENDING:
                raise ValueError("too many topics")
            self._turns[peer, message.topic] += 1
            self._add_facts(peer, key, message.facts, among)
        elif isinstance(message, _Answer):
            key = message.topic, message.turn
            if self.rank == 0 or len(self._awaited.get(key, ())) != len(message.every):
                raise ValueError(key)
            self._set_answer(key, message.every)
        elif isinstance(message, _Left):
            with self._changed:
                self._left.add(peer)
                self._changed.notify_all()
            for gathering in list(self._facts.values()):
                self._require_members(gathering)
            self._require_rank_zero()
        elif isinstance(message, _Failed):
            # A rank may report only its own failure; rank 0 passes on those of others.
            if message.rank >= self.size or (self.rank == 0 and message.rank != peer):
                raise ValueError(message.rank)
            if self.rank == 0:
                self._tell(message, but=peer)
            text = escape_controls(message.text)  # it goes to the terminal
            name = f"{self.names[message.rank]}{'' if message.gone else ':'}"
            self._fail(PeerFailed(f"{name} {text}", message.code, message.rank, message.gone))

    def _add_facts(self, peer: int, key: tuple[str, int], facts: dict[str, Any], among: Sequence[int]) -> None:
        """Add the facts of a rank, on rank 0; when they are complete, answer all ranks that gather them."""
        with self._changed:
            gathering = self._facts.setdefault(key, _Gathering(among))
            if list(gathering.among) != list(among):
                if peer:
                    raise ValueError(among)
                for other in gathering.messages:  # rank 0 itself knows who gathers
                    self._lose(other, _MALFORMED)
            gathering.messages[peer] = facts
            is_complete = len(gathering.messages) == len(among)
            if is_complete:
                del self._facts[key]
        if not is_complete:
            self._require_members(gathering)
            return
        every = [gathering.messages[rank] for rank in among]
        self._tell(_Answer(topic=key[0], turn=key[1], every=every), among=among)
        if self.rank in among:
            self._set_answer(key, every)

    def _require_members(self, gathering: _Gathering) -> None:
        """Fail if a rank has left, and others wait for its facts."""
        for rank in {*gathering.among} & self._left - gathering.messages.keys():
            self._left.discard(rank)
            self._lose(rank, _EARLY)

    def _require_rank_zero(self) -> None:
        """Fail if rank 0 has left, and this rank waits for its facts."""
        if self.rank and 0 in self._left and any(0 in ranks for ranks in list(self._awaited.values())):
            self._left.discard(0)
            self._lose(0, _EARLY)

    def _set_answer(self, key: tuple[str, int], every: list[dict[str, Any]]) -> None:
        with self._changed:
            del self._awaited[key]
            self._answers[key] = every
            self._changed.notify_all()

    def _lose(self, peer: int, how: str = "is gone") -> None:
        if peer in self._left or peer in self._dead or self._closed:
            return
        self._dead.add(peer)
        if self.rank == 0:
            self._tell(_Failed(rank=peer, text=how, code=1, gone=True), but=peer)
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
            self._tell(_Beat())
            time.sleep(BEAT_SECONDS)


def is_alike(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Tell whether facts of another rank have the names and JSON types of own facts; null equals any type."""
    if theirs.keys() != own.keys():
        return False
    kinds = ({type(None), _kind_of(theirs[name]), _kind_of(own[name])} for name in own)
    return all(len(each) <= 2 for each in kinds)


def _kind_of(value: Any) -> type:
    kinds: tuple[tuple[type, Any], ...] = ((bool, bool), (float, int | float), (list, list | tuple), (dict, Mapping))
    return next((kind for kind, forms in kinds if isinstance(value, forms)), type(value))
