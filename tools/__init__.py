"""Programs that write pages of the documentation, and what only they and the tests use. Not installed."""
