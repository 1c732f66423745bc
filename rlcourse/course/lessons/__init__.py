"""What the lessons import: experiments in memory, parts of recorded runs, and the records of learning curves."""
