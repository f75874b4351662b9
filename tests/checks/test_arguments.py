"""Arguments of the trainer that are refused, most before the model is loaded."""

import shutil
from pathlib import Path

import pytest
import torch
import trl
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.mamba import modeling_mamba
from transformers.models.nemotron_h import modeling_nemotron_h
from trl import GRPOConfig

from testing_utils import make_problems, make_tiny_mixture, make_tiny_model, make_tiny_tokenizer, refused, spread
from testing_utils.trainings import EXPERTS, arguments, config, make
from trl_qarl.checks.batches import fit_generation_batch
from trl_qarl.checks.content import problems_of_prompts
from trl_qarl.checks.model import problems_of_division, problems_of_pictures
from trl_qarl.quantization.swap import restore_model
from trl_qarl.trainer.qarl_trainer import QaRLTrainer


@pytest.fixture
def no_engine(monkeypatch):
    """An engine must not be made."""
    monkeypatch.setattr("trl_qarl.trainer.qarl_trainer.QaRLVLLMGeneration", lambda **_: pytest.fail("made"))


def test_masters_below_float32_are_refused(tmp_path, no_engine):
    path = make_tiny_model(tmp_path, "qwen2", dtype="bfloat16")
    # By a name, known from the weights alone.
    for model in (path, AutoModelForCausalLM.from_pretrained(path, dtype="auto")):
        with pytest.raises(ValueError, match="masters are bfloat16.*round to nothing.*Load the model in float32"):
            make(model, tmp_path / "run", use_vllm=True, model_init_kwargs={"dtype": "auto"})


@pytest.mark.parametrize("is_loaded", [False, True])
def test_experts_in_high_precision_are_refused(tmp_path, no_engine, is_loaded):
    model = make_tiny_model(tmp_path, "qwen3_moe", **EXPERTS)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    share = 2 * 4 * 3 * 128 * 128 / sum(p.numel() for p in loaded.parameters())
    match = f"experts with {share:.0%} of the weights.*no low-bit export.*scheme='bf16'.*name the experts in `exclude_modules`"
    # Without vLLM they stay so only if they are named in `exclude_modules`.
    options = {"scheme": {"re:.*self_attn.*": "w4a16"}} if is_loaded else {"exclude_modules": ["experts"]}
    with pytest.raises(ValueError, match=match):
        make(loaded if is_loaded else model, tmp_path, use_vllm=not is_loaded, **options)


def with_pictures(name="image"):
    return make_problems().add_column(name, [None] * 16)


def test_pictures_are_refused_for_a_class_that_was_not_compared(tiny_model, tmp_path, no_engine):
    args, texts = arguments(tmp_path, use_vllm=True), make_problems()
    for train, evaluation in ((with_pictures("images"), None), (texts, {"a": texts, "b": with_pictures()})):
        with pytest.raises(ValueError, match="use_vllm=True"):
            QaRLTrainer(tiny_model, spread, args, train, evaluation)


@pytest.mark.parametrize(
    ("cls", "options", "reason"),
    [
        ("Mllama", {}, "were not compared"),
        ("Qwen2_5_VL", {}, None),
        ("Qwen3VL", {"numerics": "engine"}, "numerics='engine' with pictures"),
        ("Qwen3VL", {"numerics": "exact"}, "numerics='exact' with pictures"),
    ],
)
def test_a_class_and_equal_bits_are_refused_with_their_reasons(tmp_path, cls, options, reason):
    model = type(f"{cls}ForConditionalGeneration", (torch.nn.Module,), {"config": PreTrainedConfig()})()
    args = arguments(tmp_path, use_vllm=True)
    vars(args).update(options)
    problems = [*problems_of_pictures(model, args)]
    assert len(problems) == (reason is not None) and all(reason in problem for problem in problems)
    args.use_vllm = False
    assert [*problems_of_pictures(model, args)] == []


