"""Measure the scoring of several answers to a prompt: together, apart, and by lm-eval's `transformers` model.

Each question asks which of four summaries is a dialogue's own. The three score the same tokens and take turns.

    python benchmarks/answers.py --model SmolLM2-135M-Instruct --rows dialogsum.jsonl --count 25 --turns 2

The file has the columns `dialogue` and `summary`. Needs lm-eval: `pip install 'gptj-ft[harness]'`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

from gptj_ft.evaluation.likelihood import log_likelihoods, size_of
from gptj_ft.streaming.open import open_for_inference

CHOICES = 4
COMPUTED = 2048  # tokens at once
CPU = torch.device("cpu")


def questions(rows: Path, count: int) -> list[tuple[str, list[str]]]:
    """Read dialogues, each with its own summary and the next ones."""
    with rows.open(encoding="utf-8") as lines:
        read = [json.loads(line) for line in islice(lines, count + CHOICES - 1)]
    return [
        (f"{row['dialogue']}\nSummary:", [f" {other['summary']}" for other in read[number : number + CHOICES]])
        for number, row in enumerate(read[:count])
    ]


def main() -> None:
    """Score in turns, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    asked = questions(arguments.rows, arguments.count)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    prompts = [tokenizer.encode(prompt) for prompt, _ in asked]
    answers = [[tokenizer.encode(answer) for answer in choices] for _, choices in asked]
    theirs = HFLM(pretrained=str(arguments.model), device="cpu", dtype="float32", batch_size=16)
    pairs = [(prompt, answer) for prompt, choices in asked for answer in choices]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    with open_for_inference(arguments.model, CPU, torch.float32) as (architecture, stack):
        context = int(architecture.config.n_positions)

        def ours(most_tokens: int) -> list[float]:
            found = log_likelihoods(stack, prompts, answers, most_tokens, COMPUTED)
            return [each.total for likely in found for each in likely]

        ways: dict[str, Callable[[], list[float]]] = {
            "together": lambda: ours(context),
            "apart": lambda: ours(0),
            "lm-eval": lambda: [total for total, _ in theirs.loglikelihood(requests, disable_tqdm=True)],
        }
        for limit in (context, 0):
            tokens = sum(size_of(*each, limit) for each in zip(prompts, answers, strict=True))
            print(f"most {limit} tokens together: {tokens:,} tokens", flush=True)
        first: list[float] = []
        for _ in range(arguments.turns):
            for name, score in ways.items():
                start = time.monotonic()
                found = score()
                first = first or found
                error = max(abs(one - other) / abs(other) for one, other in zip(found, first, strict=True))
                print(f"{name}: {time.monotonic() - start:.1f} s, differs by {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
