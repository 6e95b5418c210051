"""Compare `gptj-ft evaluate` with a plain `transformers` loop: speed, scores and memory.

    python benchmarks/evaluation.py --data data/ --tokenizer gpt2/ --work /tmp/evaluation

speed   DialogSum's validation rows, loss and ROUGE of greedy answers. The loop is what one writes: batches in the order
        of the file, padded to their longest row, on the right for the loss and on the left for `generate`. Each in a
        process of its own, one after the other, timed from an opened tokenizer to the scores, the model's loading
        included. Target: 2 times the rows per second (`--asked`). Model: a random GPT-J of 8 blocks x n_embd 1024; in
        fp32 or, with `--precision bf16`, in bf16 by both.
scores  ROUGE of 1,000 pairs against rouge-score, SQuAD's exact match and F1 of 1,000 damaged predictions against the
        official definition (as written in tests/evaluation/test_metrics.py), perplexity of those rows against
        `transformers`. Target: equal, to 1e-6 and 1e-5; perplexity in bf16 to 2e-2, for each rounds in its own
        order.
memory  loss and ROUGE of the same rows, streamed from the folder: no tensor of [tokens, vocabulary], peak within what
        the plan said (its allowance for interpreter and libraries replaced by what they took before).

`--small` tries all of it with a model of two narrow blocks.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from same_work import SHAPE, Step, loss_of_all_positions, make_model, open_model

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "evaluation"))

SMALL = {"vocab_size": 50400, "n_positions": 1024, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}
FILE = "summarization/dialogsum/val.jsonl"
PAIRS = 1000
ASKED_SPEED, SAME_SCORE = 2.0, 1e-6
SAME_PERPLEXITY = {"fp32": 1e-5, "bf16": 2e-2}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    """Run the chosen parts, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {FILE} and squad/dev-v1.1.json")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with GPT-2's vocab.json and merges.txt")
    parser.add_argument("--work", type=Path, required=True, help="new folder")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8, help="batch size of the loop")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="a random model never ends by itself")
    parser.add_argument("--precision", choices=list(TYPES), default="fp32", help="compute type of both programs")
    parser.add_argument("--asked", type=float, default=ASKED_SPEED, help="target speed-up; less exits with 1")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--part", choices=PARTS, help="internal")
    arguments = parser.parse_args()
    if arguments.part:
        found = PARTS[arguments.part](arguments)
        print(json.dumps({**found, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
        return
    arguments.work.mkdir(parents=True)
    make_model(arguments.work / "model", arguments.tokenizer, SMALL if arguments.small else SHAPE)
    found = {part: run(part) for part in PARTS}
    failures = [*compare_speed(found, arguments), *compare_scores(arguments), *check_memory(found["memory"])]
    shutil.rmtree(arguments.work)
    sys.exit("\n".join(failures) or None)


def run(part: str) -> dict[str, Any]:
    """Run a part in a separate process; return its output."""
    done = subprocess.run([sys.executable, *sys.argv, "--part", part], check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def recipe_of(arguments: argparse.Namespace, **options: object) -> Any:
    """Return the recipe, with greedy answers of a number of tokens."""
    from gptj_ft.config.presets import load_preset
    from gptj_ft.config.resolve import build

    generation = {"max_new_tokens": arguments.max_new_tokens}
    return build(
        {
            **load_preset("dialogsum"), "generation": generation, "precision": arguments.precision, "device": "cpu",
            **options,
        }
    )  # fmt: skip


def ours(arguments: argparse.Namespace) -> dict[str, Any]:
    """Evaluate with gptj-ft."""
    from gptj_ft.evaluation.text_evaluation import plan_on_rows

    start = time.perf_counter()
    planned = plan_on_rows(arguments.work / "model", recipe_of(arguments), arguments.data / FILE, arguments.rows)
    found = planned.run()
    scores = found.scores
    planned.close()
    return {"seconds": time.perf_counter() - start, "scores": scores, "answers": found.answers}


def theirs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Evaluate with a loop over padded batches."""
    from rouge_score.rouge_scorer import RougeScorer

    from gptj_ft.data.tokenization import load_tokenizer
    from gptj_ft.evaluation.text_evaluation import make_eval_set

    folder = arguments.work / "model"
    tokenizer = load_tokenizer(folder)
    start = time.perf_counter()
    task = make_eval_set(recipe_of(arguments), tokenizer, folder, arguments.data / FILE, arguments.rows)
    model = open_model(folder, TYPES[arguments.precision]).eval()
    total, targets, answers, size = 0.0, 0, list[str](), arguments.batch_size
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    with torch.no_grad():
        for at in range(0, len(task.prompts), size):
            documents = task.documents[at : at + size]
            step = Step(0.0, [list(each.ids) for each in documents], [each.prompt_length for each in documents])
            total += loss_of_all_positions(model, step).item() * step.num_targets
            targets += step.num_targets
            batch = tokenizer.pad({"input_ids": task.prompts[at : at + size]}, return_tensors="pt")
            output = model.generate(
                **batch, max_new_tokens=arguments.max_new_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )  # fmt: skip
            new = output[:, batch["input_ids"].shape[1] :]
            answers += [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
    rows = [scorer.score_multi(of, text)["rougeL"].fmeasure for of, text in zip(task.references, answers, strict=True)]
    scores = {"loss": total / targets, "perplexity": math.exp(total / targets), "rougeL": 100 * sum(rows) / len(rows)}
    return {"seconds": time.perf_counter() - start, "scores": scores, "answers": answers}


def memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """Evaluate from the folder; record the largest logits tensor and the forecast."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from gptj_ft.evaluation.text_evaluation import plan_on_rows
    from gptj_ft.planning.constants import PROCESS_BYTES
    from gptj_ft.streaming.step import HEAD_CHUNK_BYTES
    from gptj_ft.system.machine import peak_memory

    planned = plan_on_rows(
        arguments.work / "model", recipe_of(arguments, weights="disk"), arguments.data / FILE, arguments.rows
    )
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] == SHAPE["vocab_size"]:
                largest = max(largest, out.numel() * out.element_size())
            return out

    before = peak_memory()
    with Sizes():
        planned.run()
    planned.close()
    planned_bytes = next(need.need for need in planned.plan.needs if need.resource == "memory")
    return {"largest": largest, "chunk": HEAD_CHUNK_BYTES, "need": planned_bytes - PROCESS_BYTES + before}


def compare_speed(found: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> list[str]:
    """Print rows per second; return missed targets."""
    mine, other = found["ours"], found["theirs"]
    for name, each in (("gptj-ft", mine), ("transformers", other)):
        print(
            f"{name:<14}{arguments.rows / each['seconds']:>8.3f} rows/s  {each['peak_bytes'] / 1e9:>6.2f} GB  "
            f"loss {each['scores']['loss']:.5f}  rougeL {each['scores']['rougeL']:.3f}"
        )
    same = sum(one == two for one, two in zip(mine["answers"], other["answers"], strict=True))
    ratio = other["seconds"] / mine["seconds"]
    print(f"{ratio:.2f} times the rows a second; {same} of {arguments.rows} answers are the same")
    difference = abs(mine["scores"]["perplexity"] / other["scores"]["perplexity"] - 1)
    print(f"perplexities differ by {difference:.1e} of them")
    return [
        *([f"speed {ratio:.2f}, asked for {arguments.asked}"] if ratio < arguments.asked else []),
        *([f"perplexity differs by {difference:.1e}"] if difference > SAME_PERPLEXITY[arguments.precision] else []),
    ]


def compare_scores(arguments: argparse.Namespace) -> list[str]:
    """Print the deviation of scores from their references; return those above the tolerance."""
    from rouge_score.rouge_scorer import RougeScorer
    from test_metrics import official

    from gptj_ft.evaluation.metrics import score
    from gptj_ft.evaluation.metrics.statistic import values

    generator = random.Random(0)
    lines = (arguments.data / FILE).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    texts = [row["summary"] for row in rows] + [row["dialogue"] for row in rows]
    pairs = [(generator.choice(texts), generator.choice(texts)) for _ in range(PAIRS)]
    names = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    mine = values(score(["rouge"], [one for one, _ in pairs], [[two] for _, two in pairs]), PAIRS)
    scorer = RougeScorer(list(names), use_stemmer=True)
    reference = [scorer.score(two, one) for one, two in pairs]
    worst = max(abs(mine[name] - 100 * sum(row[name].fmeasure for row in reference) / PAIRS) for name in names)
    articles = json.loads((arguments.data / "squad" / "dev-v1.1.json").read_text(encoding="utf-8"))["data"]
    questions = [qa for article in articles for paragraph in article["paragraphs"] for qa in paragraph["qas"]]
    golds = [[answer["text"] for answer in qa["answers"]] for qa in generator.sample(questions, PAIRS)]
    found = []
    for is_v2 in (False, True):
        chosen = [[] if is_v2 and number % 3 == 0 else of for number, of in enumerate(golds)]
        damaged = [damage(generator.choice(of or golds[0]), generator) for of in chosen]
        expected, ours_ = official(damaged, chosen, is_v2), values(score(["squad"], damaged, chosen), PAIRS)
        found.append(max(abs(ours_[name] - value) for name, value in expected.items()))
    print(f"ROUGE of {PAIRS} pairs differs by {worst:.1e}, SQuAD's v1.1 by {found[0]:.1e}, v2.0 by {found[1]:.1e}")
    return [f"scores differ by {each:.1e}" for each in (worst, *found) if each > SAME_SCORE]


def damage(text: str, generator: random.Random) -> str:
    """Perturb an answer: articles, case, punctuation, extra or missing words."""
    words = text.split()
    ways = [
        lambda: "the " + text, lambda: text.upper(), lambda: text + ".", lambda: " ".join(words[1:]), lambda: "",
        lambda: " ".join([*words, "in", "a", "town"]), lambda: text.replace("a", "e"), lambda: text,
    ]  # fmt: skip
    return generator.choice(ways)()


def check_memory(found: dict[str, Any]) -> list[str]:
    """Print peak memory and largest logits; return exceeded limits."""
    print(
        f"memory: peak {found['peak_bytes'] / 1e9:.2f} GB, planned {found['need'] / 1e9:.2f} GB; largest tensor "
        f"as wide as the vocabulary {found['largest'] / 1e6:.0f} MB, allowed {found['chunk'] / 1e6:.0f} MB"
    )
    return [
        *(["the logits are too large"] if found["largest"] > found["chunk"] else []),
        *(["more memory than planned"] if found["peak_bytes"] > found["need"] else []),
    ]


PARTS = {"ours": ours, "theirs": theirs, "memory": memory}

if __name__ == "__main__":
    main()
