"""Simulate a disk that keeps only flushed data: a power cut loses every write and name since the last fsync."""

from __future__ import annotations

import os
import random
import shutil
import stat
import threading
from pathlib import Path

import pytest
from support.os_calls import wrap_calls

Names = dict[str, tuple[int, bool]]  # name -> inode, whether it is a folder


class LossyDisk:
    """Watch a folder; `crash` puts it into the state after a power cut.

    A file keeps the content of its last fsync, a folder the names of its own last fsync. Initial content counts as
    flushed. Nothing is really flushed, which keeps it fast.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._content: dict[int, bytes] = {}
        self._names: dict[int, Names] = {}
        self._pins: dict[int, int] = {}  # inode -> open descriptor, so that no other file gets the inode
        for path in (folder, *folder.rglob("*")):
            self._flush(os.open(path, os.O_RDONLY))
        wrap_calls(monkeypatch, ["fsync"], lambda _: self._fsync)

    def crash(self, seed: int | None = None) -> None:
        """Put the folder into its state after a power cut.

        Args:
            seed: ``None`` loses all unflushed data. A number keeps a random part of it, as a real disk may: each name
                has its flushed or its newest state, and a file may contain half of its newest content.
        """
        draw = random.Random(seed)
        self._watch_names(self._folder)
        found = self._newest_names(self._folder)
        newest = {inode: self._read(inode) for inode, pin in self._pins.items() if stat.S_ISREG(os.fstat(pin).st_mode)}
        rebuilt = self._folder.with_name("rebuilt")

        def rebuild(inode: int, target: Path) -> None:
            target.mkdir()
            flushed, now = self._names.get(inode, {}), found.get(inode, {})
            for name in sorted({*flushed, *now}):
                entry = flushed.get(name) if seed is None or draw.random() < 0.5 else now.get(name)
                if entry is None:
                    continue
                if entry[1]:
                    rebuild(entry[0], target / name)
                    continue
                flushed_content, content = self._content.get(entry[0], b""), newest[entry[0]]
                # A file that was only appended to keeps its flushed content.
                safe = len(flushed_content) if content.startswith(flushed_content) else 0
                choices = [flushed_content, content, content[: (safe + len(content)) // 2]]
                # A fully flushed file is never cut in half.
                is_flushed = seed is None or content == flushed_content
                (target / name).write_bytes(flushed_content if is_flushed else draw.choice(choices))

        rebuild(self._folder.stat().st_ino, rebuilt)
        shutil.rmtree(self._folder)
        rebuilt.rename(self._folder)
        for pin in self._pins.values():
            os.close(pin)

    def _fsync(self, descriptor: int) -> None:
        self._flush(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY))

    def _flush(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        with self._lock:
            self._pin(status.st_ino, descriptor)
            if stat.S_ISDIR(status.st_mode):
                self._names[status.st_ino] = self._names_in(self._pins[status.st_ino])
            else:
                self._content[status.st_ino] = self._read(status.st_ino)

    def _names_in(self, folder: int) -> Names:
        names: Names = {}
        for name in os.listdir(folder):
            try:
                child = os.open(name, os.O_RDONLY, dir_fd=folder)
            except FileNotFoundError:  # renamed by another thread just now
                continue
            status = os.fstat(child)
            self._pin(status.st_ino, child)
            names[name] = status.st_ino, stat.S_ISDIR(status.st_mode)
        return names

    def _pin(self, inode: int, descriptor: int) -> None:
        if inode in self._pins:
            os.close(descriptor)
        else:
            self._pins[inode] = descriptor

    def _read(self, inode: int) -> bytes:
        pin = self._pins[inode]
        return os.pread(pin, os.fstat(pin).st_size, 0)

    def _newest_names(self, folder: Path) -> dict[int, Names]:
        return {path.stat().st_ino: self._names_in(self._pins[path.stat().st_ino]) for path in self._folders(folder)}

    def _watch_names(self, folder: Path) -> None:
        for path in self._folders(folder):
            self._pin(path.stat().st_ino, os.open(path, os.O_RDONLY))

    @staticmethod
    def _folders(folder: Path) -> list[Path]:
        return [folder, *(path for path in folder.rglob("*") if path.is_dir())]
