"""One step over all matrices."""
