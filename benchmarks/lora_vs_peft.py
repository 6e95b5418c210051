"""Compare `gptj-ft finetune --method lora` with `peft` in a plain training loop, on the same rows of DialogSum.

Model and loop are those of `transformers_loop.py`: a random GPT-J of 8 blocks x n_embd 1024 with 50,400 rows of
vocabulary, fp32 on the CPU, rows padded to the longest of their batch, `AdamW(fused=True)`, `clip_grad_norm_`. The
adapters are the same: rank 16 on q_proj and v_proj, beginning with the same values. Variants of the loop as there: the
head on all positions (plain), on the targets only (targets), and plain with gradient checkpointing (recompute).
That every step had the same tokens and the same loss is checked. Target: 2 times plain's examples/s, 0.6 times its
memory.

    python benchmarks/lora_vs_peft.py --data train.jsonl --tokenizer gpt2/ --work /tmp/lora-loop

`--set key=value` is passed to `gptj-ft`. Needs `peft`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from same_work import (
    SHAPE,
    Step,
    Work,
    adapter_options,
    loss_of_all_positions,
    loss_of_targets,
    make_model,
    open_model,
    shape_of,
    take_steps,
    with_adapters,
)
from side_by_side import facts_of, finetune, parser, report, watch

TARGETS = ("q_proj", "v_proj")
PLACES = ("auto", "disk")
LOOPS = ("plain", "targets", "recompute")


def train(folder: Path, work: Work, loop: str) -> Iterator[float]:
    """Train adapters for a model folder; yield the loss of each step."""
    model = with_adapters(open_model(folder), TARGETS)
    if loop == "recompute":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()

    def add_gradients(step: Step) -> float:
        # What PEFT has changed is in the model itself, whose head can then be run apart.
        loss = (
            loss_of_targets(model.get_base_model(), step) if loop == "targets" else loss_of_all_positions(model, step)
        )
        loss.backward()
        return float(loss.item())

    yield from take_steps(model, work, add_gradients)


def main() -> None:
    """Run the trainers one after the other, each in a separate process, and compare."""
    options = parser(__doc__)
    options.add_argument("--places", default=",".join(PLACES), help="of gptj-ft: where the model is")
    options.add_argument("--loops", default=",".join(LOOPS), help="of peft; the first is compared with")
    options.add_argument("--loop", choices=LOOPS, help="internal")
    options.add_argument("--width", type=int, default=SHAPE["n_embd"], help="smaller only to try the script")
    arguments = options.parse_args()
    folder = arguments.work
    if arguments.loop:
        work = Work.load(folder / "work.json")
        work.write_losses(train(folder / "model", work, arguments.loop), folder / f"{arguments.loop}.jsonl")
        return
    folder.mkdir(parents=True)
    make_model(folder / "model", arguments.tokenizer, shape_of(arguments.width))
    arguments.set += adapter_options(TARGETS)
    ours = {}
    for place in arguments.places.split(","):
        ours[f"gptj-ft, {place}"], run = finetune(arguments, place)
    work = Work.of(run)
    work.save(folder / "work.json")
    theirs = {}
    for loop in arguments.loops.split(","):
        command = [sys.executable, __file__, "--loop", loop, "--work", str(folder)]
        theirs[f"peft, {loop}"] = watch(command, folder / f"{loop}.jsonl")
    report({**theirs, **ours}, work, arguments.warm_up, facts_of(run))


if __name__ == "__main__":
    main()
