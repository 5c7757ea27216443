"""Mutants that no test can notice, and why: the library promises the same with them."""

EQUIVALENT: dict[tuple[str, str, str], str] = {}
"""The reason by module, function and change."""
