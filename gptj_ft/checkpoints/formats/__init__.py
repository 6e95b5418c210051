"""Read and write checkpoint formats, tensor by tensor, one module each."""
