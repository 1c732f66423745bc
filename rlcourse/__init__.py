"""rlcourse: reinforcement learning for language models, from the policy gradient to a GPU kernel.

Start with `train.py`: the loop, `train_step` and the optimizer's update. A step goes through `collect`
(`tasks.prompts` → `rollout` → the task's `judge`), `advantages`, `logprobs` and `losses`; what one hands to the next is
in `batch`. Nothing heavy is imported here, so `import rlcourse` is instant.
"""

__version__ = "0.1.0"
