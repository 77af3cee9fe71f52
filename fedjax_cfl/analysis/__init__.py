"""Reads run directories, and compares, draws and reports what is in them."""
