"""Write a proof as a page: claims, measurements, cost, machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptj_ft.cli.html import fill_template, to_json, write_new
from gptj_ft.diagnostics.proof import Proof, ProofRun, seconds_in
from gptj_ft.system.units import clock, gibibytes, gigabytes

FactRows = Mapping[str, str]
HASH_DIGITS = 16  # shown digits of a digest


def write_proof(proof: Proof, folder: Path) -> list[Path]:
    """Write ``prove.html``, ``prove.md`` and ``prove.json`` into a folder; return their paths."""
    facts = {"verdict": proof.verdict, "sections": sections(proof), "steps": steps_of(proof)}
    texts = {
        "prove.html": fill_template("proof.html", facts),
        "prove.md": fill_template("proof.md", facts),
        "prove.json": to_json(proof.to_dict()),
    }
    for name, text in texts.items():
        write_new(folder / name, text)
    return [folder / name for name in texts]


def sections(proof: Proof) -> dict[str, FactRows]:
    """Return the facts of a proof by section, for terminal, HTML and Markdown."""
    return {
        "Claims": _claims(proof),
        "Measurements": _measurements(proof),
        "Cost": _cost(proof),
        "Machine": _machine(proof.machine),
    }


def _claims(proof: Proof) -> FactRows:
    return {
        "memory": f"training all {proof.parameters:,} parameters ({gigabytes(proof.state_bytes)} of state) takes "
         f"at most {gibibytes(proof.limit)} of memory, including page cache",
        "kill": "a process killed by SIGKILL within a step loses only that step, or also the previous one if that is "
         "not on disk yet",
        "bits": f"losses, gradient norms and weights equal those of {_other(proof)} to the last bit",
    }  # fmt: skip


def _measurements(proof: Proof) -> FactRows:
    run, other = proof.streamed, proof.reference
    equality = "all equal" if proof.holds else proof.difference
    return {
        "memory": _memory(proof),
        "kill": f"killed {seconds_in(proof.lost_seconds)} into step {proof.killed_in} of {len(run.losses)}; resumed "
         f"from step {proof.committed} on disk",
        "bits": f"{len(run.losses)} losses, {len(run.norms)} gradient norms, {proof.parameters:,} weights: {equality}",
        "weights": f"SHA-256 {run.weights_sha256[:HASH_DIGITS]}... from disk, "
         f"{other.weights_sha256[:HASH_DIGITS]}... of {_other(proof)}",
    }  # fmt: skip


def _other(proof: Proof) -> str:
    return "the same steps in RAM" if proof.is_in_ram else "the same steps from disk without the kill"


def _memory(proof: Proof) -> str:
    memory = proof.streamed.memory
    rss = f"at most {gibibytes(memory.rss)} resident"
    if proof.not_caged:
        cache = "" if memory.page_cache is None else (
            f"; the page cache of the whole machine grew by {gibibytes(memory.page_cache)}"
        )  # fmt: skip
        return f"memory not limited ({proof.not_caged}): {rss}{cache}"
    used = "" if memory.group is None else f"peak {gibibytes(memory.group)} including page cache; "
    swap = "without swap" if proof.is_without_swap else "with unlimited swap"
    return (
        f"limited to {gibibytes(proof.limit)} by a control group {swap}: {used}{rss}, including libraries shared with "
        f"other programs; at most {gibibytes(memory.page_cache or 0)} of page cache"
    )


def _cost(proof: Proof) -> FactRows:
    expected = f"expected: {clock(proof.forecast['seconds'])} and {gigabytes(proof.forecast['disk_bytes'])}"
    used = f"{clock(proof.seconds)} and {gigabytes(proof.disk_bytes)} of disk ({expected})"
    ram = "in RAM" if proof.is_in_ram else "not killed"
    ratio = proof.streamed.steady_seconds / proof.reference.steady_seconds
    return {
        "total": used,
        "from disk": _speed(proof, proof.streamed),
        ram: f"{_speed(proof, proof.reference)}; a step from disk takes {ratio:.2f} times as long",
        "each step": f"{gigabytes(max(proof.streamed.bytes_read))} read, "
         f"{gigabytes(max(proof.streamed.bytes_written))} written",
    }  # fmt: skip


def _speed(proof: Proof, run: ProofRun) -> str:
    rate = proof.tokens_per_step / run.steady_seconds
    return (
        f"{run.steady_seconds:.3g} s per step of {proof.tokens_per_step:,} tokens (median of steps with an update), "
        f"{rate:,.3g} tokens/s, {gibibytes(run.memory.rss)} resident"
    )


def _machine(known: Mapping[str, Any]) -> FactRows:
    cpu, memory, disk = (known.get(name) or {} for name in ("cpu", "memory", "disk"))
    versions, system = known.get("versions") or {}, known.get("system") or {}
    rows = {}
    if cpu:
        amx = ", AMX" if cpu["has_amx"] else ""
        rows["processor"] = f"{cpu['name']}, {cpu['cores_allowed']} cores, {cpu['instructions']}{amx}"
        rows["threads"] = str(cpu["threads"])
    if memory:
        rows["RAM"] = f"{gigabytes(memory['total'])}, {gigabytes(memory['free'])} free at the end"
    if disk:
        direct = "supports direct I/O" if disk["takes_direct_io"] else "no direct I/O"
        rows["disk"] = f"{gigabytes(disk['free'])} of {gigabytes(disk['total'])} free at the end, {direct}"
    if system:
        rows["system"] = " ".join(str(value) for value in system.values() if value)
    names = ("gptj-ft", "torch", "python")
    rows["versions"] = ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))
    return rows


def steps_of(proof: Proof) -> list[list[str]]:
    """Return a table of the steps, with floats at full precision."""
    pairs = zip(proof.streamed.losses, proof.reference.losses, proof.streamed.norms, proof.reference.norms, strict=True)
    return [
        [str(step), repr(loss), repr(other), repr(norm), repr(other_norm)]
        for step, (loss, other, norm, other_norm) in enumerate(pairs, 1)
    ]
