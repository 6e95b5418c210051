"""Find problems in rows: in texts, which can be repaired, and in what are tokens already."""
