"""Provide fixtures for all tests: no network, a separate home, small random models with transformers as the oracle."""

from __future__ import annotations

import gc
import ipaddress
import json
import os
import pickle
import shutil
import signal
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pytest

if TYPE_CHECKING:
    from support.fork_server import ForkServer

    from gptj_ft.planning.layer_cost import LayerCost
    from gptj_ft.planning.probe import Rates

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1")
# Threads that spin while waiting starve each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from support.faulty_machine import fill_disk, forbid_network, set_free_space, wrap_reads  # noqa: F401

# `nohup`, cron and shells with background jobs start their children with some signals ignored. Tests send these signals
# and expect the usual handlers.
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread: there is one worker per core already. Child processes, too: cached machine rates depend on the threads.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Tests would wait for the disk nearly as long as they compute, and few need a real one.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Two shapes a family, with different config fields; vocabulary sizes are no multiples of kernel sizes.
SHAPES = {
    "narrow": {"vocab_size": 101, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 3, "rotary_dim": 8},
    "wide": {"vocab_size": 90, "n_positions": 96, "n_embd": 64, "n_layer": 2, "n_head": 2, "rotary_dim": 32},
}
GPT2_SHAPES = {
    "gpt2": {
        "vocab_size": 101, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 3, "activation_function": "gelu",
    },
    "gpt2-untied": {
        "vocab_size": 90, "n_positions": 96, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_inner": 96,
        "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True,
    },
}  # fmt: skip


