"""Processes for code that nobody vouches for: a reader's notebook that is graded, a kernel that a model wrote."""
