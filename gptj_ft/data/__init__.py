"""Turn files of rows into tokenized documents, and these into batches addressed by step.

Unreadable data raises DataError and wrong options UsageError; both end the command. RowSkipped skips one row.
"""
