"""The worker: one process's share of the model, its threads and its memory."""
