"""Read rows of tasks whose head labels texts, words, spans or sentences."""
