"""Mutants that no test can notice, and why: the library promises the same with them."""

_EMPTY = "The tile ends where the other begins: the diagonal is empty either way."
_NOTHING = "slice(1, 0) is as empty as slice(0, 0)."
_TUNING = "A tuning constant: it moves bytes or time, and no result."

EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("engine/ring_sweep.py", "RingSweep._without_candidates", "0 → 1"): _NOTHING,
    ("engine/sigmoid.py", "_Block.add", "j.start < i.stop → j.start <= i.stop"): _EMPTY,
    ("engine/unit_rows.py", "_chunks", "1 → 2 (4)"): "Rows are split so only if there are none.",
    ("handshake.py", "", "8 → 9"): _TUNING,
    ("handshake.py", "_Reserved.learn", "0 → 1 (3)"): _TUNING,
    (
        "distributed.py",
        "DistributedLoss._alone",
        "Arguments.of(call.bound.arguments).rows if self._observing else {} → "
        "Arguments.of(call.bound.arguments).rows if True else {}",
    ): "Only an observer reads these rows.",
    (
        "distributed_step.py",
        "DistributedStep._options",
        "if self.call.miner is not None: → if True:",
    ): "None has no settings to compare.",
}
"""The reason by module, function and change, as :attr:`tools.mutants.changes.Mutant.name` has them."""
