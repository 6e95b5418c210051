"""Answer questions about a GGUF file with llama.cpp, in an interpreter that has the package xllamacpp.

Reads a job as JSON from standard input: ``model``, ``lora`` (path or null), ``prompts`` (lists of token ids),
``predict`` (tokens to generate greedily), ``num_probs`` (default 8), ``texts`` to tokenize, ``chats`` (lists of
messages) to render. Writes ``ids`` and ``top`` for each prompt (the generated tokens, and the highest log-probabilities
of the first), ``tokens`` and ``chats``.
"""

import json
import sys
import urllib.request
from typing import Any

import xllamacpp


def main() -> None:
    job = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    if job.get("lora"):
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(job["lora"], 1.0)]
    # An fp32 cache and no flash attention: the defaults round keys and values to fp16.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.n_ctx, params.n_parallel, params.n_gpu_layers = job.get("context", 512), 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup, params.use_jinja, params.verbosity = False, True, -1
    server = xllamacpp.Server(params)

    def ask(path: str, question: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{server.listening_address}/{path}", json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        return json.load(urllib.request.urlopen(request))

    ids, top, num_probs = [], [], job.get("num_probs", 8)
    for prompt in job.get("prompts", []):
        options = {"temperature": 0.0, "cache_prompt": False, "return_tokens": True, "prompt": prompt}
        ids.append(ask("completion", {**options, "n_predict": job["predict"]})["tokens"])
        # One token only: llama.cpp leaves out the probabilities of a token that ends inside of a letter.
        steps = ask("completion", {**options, "n_predict": 1, "n_probs": num_probs}).get("completion_probabilities", [])
        top.append({each["id"]: each["logprob"] for step in steps for each in step["top_logprobs"]})
    tokens = [
        ask("tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
        for text in job.get("texts", [])
    ]
    chats = [ask("apply-template", {"messages": messages})["prompt"] for messages in job.get("chats", [])]
    json.dump({"ids": ids, "top": top, "tokens": tokens, "chats": chats}, sys.stdout)


main()
