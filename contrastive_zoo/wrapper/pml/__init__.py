"""The losses of pytorch-metric-learning that this library has, too: ``prefer_native=True`` computes them in its place.

A translation has the same formula, also where theirs underflows, rounds to 0 or returns NaN, or it is refused.
"""
