"""The losses, a file for each family, memories of earlier batches and the momentum encoder included."""