def test_tools_that_return_pictures_are_refused_with_vllm(tmp_path):
    """In TRL's own loop, which calls the tool and asks the engine for what comes after its answer."""

    def look():
        """Look at the picture."""
        return [{"type": "image", "image": "a picture"}, {"type": "text", "text": "This."}]

    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = Path(trl.__file__).with_name("chat_templates").joinpath("qwen3.jinja").read_text()
    trainer = QaRLTrainer(
        # Longer than the prompt, or TRL leaves the answer out.
        make_tiny_model(tmp_path, max_position_embeddings=2048),
        spread,
        arguments(tmp_path, max_completion_length=256),
        Dataset.from_dict({"prompt": [[{"role": "user", "content": "?"}]] * 8}),
        processing_class=tokenizer,
        tools=[look],
    )
    # As with a server, which the refusal comes before.
    trainer.use_vllm, trainer.vllm_mode = True, "server"
    # TRL makes them for each generation batch.
    trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"look": look}], [{}]
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    completion = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    prompt = [{"role": "user", "content": "?"}]
    with pytest.raises(ValueError, match="use_vllm=True"):
        trainer._tool_call_loop([prompt], [[4, 5]], [[6]], [completion], [[-1.0]], None, {})


def test_problems_of_the_arguments_come_in_one_message(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    questions = Dataset.from_dict({"question": ["1 +"], "video": [None]})
    with pytest.raises(ValueError) as error:
        QaRLTrainer(model, spread, arguments(tmp_path, use_vllm=True), questions, quantization_config=object())
    texts = ["5 problems:", "quantization_config=object", "`prompt`", "column 'video'", "bfloat16", "has 1 prompt, "]
    assert [text in line for text, line in zip(texts, str(error.value).splitlines(), strict=True)] == [True] * 6


def test_arguments_of_other_classes_are_refused(tmp_path):
    for given, text in (
        ({"peft_config": object()}, "peft_config=object"),
        ({"args": GRPOConfig("x", use_cpu=True)}, "QaRLConfig"),
        ({"train_dataset": with_pictures(), "environment_factory": object}, "`environment_factory`"),
    ):
        given = {"args": arguments(tmp_path, use_vllm=True), "train_dataset": make_problems()} | given
        with pytest.raises((ValueError, TypeError), match=text):
            QaRLTrainer("no/such-model", spread, **given)


def test_what_only_the_launcher_knows_is_refused(tiny_model, tmp_path, monkeypatch):
    args = arguments(tmp_path)
    # Read once per process.
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
    with pytest.raises(ValueError, match="'AOT_EAGER'"):
        QaRLTrainer(tiny_model, spread, args, make_problems())


@pytest.mark.parametrize(
    ("prompts", "row"),
    [
        (["a", None, "b"], 1),
        (["a", "b", ""], 2),
        ([1, 2, 3], 0),
        ([[{"role": "user", "content": "a"}], []], 1),
        ([None, None], 0),
        ([["a", "b"]], 0),
        ([[{"role": "user", "content": "a"}], [{"role": "user", "content": None}]], 1),
        ([[{"role": "user"}]], 0),
    ],
    ids=str,
)
def test_a_row_without_a_prompt_is_named(prompts, row):
    (found,) = problems_of_prompts({"x": Dataset.from_dict({"prompt": prompts})}, "evaluation")
    assert found.startswith(f"Row {row} of the evaluation dataset has the prompt")


def test_a_row_of_a_stream_without_a_prompt_is_named(tiny_model, tmp_path):
    stream = Dataset.from_dict({"prompt": ["a", None, "b", ""]}).to_iterable_dataset()
    trainer = make(tiny_model, tmp_path, train_dataset=stream, shuffle_dataset=False)
    with pytest.raises(ValueError, match="of a batch has the prompt None"):
        trainer.train()


def test_a_missing_tokenizer_is_named_before_loading(tiny_model, tmp_path, monkeypatch):
    for file in Path(tiny_model).iterdir():
        if not file.name.startswith("tokenizer"):
            shutil.copy(file, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="has no tokenizer.*processing_class"):
        patch.setattr("trl_qarl.trainer.policy.Policy.load", None)
        make(str(tmp_path), tmp_path / "run")
    args = arguments(tmp_path / "run")
    QaRLTrainer(str(tmp_path), spread, args, make_problems(), processing_class=make_tiny_tokenizer())


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_cut_file_of_json_is_named_before_loading(tiny_model, tmp_path, monkeypatch, capsys, name):
    path = shutil.copytree(tiny_model, tmp_path / "model") / name
    path.write_text(path.read_text()[:20])
    monkeypatch.setattr("trl_qarl.trainer.policy.Policy.load", None)
    with pytest.raises(ValueError, match=f"model/{name} cannot be read"):
        make(str(path.parent), tmp_path / "run")
    options = ["--model_name_or_path", str(path.parent), "--scheme", "w8a8", "--output_dir", str(tmp_path / "out")]
    for command in (["export", *options], ["doctor", str(path.parent)], ["vllm-serve", "--model", str(path.parent)]):
        assert f"model/{name} cannot be read" in refused(capsys, *command)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_file_that_holds_a_list_is_named_before_loading(tiny_model, tmp_path, monkeypatch, name):
    path = shutil.copytree(tiny_model, tmp_path / "model") / name
    path.write_text("[]")
    monkeypatch.setattr("trl_qarl.trainer.policy.Policy.load", None)
    with pytest.raises(ValueError, match=f"model/{name} cannot be read .its content is of type list"):
        make(str(path.parent), tmp_path / "run")


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.5])
def test_a_cut_file_of_weights_is_named(tiny_model, tmp_path, share):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match="model/model.safetensors is cut or damaged"):
        make(str(folder), tmp_path / "run")


