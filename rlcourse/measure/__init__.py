"""What time and memory a run takes, what a machine could do, and the records that keep such figures."""
