"""The losses, one file each, memories of earlier batches and the momentum encoder included."""
