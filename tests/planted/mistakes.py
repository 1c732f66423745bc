"""The mistakes that quick tests have to find: (function, tests, what is wrong in it: a mistake each).

"losses" is test_losses.py, "rollout/blocks" is rollout/test_blocks.py; `-k WORD` selects tests by name, for speed. Add
a row with the code that it spoils.
"""
# fmt: off

import torch
from plant import Mistake, arg, const, drop, keep, kw, name, no, op, returns, swap, unset, unsliced, when, wrong


def with_gradients(f):
    return lambda *args, **kwargs: torch.enable_grad()(f)(*args, **kwargs)


def eps_in_the_root(f):
    def normalized(rewards, n, eps=1e-4):
        centered = rewards.view(-1, n) - rewards.view(-1, n).mean(1, keepdim=True)
        return (centered / (centered.var(1, keepdim=True) + eps).sqrt()).flatten()

    return normalized


def by_the_mean(f):
    return lambda rewards, n: rewards.view(-1, n)[:, 0] != rewards.view(-1, n).mean(1)


ROWS = [
    # losses
    ("importance_ratio", "losses", op("Sub", "Add", 1), drop("detach", 2), drop("masked_fill", 2)),
    ("token_loss", "losses", no(3), no(4), name("minimum", "maximum"), name("clip_low", "clip_high", 1)),
    ("token_loss", "losses", drop("detach"), op("Gt", "GtE", 2), op("Lt", "LtE", 1), op("BitAnd", "BitOr", 1)),
    ("sampler_correction", "losses", drop("detach"), name("sum", "mean"), drop("clamp"), const(1.0, 0.0)),
    ("aggregate", "losses", drop("masked_fill"), name("rows", "tokens", 1), drop("max")),
    ("aggregate", "losses", name("max_new_tokens", "tokens")),
    ("value_loss", "losses", name("maximum", "minimum"), drop("clamp"), name("old_values", "values", 3)),
    ("kl_estimate", "losses", op("Sub", "Add", 1), no(), name("expm1", "exp")),
    # the reader's loop
    ("own:put", "course/loop", op("Sub", "Add", 1)),
    ("own:needed", "course/loop", op("BitAnd", "BitOr")),
    # advantages
    ("leave_one_out", "advantages", op("Sub", "Add")),
    ("group_centered", "advantages", keep("Sub", 0, 1)),
    ("group_normalized", "advantages", kw("std", "correction", "0"), keep("Add", 0)),
    ("group_normalized", "advantages", wrong(eps_in_the_root, "eps in the root")),
    ("has_signal", "advantages", wrong(by_the_mean, "from the mean"), name("any", "all")),
    ("_groups", "advantages", swap("reshape")),
    ("token_rewards", "advantages", keep("BitAnd", 0)),
    ("gae", "advantages", keep("Mult", 1, 1), keep("Mult", 1, 3), drop("masked_fill", 2), drop("reversed")),
    ("gae", "advantages", keep("Add", 0, 3)),
    ("whiten", "advantages", keep("Sub", 0), drop("masked_fill", 2), const(1e-8, 0.0)),
    # log-probs and sampling
    ("before_each_token", "logprobs", op("Sub", "Add", 1)),
    ("padded_ids", "boundaries -k wider_on_a_gpu", no(1), drop("F.pad")),
    ("chunked_logprobs", "logprobs", when(True, 2)),
    ("chunked_logprobs", "learner -k compile_is", when(False, 1)),
    ("head:_of_logits", "logprobs", no(1), kw("sampling_logits", "keep"), drop("sampling_logits")),
    ("sampling_logits", "sampling", op("Div", "Mult"), op("Lt", "LtE", 3), keep("Sub", 0)),
    ("sampling_logits", "logprobs", drop("float", 1), drop("masked_fill", 1), const(False, True)),
    ("sample_tokens", "sampling", keep("Sub", 0, 2), drop("log_", 2)),
    # batches
    ("batch:completion_lengths", "batch", keep("Sub", 0)),
    ("batch:completion_mask", "batch", op("Lt", "LtE")),
    ("Rollout.completion_ids", "batch", drop("masked_fill"), drop("clamp")),
    ("join_rows", "batch", drop("masked_fill"), op("Lt", "LtE"), name("repeat_interleave", "repeat", 1)),
    # the step
    ("train_step", "step -k sleeps", drop("sleep")),
    ("train_step", "step", drop("detach"), swap("token_loss"), kw("token_loss", "ratio", "'token'")),
    ("train_step", "step", kw("token_loss", "clip_high", "config.clip_low"), swap("sampler_correction")),
    ("train_step", "step", keep("Mult", 1, 1), arg("aggregate", 2, "'token_mean'", 1)),
    ("train_step", "step", arg("aggregate", 2, "'constant'", 3), keep("Mult", 1, 2)),
    ("train_step", "step", swap("kl_estimate"), arg("kl_estimate", 2, "'k1'")),
    ("train_step", "step", swap("value_loss", 1, 2), drop("abs"), op("Sub", "Add", 2)),
    ("train_step", "step -k reports", arg("update", 2, "0"), keep("Add", 0, 3)),
    ("make_batch", "step", keep("BitAnd", 0)),
    ("make_batch", "step", swap("adv.gae", 3, 4), drop("adv.whiten"), swap("Batch", 4, 5, 1)),
    ("completion_advantages", "step", name("leave_one_out", "group_centered")),
    ("completion_advantages", "step", name("group_normalized", "group_centered")),
    ("plan_minibatches", "micro_batches", name("randperm", "arange"), arg("range", 0, "1")),
    ("rows_that_train", "micro_batches", keep("Or", 1), keep("Or", 0), keep("Mult", 0)),
    ("old_logprobs", "step -k without_a_gradient", when(False, 1)),
    ("old_logprobs", "step", wrong(with_gradients, "with gradients")),
    ("old_logprobs", "exact/users", keep("And", 0)),
    ("Means.add", "metrics", no(), name("sum", "numel", 2)),
    ("Means._join", "metrics", name("maximum", "minimum")),
    # micro-batches
    ("micro_batches", "micro_batches", kw("argsort", "descending", "True")),
    ("batches_of", "micro_batches", arg("micro_batches", 2, "10**9"), op("FloorDiv", "Mult")),
    ("packed_together", "micro_batches", op("Add", "Sub", 1), keep("And", 0, 0)),
    ("rows_together", "micro_batches", const(1, 2, 2), returns(lambda counts: counts[::-1], "reversed")),
    # the learner
    ("train:update", "learner", drop("zero_grad", 2), drop("zero_grad", 1), keep("Mult", 0), when(False)),
    ("train:update", "learner", arg("clip_grad_norm_", 1, "1e9")),
    ("new_optimizer", "learner", const(0.95, 0.999), kw("AdamW", "weight_decay", "0.01")),
    ("lr_factor", "learner", op("Lt", "LtE"), keep("Add", 0, 1)),
    ("Learner.__init__", "learner", name("VALUE_LR", "GAMMA"), drop("frozen_copy")),
    ("Learner.__init__", "learner", name("needs_reference", "kl_coef")),
    ("Learner.__init__", "lora", name("requires_grad", "is_leaf")),
    ("Learner.values", "learner", wrong(with_gradients, "with gradients")),
    ("Learner.reference_logprobs", "learner", name("reference_pass", "policy_pass", 2)),
    # collecting
    ("collect", "collect", no(1), op("Lt", "LtE", 1)),
    ("collect", "collect", returns(lambda found: (found[0], found[0]), "not all that was sampled")),
    ("collect", "tasks/task -k measures_and_logs", kw("judge", "training", "False")),
    ("collect", "collect", no(2), unsliced()),
    ("rollout_metrics", "metrics", no(1), no(3), keep("Sub", 1, 2)),
    ("PromptSampler.sample", "tasks/prompts", unset("position")),
    ("PromptSampler._permutation", "tasks/prompts", keep("Add", 0), keep("Add", 1), kw("randperm", "generator")),
    # engines
    ("HFEngine.generate", "rollout/engine_promises -k in_its_mode", drop("train")),
    ("make_rollout", "rollout/engine_promises -k last_allowed", drop("isin")),
    ("TorchEngine._sampler", "rollout/engine_promises -k compiled_sampler", drop("replace")),
    ("TorchEngine._sampler", "rollout/engine_promises -k compiled_sampler", arg("replace", 0, "Sampling()")),
    # blocks and the scheduler
    ("BlockManager.share", "rollout/blocks", drop("pop")),
    ("BlockManager.release", "rollout/blocks", drop("reversed")),
    ("BlockManager.find", "rollout/blocks", unsliced()),
    ("BlockManager.use_weights", "rollout/blocks", when(False), unset("free_blocks")),
    ("BlockManager._drop_longest_unused", "rollout/blocks", name("iter", "reversed")),
    ("BlockManager.blocks_for", "rollout/scheduler", no(2)),
    ("Scheduler._to_cache", "rollout/scheduler", keep("Sub", 0)),
    ("Scheduler._at_least", "rollout/scheduler", op("Gt", "GtE")),
    ("Scheduler._blocks_needed", "rollout/scheduler", keep("Add", 0, 1), keep("Sub", 0)),
    ("Scheduler._release", "rollout/scheduler", drop("release", 2)),
    ("Scheduler._grow", "rollout/scheduler", unset("completion"), keep("Add", 0, 3)),
    ("Scheduler._preempt", "rollout/scheduler", op("Gt", "GtE")),
    ("Scheduler._start", "rollout/scheduler", when(True, 4)),
    ("Scheduler._begin", "rollout/scheduler", drop("release"), keep("And", 0, 1), keep("Sub", 0, 1)),
    ("Scheduler._prefill", "rollout/scheduler", keep("And", 0), unsliced(1)),
    ("Scheduler.next_plan", "rollout/scheduler", when(True, 1)),
    ("Scheduler._room_ahead", "rollout/scheduler_waste", op("Lt", "LtE", 1), op("LtE", "Lt"), op("Gt", "GtE")),
    ("Scheduler.next_plan", "rollout/scheduler_waste", op("Lt", "LtE")),
    ("Scheduler._grow", "rollout/scheduler_waste", op("Gt", "GtE", 2)),
    ("Scheduler._preempt", "rollout/scheduler_waste", op("LtE", "Lt"), op("FloorDiv", "Div")),
    ("Scheduler._begin", "rollout/scheduler_waste", when(True, 2)),
    ("Scheduler.__init__", "rollout/scheduler", keep("Sub", 0)),
    # the exact operations
    ("operations:inverse_rms", "exact/operations", keep("Add", 0, 3)),
    ("exact/operations:rotated", "exact/pass -k gradients_are_those", op("Sub", "Add")),
    ("operations:attend", "exact/operations -k joins_tiles", const("-inf", "0", 1)),
    ("operations:join", "exact/operations -k joins_tiles", keep("Mult", 0, 3)),
    ("operations:total_mass", "exact/operations -k sampled_token_is", keep("Sub", 0)),
    ("pass_kernels:attention_kernel", "exact/operations -k joins_tiles", op("LtE", "Lt", 2)),
    ("ExactPass._states", "exact/pass -k and_only_then", drop("follow")),
    ("exact/model:pack", "exact/sequences", drop("argsort")),
    ("Sequences.of", "exact/sequences", keep("Sub", 0, 2)),
    ("unknown_part", "rollout/families", when(False, 2), when(False, 3), keep("Or", 1)),
    ("model_pass", ("lora", "exact/users"), keep("Or", 0)),
    # verdicts
    ("Readings.reward", "tasks/verify", when(True, 1), const(1.0, 0.0)),
    ("tasks/verify:verify", "tasks/verify", keep("And", 0, 2), drop("to_number", 2)),
    ("extract_strict", "tasks/verify", drop("reversed")),
    ("extract_lenient", "tasks/verify", drop("reversed", 3)),
    ("MathTask.judge", "tasks/verify", when(True)),
    ("mean_metrics", "tasks/task", op("IsNot", "Is")),
    ("last_box", "tasks/math", keep("And", 0, 2), op("Gt", "Lt")),
    ("left_to_compute", "tasks/math -k left_where", keep("And", 0)),
    ("boxed:compare", "tasks/math -k means_the_same", kw("verify", "allow_set_relation_comp")),
    ("boxed:compare", "tasks/math -k something_else", keep("Or", 0, 1)),
    ("boxed:places", "tasks/math -k something_else", const(5, 0)),
    ("BoxedTask.judge", "tasks/math -k copied", keep("And", 0, 1)),
    # evaluation
    ("answer_problems", "evaluation", drop("manual_seed"), kw("fork_rng", "enabled", "False"), when(False, 3)),
    ("answer_problems", "evaluation", keep("Add", 0, 2)),
    ("pass_at_k", "evaluation", keep("Sub", 0, 2)),
    # runs, checkpoints and how they go on
    ("TrainingLoop.setup", "trainer -k killed", drop("manual_seed")),
    ("TrainingLoop.run_all", "endings -k not_finite_ends", drop("check_metrics")),
    ("Trainer.validate", "trainer -k validation", const("validation", "test")),
    ("restore", "trainer -k killed", unset("position"), drop("set_random_state")),
    ("restore", "trainer -k killed", drop("optimizer.load_state_dict")),
    ("TrainingLoop.start", "trainer -k killed", drop("forget_after")),
    ("restore", "trainer -k dies", drop("value_head.load_state_dict")),
    ("save_checkpoint", "checkpoint -k not_finite", drop("check_finite")),
    ("save_checkpoint", "checkpoint", no(), drop("policy.tokenizer.save_pretrained")),
    ("check_finite", "checkpoint", when(False)),
    ("checkpoint:_checkpoints", "checkpoint", name("fullmatch", "match")),
    ("checkpoint:_checkpoints", "checkpoint -k another_name", kw("sorted", "key")),
    ("load_state", "endings -k pickle_of_something", kw("load", "weights_only", "False")),
    ("run_to_resume", "runs", unsliced(), when(False, 5), keep("BitOr", 0)),
    ("RunFolder.forget_after", "runs", op("LtE", "Lt")),
    ("files:write_text", "files", drop("replace")),
    ("files:new_folder", "files", drop("rmtree", 1), drop("rmtree", 2), drop("replace")),
    ("check_apart", "files", when(False)),
    ("StopAfterStep._asked", "interrupts -k closed_terminal", when(False, 1)),
    ("TrainConfig.sampling", "config", returns(lambda s: type(s)(s.temperature, s.top_k), "no top_p")),
    # LoRA
    ("lora:_merged_weight", "lora", kw("addmm", "alpha")),
    ("copy_merged", "lora -k large_and_small", op("GtE", "Gt")),
    ("copy_merged", "lora", drop("copy_", 3)),
    ("without_adapter", "lora", const(False, True), const(True, False)),
    ("lora:merge", ("lora", "adapter_folders"), drop("copy_"), drop("requires_grad_")),
    ("add_adapter", "lora", kw("LoraConfig", "lora_alpha")),
    ("load_adapter", ("lora", "adapter_folders"), when(False, 3), when(False, 4), drop("silence")),
    ("check_options", ("lora", "adapter_folders"), when(False, 1), when(False, 2)),
    ("load_merged", ("lora", "adapter_folders"), when(False)),
    # models, templates and tokenizers of others
    ("try_model", "trial", drop("silence"), when(False, 1)),
    ("logprobs_and_states", "trial", when(True), when(False)),
    ("write_chats", "chat", when(False, 2), when(False, 3)),
    ("apply_template", "chat", when(False)),
    ("ends_of", "policy", when(False, 3)),
    ("up_to_its_end", "chat", name("min", "max")),
    ("Policy.texts", "policy", drop("clamp")),
    ("is_adapter", "lora", keep("And", 0)),
    # fine-tuning
    ("packing:pack", "sft/packing", keep("Sub", 0, 1)),
    ("summed_loss", "sft/packing", kw("logprobs_and_states", "position_ids")),
    ("plan_rows", "sft/packing", op("GtE", "Gt")),
    ("sft/data:encode", "sft/sft_data", const(True, False, 2), when(False, 2)),
    ("restore", "sft/fine_tuning -k other_data", when(False, 2)),
    # judges of kernels
    ("Judge._fast", "tasks/kernelbench/answers -k faster_than_memory", arg("max", 2, "0.0")),
    ("Judge._fast", "tasks/kernelbench/answers -k clock_outside", arg("max", 1, "0.0"), when(False, 1)),
    ("judging:Verdict.reward", "tasks/kernelbench/answers -k capped", drop("min"), when(False)),
    ("of_floats", "tasks/kernelbench/compare", keep("Mult", 1, 1), when(False, 3)),
    ("compare:expect", "tasks/kernelbench/compare", drop("copied", 1)),
    ("rules:imported", "tasks/kernelbench/rules", when(False, 2)),
    ("has_kernel", "tasks/kernelbench/rules", name("any", "bool")),
    # several ranks
    ("OneProcess.split_rows", "micro_batches", unsliced()),
    ("Means._join", "distributed/world", name("maximum", "add")),
    ("world:World.all_reduce_gradients", "distributed/world", drop("self.all_reduce", 2)),
    ("world:World.gather_state", "distributed/world -k differ_are", when(False)),
    ("SharedEngine.generate", "distributed/world", kw("fork_rng", "enabled", "False")),
    ("train_step", "distributed/world", drop("all_reduce_gradients")),
    ("Learner.values", "distributed/world", drop("world.all_reduce")),
    ("VLLMEngine.generate", "rollout/vllm", drop("_take_weights")),
    # warnings and previews
    ("little_signal", "watch -k mostly_agree", returns(lambda found: {}, "never")),
    ("watch:apart", "watch -k another_policy", returns(lambda found: {}, "never")),
    ("collapse", "watch -k collapse", returns(lambda found: {}, "never"), op("LtE", "Gt")),
    ("sft/trainer:after_step", "watch -k memorized", returns(lambda found: {}, "never")),
    ("after_evaluation", "watch -k memorized", returns(lambda found: {}, "never")),
    ("evaluation_seconds", "watch -k every_evaluation", const(2, 1, 1), const(2, 1, 2)),
    ("MathTask.with_settings", "watch -k worked_examples", kw("replace", "train")),
    ("Readings.right", "tasks/verify -k chosen_reading", returns(lambda found: False, "never")),
    # a speedrun
    ("verifier:verify", "speedrun/verifier -k new_ones", op("Lt", "Gt", 1), op("Lt", "Gt", 2)),
    ("with_weights", "speedrun/verifier -k finite_weights", when(False, 1), when(False, 2)),
    # the course
    ("Bet.scored", "course/widgets -k range_of_the_seeds", op("Sub", "Add", 1), op("Sub", "Add", 2)),
]


MISTAKES = [
    Mistake(where, rule, (tests,) if isinstance(tests, str) else tests)
    for where, tests, *rules in ROWS
    for rule in rules
]
