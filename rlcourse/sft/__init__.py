"""Supervised fine-tuning: a model learns to continue conversations as the answers in them do.

`config.py`: every setting. `data.py`: conversations from files, tasks or the hub, as tokens. `packing.py`: several
examples in a row of a batch, kept apart, and their loss. `trainer.py`: a step. The loop, files of runs,
checkpoints, optimizer and the head in chunks are those of `rlcourse train`.
"""
