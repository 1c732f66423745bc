"""The kernels of the lessons in CuTe DSL. As in `rlcourse.kernels`, a file has its reference in plain PyTorch, the
kernel, and its operation. Forward and backward: `rope`, `swiglu`, `attention`, `embedding`,
`token_logprob` (softmax and cross-entropy), and RMSNorm, in inference (`rms_norm`) and with the residual stream in
training (`residual_norm`). One way: `sampler` and `adamw`. For lesson 09, the steps to decode attention:
`decode_simple`, `decode_split`, `decode_ahead`. For lesson 12, the plan of a norm's gradient in float32:
`rms_norm_backward`."""