LONG_FOLDERS = (
    "distributed", "planning", "simulated", "diagnostics", "training", "faults", "streaming", "checkpoints", "golden",
    "tests", "generation", "system", "data",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the texts of tests/golden anew")
    parser.addoption(
        "--rotate", type=int, default=0, help="begin with another folder, so that a cut run sees all in turn"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide devices from tests that need none, and divide the compilation of tests among workers."""
    if config.getoption("markexpr") != "gpu":  # ``--device auto`` would choose one
        os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    # Every second worker collects backwards, so that each compiles half of the tests after a fresh clone.
    tests, worker = Path(__file__).resolve().parent, os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    if int(worker.removeprefix("gw")) % 2 and [Path(arg).resolve() for arg in config.args] == [tests]:
        paths = [path for path in tests.iterdir() if path.is_dir() or path.match("test_*.py")]
        config.args = [str(path) for path in sorted(paths, reverse=True)]


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave most combinations of ``sampled`` tests to `make thorough`.

    Run folders with long files first, so that no worker ends up alone with one.
    """
    seen = Counter[str]()
    for item in items:
        if marker := item.get_closest_marker("sampled"):
            name = item.nodeid.partition("[")[0]
            if seen[name] % marker.args[0]:
                item.add_marker("thorough")
            seen[name] += 1
    rotated = deque(LONG_FOLDERS)
    rotated.rotate(config.getoption("rotate"))
    order = {name: number for number, name in enumerate(rotated)}
    items.sort(key=lambda item: (order.get(item.path.parent.name, len(order)), item.path))


def pytest_collection_finish() -> None:
    """Freeze the collected objects, and look for garbage less often: together it saves a tenth of all test time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def reject_remote_connections(event: str, arguments: tuple[Any, ...]) -> None:
    """Fail a connection that leaves this machine."""
    if event != "socket.connect" or arguments[0].family == socket.AF_UNIX:
        return
    address = arguments[1]
    host = address[0] if isinstance(address, tuple) else str(address)
    if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
        raise AssertionError(f"a test tried to reach {address}")


sys.addaudithook(reject_remote_connections)


def assumed_rates() -> Rates:
    """Return the rates of an imaginary machine."""
    from gptj_ft.planning import probe

    return probe.Rates(
        probe.ComputeRates(
            fp32=1e11,
            bf16=2e10,
            fp32_narrow=1e11,
            bf16_narrow=2e10,
            memory=2e10,
            near_memory=2e10,
            attention=1e18,
            to_device=1e10,
            from_device=1e10,
        ),
        probe.DiskRates(read=2e9, write=1e9, mixed=1.5e9),
        on_cpu=True,
    )


@pytest.fixture(scope="session", autouse=True)
def fixed_rates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rates]:
    """Replace measurements of the machine by fixed rates, in every process that a test starts."""
    from support.rates import set_rates

    rates = assumed_rates()
    with pytest.MonkeyPatch.context() as patch:
        set_rates(patch, rates)
        patch.setenv("GPTJ_FT_HOME", str(tmp_path_factory.mktemp("home")))  # for what is made before a test begins
        yield rates


@pytest.fixture(scope="session", autouse=True)
def no_numbers_without_memory() -> Iterator[None]:
    """Skip weight initialisation on the ``meta`` device: an eighth of a small run's time."""
    draw = torch.nn.Linear.reset_parameters
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Linear, "reset_parameters", lambda self: None if self.weight.is_meta else draw(self))
        yield


@pytest.fixture(scope="session", autouse=True)
def equal_layers_measured_once() -> Iterator[None]:
    """Cache layer measurements across runs: a tenth of all test time."""
    from gptj_ft.planning import inference_plan, layer_cost, memory

    def once(measure: Callable[..., LayerCost]) -> Callable[..., LayerCost]:
        known: dict[tuple[object, ...], LayerCost] = {}
        pickled: WeakKeyDictionary[torch.nn.Module, bytes] = WeakKeyDictionary()  # a third of a millisecond each

        def measured(layer: torch.nn.Module, *given: object) -> LayerCost:
            if layer not in pickled:
                pickled[layer] = pickle.dumps(layer)
            key = pickled[layer], *given
            if key not in known:
                known[key] = measure(layer, *given)
            return known[key]

        return measured

    with pytest.MonkeyPatch.context() as patch:
        measures = ((layer_cost, "measure_block"), (inference_plan, "measure_block"), (memory, "measure_head"))
        for module, name in measures:
            patch.setattr(module, name, once(getattr(module, name)))
        yield


@pytest.fixture(scope="session")
def server(fixed_rates: Rates) -> Iterator[ForkServer]:
    """Start a fork server with everything imported, to run commands in."""
    from support.fork_server import ForkServer

    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def measured_home(own_home: Path, fixed_rates: Rates, tmp_path: Path) -> Path:
    """Return a home that holds the machine's rates, for commands in separate processes."""
    from gptj_ft.planning.machine_profile import rates

    rates(torch.device("cpu"), tmp_path)
    return own_home


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own home and working folder, without options from the environment."""
    for name in list(os.environ):
        if name.startswith("GPTJ_FT_") and name != "GPTJ_FT_TEST_DATA":
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    monkeypatch.setenv("GPTJ_FT_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    return home


def random_gptj(seed: int = 0, **shape: int):
    """Return a random `transformers` GPT-J with non-trivial norms and biases."""
    from transformers import GPTJConfig, GPTJForCausalLM

    return _random_model(GPTJConfig, GPTJForCausalLM, seed, shape)


def random_gpt2(seed: int = 0, **shape: int | str | bool):
    """Return a random `transformers` GPT-2 with non-trivial norms and biases."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return _random_model(GPT2Config, GPT2LMHeadModel, seed, shape)


def random_model(name: str):
    """Return a random model of one of the shapes above."""
    return random_gptj(**SHAPES[name]) if name in SHAPES else random_gpt2(**GPT2_SHAPES[name])


def _random_model(config_of, model_of, seed: int, shape):
    config = config_of(
        **shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, initializer_range=0.1
    )
    torch.manual_seed(seed)
    model = model_of(config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.3, std=0.3)
    return model


@pytest.fixture(params=[*SHAPES, *GPT2_SHAPES])
def oracle(request: pytest.FixtureRequest):
    """Return a random `transformers` model of each shape."""
    return random_model(request.param)


@pytest.fixture
def model_folder(oracle, tmp_path: Path) -> Path:
    """Return the oracle's folder, written by `save_pretrained`."""
    folder = tmp_path / "hf-model"
    oracle.save_pretrained(folder)
    return folder


NOTES = [
    ("The printer on floor {n} is out of paper and blinks twice.", "Printer {n} needs paper."),
    ("A parcel for room {n} was left at the desk this morning.", "Parcel for room {n} at the desk."),
    ("The lift to level {n} stops and its door stays open.", "Lift to level {n} is stuck."),
]


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    """Write forty rows of note and summary."""
    return write_rows(tmp_path / "rows.jsonl")


def write_rows(path: Path) -> Path:
    lines = []
    for n in range(40):
        note, summary = NOTES[n % len(NOTES)]
        lines.append(json.dumps({"note": note.format(n=n), "short_summary": summary.format(n=n), "id": n}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]):
    """Return a runner for commands: ``shell("recipes list")``."""
    from support.cli_runner import Shell

    return Shell(capsys)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a GPT-J of six blocks and a GPT-2 with a tied head."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("gptj", "gpt2")}
    sizes = {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_head": 2}
    random_gptj(**sizes, n_layer=6, rotary_dim=4).save_pretrained(folders["gptj"])
    random_gpt2(**sizes, n_layer=6).save_pretrained(folders["gpt2"])
    return folders
