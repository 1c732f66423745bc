"""The kernels of the lessons in CuTe DSL. As in `rlcourse.kernels`, a file has its reference in plain PyTorch, the
kernel, and its operation.

Forward and backward: `rope`, `swiglu`, `attention` (with `attention_backward`), `embedding`, `token_logprob` (softmax
and cross-entropy), and RMSNorm, in inference (`rms_norm`) and with the residual stream in training (`residual_norm`).
One way: `sampler`, `adamw`, and `column_sum`, which adds up the parts of a weight's gradient. `python -m tools.bench
layer` measures them beside `torch.compile`.

For lesson 09, the steps to decode attention: `decode_simple`, `decode_split`, `decode_ahead`. For lesson 12, the plan
of a norm's gradient in float32: `rms_norm_backward`. These have no operation.
"""
