"""Train LoRA on a quantized GPT-J 6B within a memory limit that holds; kill the run, resume it, check the result.

A model folder of GPT-J's shape with random weights in bf16 (12 GB) is made on the spot and quantized by `gptj-ft
convert --quantize`. Then `gptj-ft finetune --method lora` trains all linear layers with rank 16, weights streamed from
disk, in a control group (cgroup) with a memory limit, page cache included, swap off: until it is killed (SIGKILL) in a
step, and from there to the end in a second process. The second run's steps are held against the best of twenty
products, measured right after them.

    python benchmarks/quantized.py --tokenizer gpt2/ --work /tmp/quantized --form int8 --limit 2.0
    python benchmarks/quantized.py --tokenizer gpt2/ --work /tmp/quantized --form nf4 --limit 1.8

`--keep` leaves the folder, so that the next form starts from the same model. `--layers 2` tries the script.
`--codecs` compares codes, values and speed with bitsandbytes, which must be installed, and stops. `--perplexity MODEL
--text FILE` prints the perplexity of a model and of its forms, and with bitsandbytes installed that by `transformers`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from full_size import SHAPES
from lora_full_size import random_layers
from side_by_side import command
from streamed_vs_resident import best_product
from transformers import AutoModelForCausalLM, AutoTokenizer

from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.model_folder import write_model
from gptj_ft.config.run_folder import Run
from gptj_ft.data.batches import micro_batches
from gptj_ft.models.quantization.bitsandbytes import WRITTEN
from gptj_ft.models.quantization.form import QuantizedForm
from gptj_ft.models.registry import Architecture, families
from gptj_ft.streaming.open import open_for_inference
from gptj_ft.streaming.scoring import evaluate_losses
from gptj_ft.system.cgroup import limited_memory

SHAPE = SHAPES["gptj"]
WINDOW, KILLED_AT = 256, 1
ROWS, ROW_WORDS = 64, 2000
WORDS = ("room", "cold", "printer", "paper", "lift", "parcel", "door", "desk", "floor", "light", "key", "note")
TIMED, MATRIX, LONG_WINDOW = 5, (4096, 4096), 1024


def prepare(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Make model and rows, unless they are there; return the folder of the quantized model, and the file of rows."""
    work, plain = arguments.work, arguments.work / "model"
    if not (plain / "config.json").is_file():
        shape = {**SHAPE, "n_layer": arguments.layers}
        family = families()["gptj"]
        architecture = Architecture(family, family.read_config(shape), shape)
        write_model(plain, architecture, random_layers(architecture), dtype=torch.bfloat16)
        for name in ("vocab.json", "merges.txt"):
            shutil.copy(arguments.tokenizer / name, plain / name)
    rows = work / "rows.jsonl"
    draw = random.Random(0)
    texts = (" ".join(draw.choices(WORDS, k=ROW_WORDS)) for _ in range(ROWS))
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    if arguments.form == "bf16":
        return plain, rows
    folder = work / arguments.form
    if not (folder / "config.json").is_file():
        report = convert(plain, folder, Conversion(quantize=arguments.form))
        print(f"quantized in {report.seconds:.0f} s to {report.bytes / 1e9:.1f} GB, each tensor compared")
    return folder, rows


