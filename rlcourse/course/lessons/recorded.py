"""Settings of recorded runs that lessons name and the records don't. The runs themselves are in `tools/lessons/`."""

# Lesson 14: sampled answers to each held-out problem; shares of training problems in which one launch is refused;
# supervised steps after the spoiled start.
SAMPLES = 4
FEWER, SLIGHTLY_FEWER = 0.4, 0.57
RETAUGHT_STEPS = 20
