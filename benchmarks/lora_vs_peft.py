"""Compare `gptj-ft finetune --method lora` with `peft` in a plain training loop, on the same rows of DialogSum.

Model and loop are those of `transformers_loop.py`: a random GPT-J of 8 blocks x n_embd 1024 with 50,400 rows of
vocabulary, fp32 on the CPU, rows padded to the longest of their batch, `AdamW(fused=True)`, `clip_grad_norm_`. The
adapters are the same: rank 16 on q_proj and v_proj, beginning with the same values. Variants of the loop as there: the
head on all positions (plain), on the targets only (targets), and plain with gradient checkpointing (recompute).
That every step had the same tokens and the same loss is checked. Target: 2 times plain's examples/s, 0.6 times its
memory.

    python benchmarks/lora_vs_peft.py --data train.jsonl --tokenizer gpt2/ --work /tmp/lora-loop

With `--form nf4` both train on the same folder, quantized by `gptj-ft convert`: `peft` by bitsandbytes' 4-bit layers,
in bf16, adapters on all linear layers. `--layers 20` has 355 M parameters.

    python benchmarks/lora_vs_peft.py --form nf4 --layers 20 --loops plain,targets ...

`--set key=value` is passed to `gptj-ft`. Needs `peft`, and bitsandbytes for `--form`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
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
from side_by_side import SAME_LOSS, facts_of, finetune, parser, report, watch

from gptj_ft.checkpoints.convert import Conversion, convert

TARGETS = ("q_proj", "v_proj")
SAME_LOSS_BF16 = 1e-2
ALL = ("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out")
PLACES = ("auto", "disk")
LOOPS = ("plain", "targets", "recompute")


def train(folder: Path, work: Work, loop: str, is_quantized: bool) -> Iterator[float]:
    """Train adapters for a model folder; yield the loss of each step."""
    dtype = torch.bfloat16 if is_quantized else torch.float32
    model = with_adapters(open_model(folder, dtype), ALL if is_quantized else TARGETS)
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
    options.add_argument("--layers", type=int, default=SHAPE["n_layer"])
    options.add_argument("--form", choices=("nf4",), help="quantize the model")
    arguments = options.parse_args()
    folder = arguments.work
    if arguments.loop:
        work = Work.load(folder / "work.json")
        work.write_losses(
            train(folder / "model", work, arguments.loop, bool(arguments.form)), folder / f"{arguments.loop}.jsonl"
        )
        return
    folder.mkdir(parents=True)
    plain = folder / ("plain" if arguments.form else "model")
    make_model(plain, arguments.tokenizer, {**shape_of(arguments.width), "n_layer": arguments.layers})
    if arguments.form:
        convert(plain, folder / "model", Conversion(quantize=arguments.form, dtype="bf16"))
    precision = ("precision=bf16",) if arguments.form else ()
    arguments.set += (*adapter_options(ALL if arguments.form else TARGETS), *precision)
    ours = {}
    for place in arguments.places.split(","):
        ours[f"gptj-ft, {place}"], run = finetune(arguments, place)
    work = Work.of(run)
    work.save(folder / "work.json")
    theirs = {}
    for loop in arguments.loops.split(","):
        command = [sys.executable, __file__, "--loop", loop, "--work", str(folder)]
        command += ["--form", arguments.form] if arguments.form else []
        theirs[f"peft, {loop}"] = watch(command, folder / f"{loop}.jsonl")
    report({**theirs, **ours}, work, arguments.warm_up, facts_of(run), SAME_LOSS_BF16 if arguments.form else SAME_LOSS)


if __name__ == "__main__":
    main()
