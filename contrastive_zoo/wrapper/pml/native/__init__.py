"""Translations of pytorch-metric-learning's losses: this library's loss with the same value, in memory linear in the batch.

A translation is exact or refused. That includes degenerate batches: one class, all classes distinct, one or two samples,
duplicates. Where pytorch-metric-learning returns NaN (a mean of no anchors, the variance of one sample), the translation
returns NaN. It follows the formula where pytorch-metric-learning's arithmetic fails: a probability that underflows, a
loss that rounds to 0 and is then left out of a mean, the derivative of arccos at 1.
"""
