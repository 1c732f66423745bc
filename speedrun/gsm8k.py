"""Dr. GRPO on GSM8K without examples, for any last number: the best that we know within ten minutes on an H100."""

settings = {
    "examples": 0,
    "reward_parser": "lenient",
    "num_prompts": 64,
    "lr": 2.5e-6,
    "steps": 440,
    "max_new_tokens": 300,
}
