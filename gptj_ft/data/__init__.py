"""From files to batches: records -> fields -> template -> prepare, then batches addressed by step."""
