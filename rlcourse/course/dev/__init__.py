"""Tools for those who work on the course itself."""
