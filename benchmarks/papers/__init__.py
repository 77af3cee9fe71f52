"""Published tables and figures, reproduced cell by cell."""
