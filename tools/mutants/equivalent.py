"""Mutants that no test can notice, and why: the library promises the same with them."""

_EMPTY = "The tile ends where the other begins: the diagonal is empty either way."
_NOTHING = "slice(1, 0) is as empty as slice(0, 0)."
_TUNING = "A tuning constant: it moves bytes or time, and no result."
_PATHS = "It moves the threshold between two paths that compute the same."
_FILL = "The largest finite entry and the fill value lie far on either side of a half and of a third of it."
_GUARD = "It keeps a division from zero where there is nothing to cut: any height will do."

EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("engine/ring_sweep.py", "RingSweep._without_candidates", "0 → 1"): _NOTHING,
    ("engine/sigmoid.py", "_Block.add", "j.start < i.stop → j.start <= i.stop"): _EMPTY,
    ("engine/precision.py", "_chunks", "1 → 2 (2)"): _GUARD,
    ("engine/tiling.py", "row_blocks", "1 → 2 (2)"): _GUARD,
    ("engine/implementation.py", "", "2 ** 16 → 2 * 16"): _PATHS,
    ("engine/small_batch.py", "uses_small_batch_path", "2 if views else 1 → 2 if True else 1"): _PATHS,
    ("engine/precision.py", "unit_rows", "if is_dense() or is_small_batch(x.numel()): → if True:"): _PATHS,
    ("engine/anchor_block.py", "class_numbers_as_floats", "2 ** 24 → 2 * 24"): "float64 represents these numbers, too.",
    ("engine/hinges.py", "", "128 → 129"): _TUNING,
    ("ranks/handshake.py", "", "2 → 3"): _TUNING,
    ("ranks/handshake.py", "_header", "1 → 2"): "Any negative number of bytes says that there is no payload.",
    ("engine/masked.py", "_MaskedExtreme.forward", "int(ties.amax()) > 1 → int(ties.amax()) >= 1"): _PATHS,
    ("engine/max_sim.py", "_MaxSim.forward", "left out: keep_freed_memory(queries)"): _TUNING,
    ("engine/tiling.py", "tile_shape", "1 → 2 (2)"): _GUARD,
    (
        "engine/softmax_arithmetic.py",
        "ShiftedSums.transform",
        "s.sub_(self.u) if self.u else s → s.sub_(self.u) if True else s",
    ): _PATHS,
    ("engine/pairs.py", "TowerPairs.binary_cross_entropy", "not on_kernel → not not on_kernel"): _PATHS,
    (
        "engine/sigmoid.py",
        "_SigmoidPairs.forward",
        "sweep.learns and any(ctx.needs_input_grad) and (sweep.reduction != 'none') → "
        "sweep.learns or any(ctx.needs_input_grad) or sweep.reduction != 'none'",
    ): "A gradient that is not read.",
    ("engine/max_sim_sweep.py", "sum_selected", "True → False"): "It orders the terms of a sum.",
    ("engine/softmax_arithmetic.py", "log_sum_of_inversions", "1 → 2"): "One more −inf among the exponents of a sum.",
    ("engine/masked.py", "_MaskedLogSumExp.forward", "2 → 3"): _FILL,
    ("engine/pairs.py", "TowerPairs.sums_by_direction", "if shards.total: → if True:"): _PATHS,
    ("engine/pairs.py", "TowerPairs.sum_over", "False → True"): "Sums of the other side, too, which are dropped.",
    ("engine/tiling.py", "tile_shape", "1 → 2"): _GUARD,
    ("engine/small_batch.py", "_learnt", "0.0 → 1.0"): "Of a constant temperature the derivative is not read.",
    (
        "engine/small_batch.py",
        "_SmallBatch.forward",
        "norm.clamp(min=MIN_NORM) if has_zero_row else norm → norm.clamp(min=MIN_NORM) if True else norm",
    ): "Without a row below the smallest norm the bound changes none.",
    (
        "engine/classes.py",
        "ClassPairs.embeddings",
        "self.batch.concatenated([first, *others]) if others else first → "
        "self.batch.concatenated([first, *others]) if True else first",
    ): "A copy of one tensor alone.",
    (
        "engine/sigmoid.py",
        "_Sweep.__call__",
        "torch.zeros_like(columns) if learns else columns[:0] → torch.zeros_like(columns) if True else columns[:0]",
    ): "Memory for a gradient that nothing is written to.",
    (
        "engine/anchor_block.py",
        "start_count",
        "(ends - starts).amax() - int(anchors_are_candidates) → (ends - starts).amax() + int(anchors_are_candidates)",
    ): "A higher bound of positives: further steps of the loop find none.",
    (
        "engine/compiled_sweep.py",
        "CompiledSweep._or_uncompiled",
        "2 → 3",
    ): "The line that the warning names lies inside of this package either way.",
    ("engine/softmax_arithmetic.py", "cross_entropy", "40 → 41"): _PATHS,
    ("ranks/adjoints.py", "_Gathered.backward", "if torch.is_grad_enabled(): → if True:"): _PATHS,
    (
        "engine/small_batch.py",
        "_gradient_of_rows",
        "local_slice is None → local_slice is not None (2)",
    ): "Gradients of other ranks' rows, too, of which the caller takes its own.",
    (
        "engine/softmax_sweep.py",
        "_logits",
        "if isinstance(scale, Tensor): → if True:",
    ): "A number may be a factor of the matmul, which is faster, or of its result.",
    (
        "engine/softmax_sweep.py",
        "SoftmaxSweep.lost_precision",
        "lowest >= math.exp(-window) → lowest > math.exp(-window)",
    ): "At the threshold both arithmetics are precise; the window has a margin of 38 nats.",
    (
        "engine/masked.py",
        "_fill_unselected",
        "not devices.on_cpu(x) → not not devices.on_cpu(x)",
    ): "Two ways of writing the same matrix, the faster one on each device.",
    (
        "engine/masked.py",
        "_MaskedExtreme.forward",
        "2 → 3",
    ): _FILL,
    ("ranks/handshake.py", "", "8 → 9"): _TUNING,
    ("ranks/group_state.py", "ReservedBytes.learn", "0 → 1 (3)"): _TUNING,
    (
        "wrapper/step.py",
        "ThirdPartyStep.statement",
        "if call.miner is not None: → if True:",
    ): "None has no settings to compare.",
}
"""The reason by module, function and change, as :attr:`tools.mutants.changes.Mutant.name` has them."""
