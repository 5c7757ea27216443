"""Is a training script the same on W processes as on one? Record its steps, repeat them in one process, compare."""