def train(arguments: argparse.Namespace, model: Path, rows: Path) -> None:
    """Train, kill, resume; print the figures."""
    run = Run(arguments.work / f"run-{arguments.form}")
    options = {
        "recipe": "continuous-pretraining", "method": "lora", "lora.targets": '["all-linear"]', "lora.rank": 16,
        "model": model, "data": rows, "output": run.folder, "holdout": 0, "max_steps": arguments.steps,
        "batch_size": arguments.tokens // WINDOW, "max_length": WINDOW, "packing": "apart", "on_long": "split",
        "precision": arguments.precision, "device": "cpu", "weights": arguments.weights, "cache": "false",
        "schedule": "constant", "warmup": 0, "host_memory": f"{arguments.limit}GiB",
        **dict(word.split("=", 1) for word in arguments.set),
    }  # fmt: skip
    limit = int(arguments.limit * 2**30)
    with limited_memory(limit, f"quantized-{arguments.form}") as group:
        first = subprocess.Popen(group.command(command("finetune", options)), stdout=sys.stderr)
        while len(steps_of(run)) < KILLED_AT:
            time.sleep(0.2)
            assert first.poll() is None, "the run ended before it was killed"
        time.sleep(2)
        subprocess.run(["pkill", "-KILL", "-f", str(run.folder)], check=False)
        first.wait()
        resumed = [sys.executable, "-m", "gptj_ft", "finetune", "--resume", str(run.folder)]
        subprocess.run(group.command(resumed), check=True, stdout=sys.stderr)
        peak = group.peak_bytes
    best = best_product(torch.bfloat16 if arguments.precision == "bf16" else torch.float32, SHAPE["n_embd"])
    subprocess.run([sys.executable, "-m", "gptj_ft", "runs", "verify", str(run.folder)], check=True, stdout=sys.stderr)
    lines = steps_of(run)
    steady = lines[KILLED_AT + 1 :] or lines[-1:]
    seconds = median(line["seconds"] for line in steady)
    result = {
        "form": arguments.form, "limit_bytes": limit, "peak_bytes": peak, "tokens": steady[0]["tokens"],
        "seconds": [round(line["seconds"], 1) for line in lines], "median": seconds, "best_product_gflops": best,
        "hfu": [line.get("hfu") for line in lines], "stall": [line.get("stall") for line in lines],
        "bytes_read": [line["bytes_read"] for line in lines], "loss": [line["loss"] for line in lines],
        "signal": signal.SIGKILL.name,
    }  # fmt: skip
    print(json.dumps(result))
    print(
        f"{arguments.form}: {steady[0]['tokens']} tokens in {seconds:.1f} s; peak of the group "
        f"{(peak or 0) / 2**30:.2f} GiB of {arguments.limit}; {steady[-1]['bytes_read'] / 1e9:.1f} GB read a step"
    )


def steps_of(run: Run) -> list[dict[str, float]]:
    """Return the lines of finished steps."""
    if not run.metrics_file.is_file():
        return []
    lines = [
        json.loads(line) for line in run.metrics_file.read_text(encoding="utf-8").splitlines() if line.endswith("}")
    ]
    return [line for line in lines if "loss" in line and "tokens" in line]


def compare_codecs() -> None:
    """Compare with bitsandbytes: 50 matrices bit for bit, and the seconds of restoring one."""
    import bitsandbytes.functional as bnb

    generator = torch.Generator().manual_seed(0)
    for number in range(50):
        rows, columns = 16 * (1 + number % 7), 64 * (1 + number % 5)
        values = torch.randn(rows, columns, generator=generator) * 10.0 ** (number % 4 - 3)
        values = values.to((torch.float32, torch.bfloat16, torch.float16)[number % 3])
        codes, state = bnb.quantize_4bit(values, quant_type="nf4")
        parts = WRITTEN["nf4"].encode(values)
        assert torch.equal(parts["codes"], codes.view(-1)), number
        assert torch.equal(parts["scales"], state.absmax), number
        restored = torch.empty_like(values)
        QuantizedForm(WRITTEN["nf4"], rows, columns, values.dtype).dequantize(parts, restored)
        assert torch.equal(restored, bnb.dequantize_4bit(codes, state)), number
        parts = WRITTEN["int8"].encode(values)
        codes, scales, _ = bnb.int8_vectorwise_quant(values.half())
        assert torch.equal(parts["codes"].view(rows, columns), codes), number
        assert torch.equal(parts["scales"], scales), number
        wide = torch.empty(rows, columns)
        QuantizedForm(WRITTEN["int8"], rows, columns, torch.float32).dequantize(parts, wide)
        assert torch.equal(wide, bnb.int8_vectorwise_dequant(codes, scales)), number
    print("50 matrices: codes, scales and values equal")
    values = torch.randn(*MATRIX, generator=generator).bfloat16()
    out = torch.empty_like(values)
    codes, state = bnb.quantize_4bit(values, quant_type="nf4")
    for name, codec in WRITTEN.items():
        form, parts = QuantizedForm(codec, *MATRIX, torch.bfloat16), codec.encode(values)
        ours = fastest(lambda form=form, parts=parts: form.dequantize(parts, out))
        theirs = fastest(lambda: bnb.dequantize_4bit(codes, state)) if name == "nf4" else 0.0
        rate = values.numel() / ours / 1e9
        print(
            f"{name}: {rate:.2f} billion numbers/s"
            + (f", bitsandbytes {values.numel() / theirs / 1e9:.2f}" if theirs else "")
        )


