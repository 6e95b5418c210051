"""Read and write GGUF, llama.cpp's model files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""
