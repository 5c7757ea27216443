"""Mutants that no test can notice, and why: the library promises the same with them."""

_EMPTY = "The tile ends where the other begins: the diagonal is empty either way."
_NOTHING = "slice(1, 0) is as empty as slice(0, 0)."
_TUNING = "A tuning constant: it moves bytes or time, and no result."

EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("engine/ring_sweep.py", "RingSweep._without_candidates", "0 → 1"): _NOTHING,
    ("engine/sigmoid.py", "_Block.add", "j.start < i.stop → j.start <= i.stop"): _EMPTY,
    ("handshake.py", "", "8 → 9"): _TUNING,
}
"""The reason by module, function and change, as :attr:`tools.mutants.changes.Mutant.name` has them."""
