"""Invariants of batch samplers, the mistakes that they catch, and random cases to test them on."""
