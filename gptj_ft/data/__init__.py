"""Turn files of rows into tokenized documents, and these into batches addressed by step."""
