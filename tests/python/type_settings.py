"""Settings of types whose class defaults do not belong together, as published checkpoints have them."""

# Settings of processors that published checkpoints state, as the class alone does not have them.
PROCESSOR = {
    "llava": dict(patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1),
    "llava_next": dict(patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1),
    "llava_onevision": dict(num_image_tokens=729, vision_feature_select_strategy="full"),
    "mistral3": dict(patch_size=14, spatial_merge_size=2),
    "idefics3": dict(image_seq_len=169), "gemma3": dict(image_seq_length=256),
}
IMAGE_PROCESSOR = {
    "mistral3": dict(patch_size=14, size={"longest_edge": 1540}),
}
# Configurations whose class defaults do not belong together, or are left out of `config.json` and read otherwise by dflop.
CONFIG = {
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}},
    "qwen2_5_vl": {"vision_config": {"out_hidden_size": 8192}},
    "qwen3_vl": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_vl_moe": {"vision_config": {"out_hidden_size": 2048}},
    "internvl": {"tie_word_embeddings": False},
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "idefics3": {"vision_config": {"image_size": 364, "patch_size": 14}},
    "smolvlm": {"vision_config": {"image_size": 364, "patch_size": 14}},
    "glm4v": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}}},
    "glm4v_moe": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12],
                                                      "partial_rotary_factor": 0.5}, "head_dim": 128}},
    "glm4_moe": {"head_dim": 128},
    "qwen3_omni_moe_thinker": {"text_config": {"head_dim": 128}, "vision_config": {"out_hidden_size": 3584},
                               "audio_config": {"output_dim": 3584}, "position_id_per_seconds": 13},
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1,
             "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"]},
    "hrm_text": {"num_hidden_layers": 4, "num_layers_per_stack": 1},
    "llama4": {"vision_config": {"intermediate_size": 3072, "projector_input_dim": 4096, "projector_output_dim": 4096,
                                 "vision_output_dim": 4096}},
}
