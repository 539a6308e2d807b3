"""Settings of types whose class defaults do not belong together, as published checkpoints have them."""

# Settings of processors that published checkpoints state, as the class alone does not have them.
PROCESSOR = {
    "llava": dict(patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1),
    "llava_next": dict(patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1),
    "llava_onevision": dict(num_image_tokens=729, vision_feature_select_strategy="full"),
    "llava_next_video": dict(patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1),
    "fast_vlm": dict(patch_size=64, vision_feature_select_strategy="full", num_additional_image_tokens=0),
    "perception_lm": dict(patch_size=14, pooling_ratio=1),
    "mistral3": dict(patch_size=14, spatial_merge_size=2), "mistral_large4": dict(patch_size=14, spatial_merge_size=2),
    "idefics3": dict(image_seq_len=169), "gemma3": dict(image_seq_length=256), "shieldgemma2": dict(image_seq_length=256),
}
# Sides of the grids of tiles of Granite 4 Vision.
PINPOINTS = [[384, 768], [768, 384], [768, 768], [1152, 384], [384, 1152]]
IMAGE_PROCESSOR = {
    "granite4_vision": dict(image_grid_pinpoints=PINPOINTS, size={"shortest_edge": 384}, crop_size={"height": 384, "width": 384}),
    "aria": dict(max_image_size=490),
    "paligemma": dict(image_seq_length=256),
    "dots3_note": dict(temporal_patch_size=1),
    "step3p7": dict(patch_size=504),
    "fast_vlm": dict(size={"shortest_edge": 256}, crop_size={"height": 256, "width": 256}),
    "mistral3": dict(patch_size=14, size={"longest_edge": 1540}), "mistral_large4": dict(patch_size=14, size={"longest_edge": 1540}),
}
# Further arguments of `Inputs`, which a user of the model would pass.
INPUTS = {
    "cosmos3_edge": dict(return_mm_token_type_ids=True),
}
# Tokens of the ids in configurations whose names do not tell them.
TOKENS = {
    "llama4": {"image_token_id": "<|patch|>"}, "molmo2": {"image_patch_id": "<im_patch>"}, "pp_chart2table": {"image_token_id": "<imgpad>"},
    "ovis2": {"image_token_id": "<IMG_ATOM>", "visual_indicator_token_ids": ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]},
}
# Texts of an image in the chat templates of published checkpoints, whose processors expand none.
MARKS = {"pp_chart2table": f"<img>{'<imgpad>' * 256}</img>"}
# Configurations whose class defaults do not belong together, or are left out of `config.json` and read otherwise by dflop.
CONFIG = {
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}},
    "qwen2_5_vl": {"vision_config": {"out_hidden_size": 8192}},
    "qwen3_vl": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_vl_moe": {"vision_config": {"out_hidden_size": 2048}},
    "internvl": {"tie_word_embeddings": False},
    "gemma3": {"vision_config": {"image_size": 448, "patch_size": 14}},
    "idefics3": {"vision_config": {"image_size": 364, "patch_size": 14}},
    "smolvlm": {"vision_config": {"image_size": 364, "patch_size": 14}},
    "glm4v": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}}},
    "glm4v_moe": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12],
                                                      "partial_rotary_factor": 0.5}, "head_dim": 128}},
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "qwen3_omni_moe_thinker": {"text_config": {"head_dim": 128}, "vision_config": {"out_hidden_size": 2048},
                               "audio_config": {"output_dim": 2048}, "position_id_per_seconds": 13,
                               "vision_start_token_id": 1, "vision_end_token_id": 2},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 1, "vision_end_token_id": 2},
    "deepseek_vl": {"vision_config": {"image_size": 384, "patch_size": 16}},
    "deepseek_vl_hybrid": {"vision_config": {"image_size": 384, "patch_size": 16}},
    "chameleon": {"vocabulary_map": {"<image>": 7} | {f"IMGIMG{one}Z": 8 + at for at, one in enumerate("ABCDEFGH")}, "vq_config": {"num_embeddings": 8, "base_channels": 512}},
    "emu3": {"vocabulary_map": {"<image>": 7, "<|extra_200|>": 8} | {f"<|visual token {at:06}|>": 16 + at for at in range(8)},
             "vq_config": {"codebook_size": 8, "base_channels": 512, "hidden_size": 2048}},
    "deepseek_ocr2": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "mlp_layer_types": ["dense", *["sparse"] * 31],
                                      "num_experts_per_tok": 6, "hidden_size": 1280, "intermediate_size": 6848, "moe_intermediate_size": 896, "num_attention_heads": 10,
                                      "num_key_value_heads": 10},
                      "vision_config": {"encoder_config": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
                                                           "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}}},
    "apertus1p5": {"image_token_offset": 1024, "audio_token_offset": 1280, "vision_config": {"codebook_size": 256}, "audio_config": {"codebook_size": 256}},
    "perception_lm": {"vision_config": {"architecture": "vit_pe_core_large_patch14_336", "num_classes": 0, "do_pooling": True, "global_pool": "map",
                                        "model_args": {"depth": 2, "embed_dim": 1024, "global_pool": "", "img_size": [448, 448], "init_values": 0.1,
                                                       "ref_feat_shape": [32, 32], "use_post_transformer_norm": False}}},
    "qwen2_5_omni": {"thinker_config": {"vision_start_token_id": 1, "vision_end_token_id": 2}},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "diffusion_gemma": {"text_config": {"num_experts": 16, "top_k_experts": 2, "moe_intermediate_size": 704}},
    "qwen4_exp": {"text_config": {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048, "indexer_compress_ratio": 4}},
    "minicpmv4_6": {"insert_layer_id": 0}, "minicpmv4_7": {"insert_layer_id": 0}, "minicpm_ocr": {"insert_layer_id": 0},
    "janus": {"text_config": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 8},
              "vision_config": {"projection_dim": 1024}},
    "ovis2": {"hidden_size": 4096}, "idefics2": {"perceiver_config": {"resampler_depth": 1}},
    "hunyuan_vl": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 16, 16, 16]}}},
    "granite4_vision": {"downsample_rate": "4/8", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1], "vision_feature_select_strategy": "full",
                        "vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 16}, "image_grid_pinpoints": PINPOINTS},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}},
    "aya_vision": {"vision_config": {"num_attention_heads": 16, "image_size": 364, "patch_size": 14}},
    "aria": {"vision_config": {"image_size": 490, "patch_size": 14}},
    "shieldgemma2": {"vision_config": {"image_size": 448, "patch_size": 14}},
    "granite_speech": {"projector_config": {"encoder_hidden_size": 1024}},
    "granite_speech_plus": {"projector_config": {"encoder_hidden_size": 1024}},
    "glm46v": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}}},
    "glmga": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 8}},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1,
             "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"]},
    "hrm_text": {"num_hidden_layers": 4, "num_layers_per_stack": 1},
    "llama4": {"vision_config": {"intermediate_size": 3072, "projector_input_dim": 4096, "projector_output_dim": 4096,
                                 "vision_output_dim": 4096}},
}
CONFIG["qwen3_omni_moe"] = {"thinker_config": CONFIG["qwen3_omni_moe_thinker"]}
# Numbers of layers beside which connectors do as little work as in published models, whose FLOPs are exact within 0.5 % only so.
KEPT = {
    "molmo2": {"vision_config": {"num_hidden_layers": 25}},
    "granite_speech": {"encoder_config": {"num_layers": 16}}, "granite_speech_plus": {"encoder_config": {"num_layers": 16}},
}
# Names of published models by the beginning of their type; the class's name stands for all others.
NAMES = {
    "apertus1p5": "Apertus 1.5", "aya_vision": "Aya Vision", "blip-2": "BLIP-2", "cohere2_vision": "Command A Vision", "cohere_compass": "Cohere Compass",
    "cosmos3": "Cosmos 3", "deepseek_ocr2": "DeepSeek-OCR 2", "deepseek_v2": "DeepSeek-V2", "deepseek_v3": "DeepSeek-V3", "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v4": "DeepSeek-V4", "deepseek_vl": "DeepSeek-VL", "dots1": "dots.llm1", "dots3": "dots.3", "ernie4_5": "ERNIE 4.5", "ernie4_5_vl": "ERNIE 4.5 VL",
    "exaone4": "EXAONE 4", "exaone4_5": "EXAONE 4.5", "falcon_h1": "Falcon-H1", "fast_vlm": "FastVLM", "florence2": "Florence-2", "gemma2": "Gemma 2",
    "gemma3": "Gemma 3", "gemma3n": "Gemma 3n", "gemma4": "Gemma 4", "glm4": "GLM-4", "glm4_moe": "GLM-4.5, GLM-4.6", "glm4_moe_lite": "GLM-4.7-Flash",
    "glm46v": "GLM-4.6V", "glm4v": "GLM-4.1V", "glm4v_moe": "GLM-4.5V", "glm5": "GLM-5", "glm_moe_dsa": "GLM-5", "glm_ocr": "GLM-OCR", "glmasr": "GLM-ASR",
    "got_ocr2": "GOT-OCR 2.0", "gpt_oss": "gpt-oss", "granite": "Granite", "granite4_vision": "Granite 4 Vision", "granite_speech": "Granite Speech",
    "granite_docling": "Granite Docling", "granitemoehybrid": "Granite 4.0", "hunyuan_vl": "HunyuanVL, HunyuanOCR", "hyperclovax": "HyperCLOVA X",
    "idefics3": "Idefics3", "internvl": "InternVL 2.5, 3, 3.5", "kimi_k25": "Kimi-K2.5", "kimi_linear": "Kimi Linear", "kosmos-2": "Kosmos-2", "kosmos-2.5": "Kosmos-2.5",
    "lfm2": "LFM2", "lfm2_vl": "LFM2-VL", "lfm3": "LFM3", "lighton_ocr": "LightOnOCR", "llama": "Llama 2, 3", "llama4": "Llama 4", "llava": "LLaVA",
    "llava_next": "LLaVA-NeXT", "llava_next_video": "LLaVA-NeXT-Video", "llava_onevision": "LLaVA-OneVision", "minicpmv4_6": "MiniCPM-V 4.6", "minicpmv4_7": "MiniCPM-V 4.7",
    "minicpm_ocr": "MiniCPM OCR", "minimax_m2": "MiniMax-M2", "minimax_m3": "MiniMax-M3", "ministral3": "Ministral 3", "mistral3": "Mistral Small 3.1, 3.2",
    "mistral4": "Mistral 4", "mllama": "Llama 3.2 Vision", "molmo2": "Molmo 2", "nemotron_h": "Nemotron-H", "nemotron_h_omni": "Nemotron Nano Omni", "olmo2": "OLMo 2",
    "olmo3": "OLMo 3", "ovis2": "Ovis2", "paddleocr_vl": "PaddleOCR-VL", "paligemma": "PaliGemma", "perception_lm": "PerceptionLM", "phi3": "Phi-3, Phi-4",
    "phi4_multimodal": "Phi-4-multimodal", "qwen2": "Qwen2, Qwen2.5", "qwen2_audio": "Qwen2-Audio", "qwen2_vl": "Qwen2-VL", "qwen2_5_vl": "Qwen2.5-VL",
    "qwen2_5_omni": "Qwen2.5-Omni", "qwen2_moe": "Qwen2-MoE", "qwen3": "Qwen3", "qwen3_5": "Qwen3.5", "qwen3_5_moe": "Qwen3.5 MoE", "qwen3_asr": "Qwen3-ASR",
    "qwen3_moe": "Qwen3 MoE", "qwen3_next": "Qwen3-Next", "qwen3_omni_moe": "Qwen3-Omni", "qwen3_vl": "Qwen3-VL", "qwen3_vl_moe": "Qwen3-VL MoE", "qwen4_exp": "Qwen4",
    "seed_oss": "Seed-OSS", "smollm3": "SmolLM3", "smolvlm": "SmolVLM", "step3p7": "Step 3.7", "video_llama_3": "VideoLLaMA 3", "voxtral": "Voxtral",
}
