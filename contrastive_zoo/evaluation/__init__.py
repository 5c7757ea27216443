"""Retrieval metrics of the rows of all ranks, the same for every split: search, metrics, objects."""
