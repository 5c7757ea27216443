"""Share between losses: the base class, checks, preparation, temperature, and losses by rows, blocks, classes and sums."""
