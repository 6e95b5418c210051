#!/usr/bin/env bash
# The main jobs on what this repository ships: a tiny random GPT-J learns to summarize, a tiny random BERT to label.
# No download.
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

say "5. Labels instead of texts: a tiny random BERT learns them from 72 messages and is measured on 18 others"
run gptj-ft finetune --recipe classification --data examples/support_messages.csv --model tiny-bert --output .demo/labels \
    --lr 1e-3 --epochs 15 --batch-size 16 --set holdout=0.2
run gptj-ft evaluate .demo/labels

say "6. The label of a message, and those of the rows of a file: what the row said, what the model says, how sure it is"
run gptj-ft predict --model .demo/labels "The driver never came and my parcel is lost."
run gptj-ft predict --model .demo/labels --input examples/support_messages.csv --output .demo/labels.csv --keep id,label --quiet
head -n 6 .demo/labels.csv

say "Where everything is"
echo "run folder    .demo/run   (recipe.yaml, metrics.jsonl, log.txt)"
echo "tuned model   .demo/run/model   (opens with transformers.AutoModelForCausalLM.from_pretrained)"
echo "labels        .demo/labels/model   (opens with transformers.pipeline('text-classification', ...)), .demo/labels.csv"
echo "base models   $(echo .demo/home/models/*)"
