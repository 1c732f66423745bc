"""The runs behind the lessons' figures, and the records that they leave in `data/curves/`."""
