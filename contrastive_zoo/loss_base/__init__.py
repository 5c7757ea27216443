"""What losses share: the base class, checks, preparation, temperature, and losses by rows, panels, classes and sums."""
