"""Experiments behind the lessons' figures: what they train, and the records that they leave in `data/curves/`."""
