"""Adapters for other libraries. Each module imports its library, except open_clip's, so import only the one that you use."""
