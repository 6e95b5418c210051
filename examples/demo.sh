#!/usr/bin/env bash
# The main job on what this repository ships: prepare, fine-tune a tiny random GPT-J, evaluate, generate. No download.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf .demo
mkdir .demo
export GPTJ_FT_HOME="$PWD/.demo/home"

say() { printf '\n== %s\n' "$*"; }
run() { printf '$ %s\n' "$*"; "$@"; }

say "1. Prepare the rows: columns found, tokens counted, every row accounted for"
run gptj-ft prepare-data --data examples/clinic_notes_train.jsonl --recipe summarization --model tiny --output .demo/data

say "2. Fine-tune a tiny random GPT-J on them, weights and optimizer state streamed from disk"
# A random model has everything to learn: a far higher learning rate and more epochs than GPT-J 6B needs.
run gptj-ft finetune --recipe summarization --data .demo/data --model tiny --output .demo/run \
    --weights disk --optimizer-state disk --lr 3e-3 --epochs 10 --batch-size 16

say "3. Did it help? The untrained model beside the tuned one, on rows that neither has seen"
run gptj-ft evaluate .demo/run --data examples/clinic_notes_heldout.jsonl --show 2

say "4. One summary"
run gptj-ft generate --model .demo/run "$(sed -n 1p examples/clinic_notes_heldout.jsonl | python -c 'import json, sys; print(json.load(sys.stdin)["note"])')"

say "Where everything is"
echo "run folder    .demo/run   (recipe.yaml, metrics.jsonl, log.txt)"
echo "tuned model   .demo/run/model   (opens with transformers.AutoModelForCausalLM.from_pretrained)"
echo "base model    $(echo .demo/home/models/*)"
