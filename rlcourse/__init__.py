"""rlcourse: reinforcement learning for language models, from the policy gradient to a GPU kernel.

Nothing heavy is imported here, so that `import rlcourse` is instant. One training step, `step.train_step`, passes
through, in this order: `collect` (`tasks.prompts` → `rollout` → `tasks.verify`) → `advantages` → `logprobs` → `losses`
→ `learner`. What one hands to the next is in `batch`; `trainer` repeats the step.
"""

import os

__version__ = "0.1.0"

# OpenMP reads this when torch is loaded. Its threads otherwise spin while they wait for each other, and where another
# process has one of two cores, a training step takes several times as long. An idle machine is as fast either way.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
