"""Find problems in rows: in texts, which can be repaired, and in token ids."""
