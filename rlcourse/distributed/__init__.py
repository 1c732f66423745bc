"""Several ranks that share a run: `world.py`, split models: `sharded.py`, and how they start: `launch.py`."""
