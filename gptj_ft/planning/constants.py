"""Constants that measurements fitted, in one table; each with the benchmark or count that it comes from.

`benchmarks/forecast.py` compares the forecasts with runs: fit them again with it when an engine change moves a number.
"""

from __future__ import annotations

from gptj_ft.streaming.stores.base import CHUNK_NUMEL
from gptj_ft.system.direct_io import TRANSFERS

# Seconds. tests/simulated/test_forecasts.py compares with every operation of a step on the simulated device.
CHUNK_SECONDS = 2e-3  # for the program to request and send a chunk; fitted to 4M to 64M elements (gpu.py)
LAUNCH_SECONDS = 3e-6  # for the device to start a kernel
COPY_SECONDS = 10e-6  # to start a copy over the link
# Kernels that the program submits in a second, if no accelerator is there to be measured. On the machine of an H200 it
# took about 25 us each in steps of all parameters (gpu.py, doctor), 50 to 60 in those of adapters (gpu_lora.py).
KERNELS_PER_SECOND = 1 / 30e-6
BACKWARD_PIECES = 6  # of a layer; updates of other layers run between them
ZEROED_ON_CPU = 5  # passes over a gradient that zeroing takes, page faults included (forecast.py)

# Threads of the stores; see `stores.host`, `stores.folder`.
HOST_TRANSFERS = 2  # each way
FOLDER_TRANSFERS = 8

RESTORED = 16  # bytes read and written for each number of a quantized matrix that is restored (quantized.py)

# Left free in host memory beside a device: a plan may pin the rest, which the system cannot swap out.
SYSTEM_BYTES = 2 * 2**30

# Memory of a process on a CPU: peak of the kernel's counters over the runs of forecast.py and full_size.py.
PROCESS_BYTES = 560 * 2**20  # interpreter, torch, transformers, rows
FREE_SHARE = 0.8  # of the free memory that kept activations may take
SAVED_PER_TOKEN = 20  # tensors of [tokens, width] alive in one block's backward; MLP tensors count 4
COUNTED_SAVED = 16  # of them that GPT-2's graph keeps, as `measure_block` counts; blocks with more add the difference
LOGITS = 2  # fp32 tensors of [targets, vocabulary]: a chunk's logits, and in bf16 what they are computed in
Z_LOSS_LOGITS = 4  # the same with `z_loss`, for which torch keeps copies
# Holes in the heap that graphs of small blocks leave; fitted to runs of encoders. Kept graphs fill them.
HOLES, MOST_HOLES = 6, 260 * 10**6
# The same of recomputed causal blocks, as far as logits do not fill them; fitted to LoRA and all parameters of a GPT-2
# of 12 blocks of 768 and a GPT-J of 4 blocks of 2,048, with 500 to 1,900 tokens and 1 to 12 steps.
CAUSAL_HOLES, MOST_CAUSAL_HOLES = 3, 350 * 10**6
# Holes between kept graphs of causal blocks, in tensors of [tokens, width] per block and kept block; fitted to runs of
# 8 blocks (2 to 4 kept) and of 24 (6 to 16 kept). Fewer if the MLP's tensors are so large that glibc maps them, and in
# fp32: at most 2.2 in runs of 8 to 32 blocks, of up to 300 steps.
HOLES_A_BLOCK, HOLES_BETWEEN_MAPPED, MAPPED_BYTES = 0.4, 1.5, 32 * 2**20
HOLES_IN_FP32 = 2.5
HOLES_OF_DROPOUT = 2  # the same that drawing masks leaves; fitted to LoRA with dropout of a GPT-2 of 12 blocks
HOLES_OF_WIDENING = 3  # the same that fp32 temporaries leave; SmolLM2, 30 blocks kept: 3.3 with LoRA, else 1.5
HEAP_SHARE = 0.05  # remaining overhead of encoders, oneDNN's kernels included
# Of the memory in 16 bits, by the CPU's bf16 unit: oneDNN packs matrices. With AMX, all of GPT-J peaked 3.5 % above a
# forecast with 1 % (full_size.py, micro-batches of 2,048 tokens). Without a unit, three runs of forecast.py peaked
# 1.8 % below one to 1.0 % above it.
PACKED_SHARES = {"AMX": 0.05, "AVX-512": 0.01, "": 0.03}
WEIGHT_BYTES = 4 + 1  # of an attention weight under dropout: fp32 and its mask
WEIGHT_COPIES = 4  # attention weights alive at once: scores, weights, dropped weights, gradients

# Memory of inference; tests/planning/test_inference_plan.py and benchmarks/evaluation.py compare it with the peak.
LIVE_TENSORS = 16  # of [tokens computed together, width] in a block; MLP tensors count 4
COUNTED_LIVE = 12  # that `measure_block` counts for GPT-J; blocks with more add the difference
LIVE_LOGITS = 5  # fp32 tensors of [rows, vocabulary] while the next tokens are chosen
LISTED_TOKEN_BYTES = 2 * 36  # of a token in Python lists: of its document, and of its prompt

# Memory of an accelerator: tests/simulated/test_forecasts.py and gpu.py.
CONTEXT_BYTES = 400 * 10**6  # the device's context and the kernels that it loads
LIBRARY_BYTES = CONTEXT_BYTES + 200 * 10**6  # and workspaces of libraries in torch's allocator
FRAGMENTED_SHARE = 0.03  # of the memory that the allocator loses to changing shapes
UPDATE_COPIES = 4  # fp32 tensors of an update's elements: resident moments, random bits, copies of a first step
DISK_STAGING_BYTES = 2 * 2 * TRANSFERS * 4 * CHUNK_NUMEL  # locked host memory of two stores that read and write
TOKEN_BYTES = 9 * 8  # of a token: id, position, target, and its place in the slots of attention
