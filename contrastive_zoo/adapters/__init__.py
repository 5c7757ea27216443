"""Losses of other libraries, whole. Each module imports its library; none is imported before it is asked for."""