@pytest.mark.parametrize(
    ("arch", "rates"),
    [
        ("qwen2", {"attention_dropout": 0.1}),
        ("phi", {"resid_pdrop": 0.1}),
        ("phi", {"embd_pdrop": 0.1}),
        ("mixtral", {"router_jitter_noise": 0.1}),
    ],
)
def test_tbpo_refuses_dropout(tmp_path, arch, rates):
    model = (make_tiny_mixture if arch == "mixtral" else make_tiny_model)(tmp_path, arch, **rates)
    with pytest.raises(ValueError, match="disable_dropout=True"):
        make(model, tmp_path)
    make(model, tmp_path, loss_type="grpo", scheme="bf16")
    trainer = make(model, tmp_path, disable_dropout=True, max_steps=2)
    tokens = torch.randint(4, 200, (2, 12))
    with torch.no_grad():
        assert torch.equal(trainer.model.train()(tokens).logits, trainer.model.eval()(tokens).logits)


def test_gemma_2_computes_with_the_cap_of_its_attention(tmp_path):
    """PyTorch's fused attention, transformers' default before 5.24, drops it."""
    options = {"attn_logit_softcapping": 0.05, "query_pre_attn_scalar": 1, "final_logit_softcapping": 30.0}
    path = make_tiny_model(tmp_path, "gemma2", **options)
    capped = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    trainer = make(path, tmp_path / "run", scheme="bf16", bf16=False, beta=0.1)
    ids = torch.arange(4, 44).view(2, 20)
    default = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    expected = capped(ids).logits
    is_fused = default.config._attn_implementation == "sdpa"
    assert ((default(ids).logits - expected).abs().max() > 1e-3) == is_fused
    for model in (trainer.model, trainer.ref_model):
        torch.testing.assert_close(model.eval()(ids).logits, expected, rtol=1e-5, atol=1e-5)


def fused_scan(inputs, *args, outproj_weight=None, **kwargs):
    """A stand-in for kernels that read the weight of `out_proj`, where low-bit layers have their masters."""
    if outproj_weight is None:
        inputs, outproj_weight = inputs.mT, args[4]
    return inputs[..., : outproj_weight.shape[1]] @ outproj_weight.T


