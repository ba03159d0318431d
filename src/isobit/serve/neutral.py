"""The keys of vLLM's and SGLang's request classes that no route serves. Each is taken with the values
that ask for nothing, its default there among them (tests/serve/test_neutral.py), and refused with
others.
"""

from typing import Any

from isobit.serve.requests import Neutral

_OFF = (False,)
NOT_SERVED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("calls of functions that are not tools", ("none", "auto"), "function_call"),
    ("a program of the logits", (), "custom_logit_processor custom_params repetition_detection"),
    ("a budget of thoughts", (), "thinking thinking_token_budget"),
    ("watermarks", _OFF, "watermark watermarking"),
    ("beam search", (1,), "best_of length_penalty"),
    ("beam search", _OFF, "use_beam_search"),
    ("stopping at a pattern", ([],), "stop_regex"),
    ("another form of the text", (True,), "detokenize include_reasoning separate_reasoning"),
    ("another form of the text", (True,), "skip_special_tokens spaces_between_special_tokens"),
    ("another form of the text", _OFF, "include_stop_str_in_output no_stop_trim"),
    ("another form of the text", ("tokens",), "output_mode"),
    ("text behind the answer", ("",), "suffix"),
    ("a template of the request's own", (), "chat_template task"),
    ("another prompt than the one sent", (), "input_ids session_params truncate_prompt_tokens"),
    ("another prompt than the one sent", _OFF, "add_special_tokens echo"),
    ("documents", ([],), "documents"),
    ("messages on this route", (True,), "add_generation_prompt"),
    ("messages on this route", _OFF, "continue_final_message"),
    ("images, audio and embeddings", (), "content_parts features prompt_embeds token_offsets"),
    ("images, audio and embeddings", (), "max_dynamic_patch min_dynamic_patch"),
    ("images, audio and embeddings", ({},), "images_config media_io_kwargs mm_processor_kwargs"),
    ("images, audio and embeddings", ({},), "video_config"),
    ("images, audio and embeddings", _OFF, "return_mm_kwargs use_audio_in_video"),
    ("images, audio and embeddings", ("tensors",), "mm_payload"),
    ("images, audio and embeddings", (["text"],), "modalities"),
    ("this part of an answer", _OFF, "flat_logprobs return_cached_tokens_details"),
    ("this part of an answer", _OFF, "return_flat_raw_output_top_logprobs return_hidden_states"),
    ("this part of an answer", _OFF, "return_input_ids_in_sglext return_meta_info"),
    ("this part of an answer", _OFF, "return_output_ids_in_sglext return_prompt_text"),
    ("this part of an answer", _OFF, "return_prompt_token_ids return_routed_experts"),
    ("this part of an answer", _OFF, "return_sampling_mask return_spec_tokens_details"),
    ("this part of an answer", _OFF, "return_token_offsets return_weight_versions"),
    ("this part of an answer", ([],), "logprob_token_ids prompt_logprob_token_ids"),
    ("this part of an answer", (0,), "prompt_logprob_start routed_experts_prompt_start"),
    ("this part of an answer", (0,), "routed_experts_start_len"),
    ("this part of an answer", ("selected",), "sampling_logprobs_mode"),
    ("an adapter by this key (model names it)", (), "lora_path"),
    ("work on several machines", (), "bootstrap_host bootstrap_port bootstrap_room"),
    ("work on several machines", (), "ec_transfer_params kv_transfer_params"),
    ("an option of another engine", (), "extra_key parse_context reasoning_ended"),
    ("an option of another engine", ({},), "extra_args reasoning_parser_kwargs vllm_xargs"),
    ("an option of another engine", ([],), "trace_decode_token_ids"),
    ("an option of another engine", _OFF, "skip_clone skip_reading_prefix_cache"),
    ("an option of another engine", (0,), "output_text_buffer_length"),
)
"""(what a key asks for, the values beside null with which it asks for nothing, such keys)."""
STRUCTURED = {
    "structural_tag": Neutral("calls by tags", ()),
    "disable_any_whitespace": Neutral("JSON without white space", _OFF),
    "disable_additional_properties": Neutral("schemas that are changed", _OFF),
    "disable_fallback": Neutral("", None),
    "whitespace_pattern": Neutral("other white space in JSON", ()),
}
"""Of `structured_outputs`."""
IGNORED = (
    "custom_labels data_parallel_rank disagg_prefill_dp_rank metadata output_kind "
    "parallel_tool_calls priority "
    "prompt_cache_key prompt_cache_retention request_id return_flat_raw_top_logprobs_b64 "
    "return_token_ids rid routed_dp_rank safety_identifier service_tier session_id store "
    "stream_interval stream_reasoning truncation_side user verbosity"
)
"""Keys that change no answer here where they are not served, so that every value is taken."""
NEUTRAL = {key: Neutral(why, values) for why, values, keys in NOT_SERVED for key in keys.split()}
NEUTRAL |= dict.fromkeys(IGNORED.split(), Neutral("", None))
