"""Proof that a loss is the same function on W processes as on one: worlds, global batches, invariants."""
