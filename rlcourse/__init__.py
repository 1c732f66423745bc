"""rlcourse: reinforcement learning for language models, from the policy gradient to a GPU kernel.

Nothing heavy is imported here, so that `import rlcourse` is instant. One training step, `step.train_step`, passes
through, in this order: `collect` (`tasks.prompts` → `rollout` → the task's `judge`) → `advantages` → `logprobs` →
`losses` → `learner`. What one hands to the next is in `batch`; `loop` repeats the step.
"""

__version__ = "0.1.0"
