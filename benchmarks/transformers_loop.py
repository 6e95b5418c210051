"""Compare `gptj-ft finetune` with a plain `transformers` training loop, on the same rows of DialogSum.

Model: a random GPT-J of 8 blocks x n_embd 1024 with 50,400 rows of vocabulary, 204 M parameters, fp32 on the CPU. The
loop is written for speed: rows padded to the longest of their batch, `AdamW(fused=True)`, `clip_grad_norm_`, gradients
set to None, no KV cache, no copy of the logits, and the only attention that `transformers` has for GPT-J on a CPU:
eager (by its source it has no sdpa for this model, and flash attention needs CUDA). Its variants show the sources of
the difference:

    plain       logits at every position, as `model(labels=...)` computes them
    targets     plain, but the head on the positions that carry a target only
    rows        targets, but row by row, without padding, gradients accumulated
    recompute   plain, with gradient checkpointing: less memory, more time

`gptj-ft` runs in the placement it chooses by itself (auto) and with everything on disk (disk). Each trainer is a
separate process, one after the other. That every step had the same tokens and the same loss is checked.

    python benchmarks/transformers_loop.py --data train.jsonl --tokenizer gpt2/ --work /tmp/loop

`--set key=value` is passed to `gptj-ft`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from same_work import (
    SHAPE,
    Step,
    Work,
    loss_of_all_positions,
    loss_of_targets,
    make_model,
    open_model,
    shape_of,
    take_steps,
)
from side_by_side import facts_of, finetune, parser, report, watch
from transformers import GPTJForCausalLM

PLACES = ("auto", "disk")
LOOPS = ("plain", "targets", "rows", "recompute")


def train(model: GPTJForCausalLM, work: Work, loop: str = "plain") -> Iterator[float]:
    """Train a model; yield the loss of each step."""
    if loop == "recompute":
        model.gradient_checkpointing_enable()

    def add_gradients(step: Step) -> float:
        total = 0.0
        for part in step.rows() if loop == "rows" else [step]:
            if loop in ("plain", "recompute"):
                loss = loss_of_all_positions(model, part)
            else:
                loss = loss_of_targets(model, part) * (part.num_targets / step.num_targets)
            loss.backward()
            total += loss.item()
        return total

    yield from take_steps(model, work, add_gradients)


def main() -> None:
    """Run the trainers one after the other, each in a separate process, and compare."""
    options = parser(__doc__)
    options.add_argument(
        "--places", default=",".join(PLACES), help="of gptj-ft; the first is compared with; auto:device_memory=4GiB"
    )
    options.add_argument("--loops", default=",".join(LOOPS), help="of transformers")
    options.add_argument("--loop", choices=LOOPS, help="internal")
    options.add_argument("--width", type=int, default=SHAPE["n_embd"], help="smaller only to try the script")
    arguments = options.parse_args()
    folder = arguments.work
    if arguments.loop:
        work = Work.load(folder / "work.json")
        work.write_losses(train(open_model(folder / "model"), work, arguments.loop), folder / f"{arguments.loop}.jsonl")
        return
    folder.mkdir(parents=True)
    make_model(folder / "model", arguments.tokenizer, shape_of(arguments.width))
    runs = {}
    for place in arguments.places.split(","):
        runs[f"gptj-ft, {place}"], run = finetune(arguments, place)
    work = Work.of(run)
    work.save(folder / "work.json")
    for loop in arguments.loops.split(","):
        command = [sys.executable, __file__, "--loop", loop, "--work", str(folder)]
        runs[f"transformers, {loop}"] = watch(command, folder / f"{loop}.jsonl")
    report(runs, work, arguments.warm_up, facts_of(run))


if __name__ == "__main__":
    main()