def compare_perplexities(arguments: argparse.Namespace) -> None:
    """Print the perplexity of a model, and of its quantized forms, on windows of a text."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.perplexity)
    text = arguments.text.read_text(encoding="utf-8")[: 8 * arguments.windows * LONG_WINDOW]
    ids = tokenizer(text).input_ids
    documents = [ids[start * LONG_WINDOW : (start + 1) * LONG_WINDOW] for start in range(arguments.windows)]
    batches = list(micro_batches(documents, [1] * len(documents), 2 * LONG_WINDOW))
    arguments.work.mkdir(parents=True, exist_ok=True)
    for form in (None, "int8", "nf4"):
        folder = arguments.perplexity
        if form is not None:
            folder = arguments.work / form
            convert(arguments.perplexity, folder, Conversion(quantize=form))
        with open_for_inference(folder, torch.device("cpu"), torch.float32, "device") as (_, model):
            total = sum(loss.total for loss in evaluate_losses(model, batches))
        targets = sum(len(document) - 1 for document in documents)
        print(f"{form or 'plain'}: perplexity {math.exp(total / targets):.4f} on {targets:,} tokens")
    if importlib.util.find_spec("bitsandbytes"):
        theirs, total = AutoModelForCausalLM.from_pretrained(arguments.work / "nf4").eval(), 0.0
        for document in documents:
            tokens = torch.tensor([document])
            with torch.no_grad():
                logits = theirs(tokens).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        print(f"nf4 by bitsandbytes: perplexity {math.exp(total / targets):.4f}")
    shutil.rmtree(arguments.work)


def fastest(work: object) -> float:
    """Return the seconds of the fastest of some calls."""
    seconds = []
    for _ in range(TIMED):
        start = time.perf_counter()
        work()  # type: ignore[operator]
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    """Run the comparison or the training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="folder with GPT-2's vocab.json and merges.txt")
    parser.add_argument("--work", type=Path, help="new folder; needs 25 GB")
    parser.add_argument("--form", choices=("int8", "nf4", "bf16"), default="int8")
    parser.add_argument("--limit", type=float, default=2.0, help="GiB of memory, page cache included")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--weights", choices=("auto", "disk", "host"), default="disk")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=SHAPE["n_layer"], help="smaller only to try the script")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the recipe")
    parser.add_argument("--keep", action="store_true", help="do not remove the folder")
    parser.add_argument("--perplexity", type=Path, metavar="MODEL", help="compare perplexities of its forms")
    parser.add_argument("--text", type=Path, help="text for --perplexity")
    parser.add_argument("--windows", type=int, default=8, help="of 1,024 tokens, for --perplexity")
    parser.add_argument("--codecs", action="store_true", help="compare with bitsandbytes")
    arguments = parser.parse_args()
    if arguments.codecs:
        compare_codecs()
        return
    if arguments.perplexity:
        compare_perplexities(arguments)
        return
    arguments.work.mkdir(parents=True, exist_ok=True)
    train(arguments, *prepare(arguments))
    if not arguments.keep:
        shutil.rmtree(arguments.work)


if __name__ == "__main__":
    main()
