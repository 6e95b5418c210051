"""Rows of tasks whose head labels texts, words, spans or sentences: what it reads of them, and what it learns."""
