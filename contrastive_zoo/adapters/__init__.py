"""Adapters for losses of other libraries. Each module imports its library, so import only the one that you use."""
