"""Test the format and the checks of a layer's state file."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from support.small_stack import CPU

from gptj_ft.models.layout import Layout
from gptj_ft.streaming.stores.state_file import StateFile
from gptj_ft.system.memory import allocate


def test_damage_names_the_chunks_parameters(tmp_path: Path) -> None:
    shapes = {"a": torch.Size([1500]), "b": torch.Size([1024]), "c": torch.Size([64])}
    layout = Layout(shapes, {"a": 0, "b": 2048, "c": 3072}, 0, 4096)
    file, path = StateFile(layout, {"weight": torch.float32}, 1024), tmp_path / "layer-000.safetensors"
    values, digests = allocate(4096, torch.float32, CPU).normal_(), file.no_digests()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    file.write(descriptor, "weight", values, 0, digests)
    file.write_header(descriptor, 3, digests)
    os.close(descriptor)
    whole = path.read_bytes()
    for element, names in ((1023, "a"), (1024, "a"), (2048, "b"), (3071, "b"), (3072, "c"), (4095, "c")):
        at = file.offsets["weight"] + 4 * element
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert file.damage(path) == [f"weight ({names})"], element
    path.write_bytes(whole)
    assert file.damage(path) == []


def test_damage_check_leaves_no_file_open(tmp_path: Path) -> None:
    layout = Layout({"a": torch.Size([64])}, {"a": 0}, 0, 2048)
    file, path = StateFile(layout, {"weight": torch.float32}, 1024), tmp_path / "layer-000.safetensors"
    write_state(file, path, 3)
    before = os.listdir("/proc/self/fd")
    assert file.damage(path) == []
    assert os.listdir("/proc/self/fd") == before


def write_state(file: StateFile, path: Path, step: int) -> None:
    descriptor, digests = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), file.no_digests()
    file.write(descriptor, "weight", allocate(2048, torch.float32, CPU).normal_(), 0, digests)
    file.write_header(descriptor, step, digests)
    os.close(descriptor)


def test_long_header_overlaps_no_data(tmp_path: Path) -> None:
    path, sizes = tmp_path / "layer-000.safetensors", set()
    for length in range(3800, 3880):
        layout = Layout({"a" * length: torch.Size([64])}, {"a" * length: 0}, 0, 2048)
        file = StateFile(layout, {"weight": torch.float32}, 2048)
        write_state(file, path, 10**9)
        assert file.check(path)[0] == 10**9
        assert file.damage(path) == []
        sizes.add(file.header_bytes)
    assert sizes == {4096, 8192}
