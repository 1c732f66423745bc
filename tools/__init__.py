"""Tools of the course's authors. They aren't installed: run them from the root of a clone, `python -m tools.NAME`."""