MAMBA_2 = {"mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 16, "chunk_size": 16}
MAMBA_2["hybrid_override_pattern"] = "M-"


@pytest.mark.parametrize(
    ("source", "kernel", "arch", "sizes"),
    [
        (modeling_nemotron_h, "mamba2_split_conv1d_scan_combined", "nemotron_h", MAMBA_2),
        (modeling_mamba, "mamba_inner_fn", "mamba", {"state_size": 16, "time_step_rank": 8}),
    ],
)
def test_layers_of_mamba_train_what_they_score(tmp_path, monkeypatch, source, kernel, arch, sizes):
    monkeypatch.setattr(source, kernel, fused_scan)
    path = make_tiny_model(tmp_path, arch, **sizes)
    ids = torch.arange(4, 44).view(2, 20)

    @torch.no_grad()
    def agree(model):
        train, score = (model.train(mode)(ids, use_cache=False).logits for mode in (True, False))
        return torch.equal(train, score)

    assert not agree(AutoModelForCausalLM.from_pretrained(path))
    assert agree(make(path, tmp_path / "run").model)


@pytest.fixture
def long_rope(tmp_path):
    factors = {"short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    return make_tiny_model(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64)


def test_positions_that_vllm_counts_otherwise_bound_its_context(long_rope, tmp_path, no_engine):
    cohere = make_tiny_model(tmp_path, "cohere2", sliding_window=64, tie_word_embeddings=True)
    for path, name in ((long_rope, "LongRoPE"), (cohere, "Cohere2ForCausalLM")):
        for length in (None, 128):
            said = rf"vllm_max_model_length={length} with {name}: .* Set vllm_max_model_length=64"
            with pytest.raises(ValueError, match=said):
                make(path, tmp_path / "run", use_vllm=True, vllm_max_model_length=length)


def test_a_mixture_whose_experts_trl_cannot_count_is_refused(tmp_path):
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_n_groups": 1, "num_local_experts": 0}
    path = make_tiny_model(tmp_path, "granitemoehybrid", layer_types=["mamba", "attention"], **sizes)
    with pytest.raises(ValueError, match=r"TRL reads `num_experts`.* Set router_aux_loss_coef=0"):
        make(path, tmp_path / "run", max_completion_length=8)


def test_a_class_that_recomputes_nothing_is_refused(tmp_path):
    path = make_tiny_model(tmp_path, "ctrl", n_embd=128, n_layer=2, n_head=4, dff=256)
    with pytest.raises(ValueError, match="CTRLLMHeadModel does not support it. Set gradient_checkpointing=False"):
        make(path, tmp_path / "run", gradient_checkpointing=True)


def test_long_rope_refuses_sequences_that_change_others(long_rope, tmp_path):
    trainer = make(long_rope, tmp_path / "run", max_completion_length=8)
    ids = torch.arange(64)[None] + 4
    with torch.no_grad():
        short = trainer.model(ids).logits
        with pytest.raises(ValueError, match="has 65 tokens, more than original_max_position_embeddings=64"):
            trainer.model(torch.cat([ids, ids[:, :1]], dim=1))
        assert torch.equal(trainer.model(ids).logits, short)


def scaling_logits(forward):
    """A forward that scales the logits, as of a model with its own code."""

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.1
        return output

    return scaled


def forbidding_tokens(forward):
    """A forward that forbids tokens, as Chameleon's those of pictures."""

    def forbidden(*args, **kwargs):
        output = forward(*args, **kwargs)
        if output.logits is not None:
            output.logits[..., 9:] = torch.finfo(output.logits.dtype).min
        return output

    return forbidden


@pytest.mark.parametrize(
    ("scheme", "change"), [("w4a16", scaling_logits), ("bf16", scaling_logits), ("bf16", forbidding_tokens)]
)
def test_a_forward_that_changes_logits_is_refused(tmp_path, scheme, change):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, "qwen2", initializer_range=0.5))
    make(model, tmp_path / "plain", scheme=scheme)
    restore_model(model)
    del model.forward
    model.forward = change(model.forward)
    with pytest.raises(ValueError, match="TRL's loss differ from those of Qwen2ForCausalLM's logits by"):
        make(model, tmp_path / "scaled", scheme=scheme)


@pytest.mark.parametrize(
    ("reason", "num_processes", "has_aux_loss", "why"),
    [
        (None, 2, False, "different numbers of forwards"),
        ("it takes pictures", 1, False, "are padded: it takes pictures"),
        (None, 1, True, "the auxiliary loss"),
    ],
)
def test_forwards_that_cannot_be_divided_are_refused(tmp_path, reason, num_processes, has_aux_loss, why):
    args = config(tmp_path, max_tokens_per_forward=100)
    (problem,) = problems_of_division(args, reason, num_processes, has_aux_loss)
    assert why in problem and "max_tokens_per_forward=100 is unsupported here" in problem
    assert not [*problems_of_division(args, None, 1, False)]


def test_a_lowered_generation_batch_has_whole_groups(tmp_path):
    args = config(tmp_path, per_device_train_batch_size=2, num_generations=8, gradient_accumulation_steps=1)
    assert [*fit_generation_batch(args, make_problems(1))] == []
    assert (args.steps_per_generation, args.generation_batch_size) == (4, 8)
