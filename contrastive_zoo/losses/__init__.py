"""Define the losses, one file per loss."""
