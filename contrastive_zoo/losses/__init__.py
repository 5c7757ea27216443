"""The zoo: one file per loss."""
