"""The policy: what loading refuses, what it drops, how a question becomes a prompt, and copies that stay exact."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from policies import make_policy
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rlcourse.policy import load_policy, low_precision_copy


@pytest.fixture
def folder(model_folder, tmp_path) -> Path:
    """A copy of the model folder that a test may break."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def edit(path: Path, **changes) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(folder: Path, kind: type[Exception]) -> str:
    """The one sentence with which loading refuses the folder."""
    with pytest.raises(kind) as caught:
        load_policy(str(folder))
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_a_file_says_so(file, folder):
    (folder / file).unlink()
    assert file in refusal(folder, FileNotFoundError)


JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def test_a_run_isnt_a_model_but_its_checkpoints_are(tmp_path):
    for step in (5, 10):
        (tmp_path / f"checkpoints/step-{step:06d}").mkdir(parents=True)
    (tmp_path / "config.json").write_text("{}")
    latest = f"{tmp_path}/checkpoints/step-000010"
    said = f"^{tmp_path} is the folder of a run: name one of its checkpoints, such as {latest}.$"
    with pytest.raises(ValueError, match=said):
        load_policy(str(tmp_path))


BROKEN = {  # what a copy that went wrong leaves
    "cut": lambda content: content[: len(content) // 2],
    "binary": lambda content: bytes(range(256)) * 9,
    "a list": lambda content: b"[]",
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("file", [*JSON_FILES, "model.safetensors", "chat_template.jinja"])
def test_every_broken_file_of_a_model_is_refused(file, how, folder):
    (folder / file).write_bytes(BROKEN[how]((folder / file).read_bytes()))
    sentence = refusal(folder, ValueError)
    assert file in sentence or file == "chat_template.jinja"
    assert sentence.endswith(("copy the model's files again.", "use an instruction-tuned model."))


@pytest.mark.parametrize(
    ("file", "change", "sentence"),
    [
        ("config.json", {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "missing: model.layers.2"),
        ("config.json", {"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "unexpected: model.layers.1"),
        (
            "config.json",
            {"model_type": "vit"},
            "(AutoModelForCausalLM doesn't know the type in its config.json)",
        ),
        ("config.json", {"intermediate_size": 96}, "do not fit its config.json (mismatched: model.layers."),
        ("config.json", {"tie_word_embeddings": False}, "missing: lm_head.weight"),
        ("config.json", {"quantization_config": {"quant_method": "fp8"}}, "is quantized, and training needs whole wei"),
        ("config.json", {"output_router_logits": True}, "has output_router_logits, a loss that isn't added"),
        ("generation_config.json", {"eos_token_id": 10**6}, "eos_token_id in "),
        ("tokenizer_config.json", {"eos_token": "new"}, "has more tokens than its model's 300"),
        (
            "generation_config.json",
            {"stop_strings": ["</answer>"]},
            "has stop_strings ['</answer>'], and no engine",
        ),
        (
            "tokenizer.json",
            {"model": {"type": "BPE", "vocab": {}, "merges": []}},
            "writes '' for '#### -1,234,567.8",
        ),
        ("tokenizer.json", {"decoder": None}, "for '#### -1,234,567.890': copy the model's files again."),
        (
            "tokenizer.json",
            {"normalizer": {"type": "Replace", "pattern": {"String": "7"}, "content": "1"}},
            "writes '#### -1,234,561.890' for ",
        ),
    ],
)
def test_model_files_that_do_not_fit_each_other_are_refused(file, change, sentence, folder):
    edit(folder / file, **change)
    assert sentence in refusal(folder, ValueError)


def test_weights_that_are_not_finite_are_refused(folder):
    model = make_policy().model
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    model.save_pretrained(folder)
    assert "are not finite: use an earlier checkpoint" in refusal(folder, ValueError)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_a_weight_that_is_no_float_is_refused(dtype, folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "is quantized, and training needs whole weights: use the model that" in refusal(folder, ValueError)


def test_a_head_in_the_file_of_a_tied_model_is_a_head_of_its_own_wherever_it_is_saved(folder, tmp_path):
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = load_policy(str(folder)).model
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"]) and not model.config.tie_word_embeddings
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_template_that_can_is_asked_not_to_think(folder):
    thinking = "{% if enable_thinking is defined and enable_thinking is false %} at once{% endif %}"
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}" + thinking)
    policy = load_policy(str(folder))
    assert policy.tokenizer.decode(policy.prompt("1+1?")) == "1+1? at once"


def test_a_template_that_writes_a_turn_twice_is_refused(folder):
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}|{{ m.content }}|{% endfor %}")
    with pytest.raises(ValueError, match=r"^The model's chat template writes a turn twice: correct chat_template"):
        load_policy(str(folder))


def test_a_tokenizer_without_a_chat_template_is_refused_by_who_asks_in_a_chat(folder):
    (folder / "chat_template.jinja").unlink()
    policy = load_policy(str(folder))
    assert policy.tokenizer("1+1")["input_ids"]
    with pytest.raises(ValueError, match="no chat template: use an instruction-tuned model"):
        policy.prompt("1+1?")


@pytest.mark.parametrize("instruction", ["", "Reason step by step."])
def test_prompts_are_those_of_the_tokenizers_chat_template(instruction):
    policy = load_policy("embedded")
    messages = [{"role": "system", "content": instruction}] if instruction else []
    messages.append({"role": "user", "content": "Tom has 3 apples. How many?"})
    tokenizer = AutoTokenizer.from_pretrained(policy.tokenizer.name_or_path)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    prompt = policy.prompt("Tom has 3 apples. How many?", instruction)
    assert prompt == expected
    assert policy.tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")


def test_generation_defaults_of_a_model_folder_do_not_survive_loading(folder):
    """Qwen2.5-Instruct ships such defaults. Greedy text would change with the penalty, samples with top-k."""
    expected = load_policy(str(folder)).model.generation_config
    edit(folder / "generation_config.json", do_sample=True, top_k=1, top_p=0.1, repetition_penalty=5.0, temperature=0.1)
    policy = load_policy(str(folder))
    for name in ("top_k", "top_p", "repetition_penalty", "temperature"):
        assert getattr(policy.model.generation_config, name) == getattr(expected, name)
    torch.manual_seed(0)
    ids = policy.model.generate(torch.full((200, 2), 5), max_new_tokens=1, do_sample=True, top_k=0)
    assert len(ids[:, 2].unique()) > 10


@pytest.mark.parametrize(("eos", "expected"), [([1, 0], [1, 0, 2]), (0, [0, 2]), (None, [2])])
def test_what_ends_an_answer_is_what_model_folder_tokenizer_and_template_name(eos, expected, folder):
    edit(folder / "generation_config.json", eos_token_id=eos)
    assert load_policy(str(folder)).eos_ids == expected


def test_an_end_that_is_ordinary_text_is_refused(folder):
    edit(folder / "generation_config.json", eos_token_id=7)
    assert "is 7, the ordinary text '%', which would cut answers short: name <|im_end|>" in refusal(folder, ValueError)


def test_texts_leave_out_masked_special_and_unknown_tokens(policy):
    ids = policy.tokenizer("Tom has 3", add_special_tokens=False)["input_ids"]
    end, junk = policy.tokenizer.eos_token_id, len(policy.tokenizer) + 5
    rows = torch.tensor([[*ids, end, ids[0]], [junk, *ids, end], [end] * (len(ids) + 2)])
    mask = torch.ones_like(rows, dtype=torch.bool)
    mask[0, -1] = False
    mask[2, 1:] = False
    assert policy.texts(rows, mask) == ["Tom has 3", "Tom has 3", ""]


@pytest.mark.parametrize("tied", [True, False])
def test_a_low_precision_copy_keeps_the_frequencies_of_rope_in_float32(tied):
    model = make_policy(tied=tied).model
    copy = low_precision_copy(model, torch.bfloat16)
    assert {p.dtype for p in copy.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert copy.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(copy.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert (copy.lm_head.weight is copy.model.embed_tokens.weight) == tied


def test_a_tokenizer_with_a_decode_of_its_own_is_asked(folder):
    policy = load_policy(str(folder))

    class Own(type(policy.tokenizer)):
        def _decode(self, *arguments, **options):
            return "own " + super()._decode(*arguments, **options)

    policy.tokenizer.__class__ = Own
    ids = torch.tensor([policy.tokenizer("Tom has 3", add_special_tokens=False)["input_ids"]])
    assert policy.texts(ids, torch.ones_like(ids, dtype=torch.bool)) == ["own Tom has 3"]
