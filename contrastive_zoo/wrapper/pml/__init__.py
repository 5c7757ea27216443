"""The losses of pytorch-metric-learning that this library has, too: ``prefer_native=True`` computes them in its place.

A translation is exact or refused. It follows the formula where pytorch-metric-learning does not: a probability that
underflows, a loss that rounds to 0, the derivative of arccos at 1, a batch of which it returns 0 or NaN.
"""
