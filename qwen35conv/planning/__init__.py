"""What becomes of every tensor and of the files beside them. Pure: it opens and writes nothing."""
