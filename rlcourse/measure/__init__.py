"""What time and memory a run takes, what a machine can do, and the records that keep such figures."""
