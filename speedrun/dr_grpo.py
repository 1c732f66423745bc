"""Dr. GRPO as `rlcourse train` does it, with twice the learning rate, which then falls to 0, in 36 steps."""

settings = {"steps": 36, "lr": 8e-5, "warmup_steps": 2, "schedule": "linear"}
