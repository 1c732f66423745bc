"""Settings of recorded runs that lessons name and the records don't. The runs themselves are in `tools/lessons/`."""

RETAUGHT_STEPS = 20  # of lesson 14: supervised, after the spoiled start
