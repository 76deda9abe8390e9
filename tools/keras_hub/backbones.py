"""Makes KerasHub's backbones at tiny size, and finds their tasks."""

import inspect

from keras_hub import models as M

from tools.keras_hub import images
from tools.keras_hub.data import LENGTH
from tools.keras_hub.tiny import LAYERS
from tools.keras_hub.tiny import tiny

_LINEAR_ATTENTION = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
    layer_types=["linear_attention", "full_attention"] * 2,
)
_T5GEMMA = {
    f"{half}_{name}": value
    for half in ("encoder", "decoder")
    for name, value in dict(
        hidden_dim=16,
        intermediate_dim=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        layer_types=["full_attention"] * 3,
    ).items()
} | dict(cross_attention_hidden_size=16)


def _clip_text(**kwargs):
    return tiny("CLIPTextEncoder", num_layers=3, **kwargs)


def _towers(kind, **kwargs):
    return tiny(
        f"{kind}Backbone",
        vision_encoder=tiny(f"{kind}VisionEncoder", num_layers=3),
        text_encoder=tiny(f"{kind}TextEncoder", num_layers=3, **kwargs),
    )


def _blip2():
    from keras_hub.src.models.blip2.blip2_custom_opt import BLIP2CustomOPT
    from keras_hub.src.models.blip2.blip2_qformer import BLIP2QFormer
    from keras_hub.src.models.blip2.blip2_vision_encoder import (
        BLIP2VisionEncoder,
    )

    return M.BLIP2Backbone(
        vision_encoder=BLIP2VisionEncoder(
            image_size=32,
            patch_size=8,
            num_layers=2,
            num_heads=2,
            hidden_dim=16,
            intermediate_dim=32,
            use_patch_bias=True,
            use_class_token=True,
            use_mha_bias=True,
            use_mlp_bias=True,
            dropout_rate=0.0,
            layer_norm_epsilon=1e-6,
            initializer_range=0.02,
        ),
        qformer=BLIP2QFormer(
            num_query_tokens=4,
            num_layers=2,
            num_heads=2,
            hidden_dim=16,
            intermediate_dim=32,
            vision_dim=16,
            cross_attention_frequency=2,
            dropout=0.0,
            layer_norm_epsilon=1e-6,
        ),
        language_model=BLIP2CustomOPT(
            vocabulary_size=32,
            num_layers=2,
            num_heads=2,
            hidden_dim=16,
            intermediate_dim=32,
            num_query_tokens=4,
            dropout=0.0,
            max_sequence_length=32,
            qformer_hidden_dim=16,
        ),
    )


def _flux():
    return M.FluxBackbone(
        input_channels=16,
        hidden_size=16,
        mlp_ratio=2.0,
        num_heads=2,
        depth=2,
        depth_single_blocks=2,
        axes_dim=[2, 2, 4],
        theta=10000,
        use_bias=True,
        image_shape=(8, 16),
        text_shape=(8, 16),
        image_ids_shape=(8, 3),
        text_ids_shape=(8, 3),
        y_shape=(16,),
    )


def _gemma3n():
    return M.Gemma3nBackbone(
        text_vocab_size=32,
        text_hidden_size=16,
        num_hidden_layers=3,
        pad_token_id=0,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=[32] * 3,
        hidden_activation="gelu_approximate",
        layer_types=["full_attention"] * 3,
        sliding_window=4,
        rope_theta=10000.0,
        max_position_embeddings=16,
        vocab_size_per_layer_input=32,
        hidden_size_per_layer_input=4,
        altup_num_inputs=2,
        laurel_rank=2,
        vision_vocab_offset=32,
        audio_vocab_offset=32,
    )


def _stable_diffusion_3():
    from keras_hub.src.models.vae.vae_backbone import VAEBackbone

    return M.StableDiffusion3Backbone(
        mmdit_patch_size=2,
        mmdit_hidden_dim=16,
        mmdit_num_layers=2,
        mmdit_num_heads=2,
        mmdit_position_size=16,
        mmdit_qk_norm=None,
        mmdit_dual_attention_indices=None,
        # By default the VAE samples its latents, even in inference.
        vae=VAEBackbone(
            [32] * 4, [1] * 4, [32] * 4, [1] * 4, sampler_method="mode"
        ),
        clip_l=_clip_text(intermediate_output_index=-2, name="clip_l"),
        clip_g=_clip_text(intermediate_output_index=-2, name="clip_g"),
        image_shape=(32, 32, 3),
    )


# Backbones that need other arguments than those in `tiny.SIZES`: the arguments,
# or a function that makes one.
_MAKERS = images.MAKERS | {
    "BLIP2Backbone": _blip2,
    "CLIPBackbone": lambda: _towers("CLIP"),
    "DebertaV3Backbone": dict(bucket_size=8),
    "EdRecBackbone": dict(num_layers_enc=3, num_layers_dec=3),
    "FluxBackbone": _flux,
    "Gemma3Backbone": dict(image_size=16),
    "Gemma3nBackbone": _gemma3n,
    "Gemma4Backbone": dict(image_size=16),
    "MetaCLIP2Backbone": lambda: _towers("MetaCLIP2"),
    "MoonshineBackbone": dict(filter_dim=16),
    "PARSeqBackbone": lambda: tiny(
        "PARSeqBackbone",
        image_encoder=tiny("ViTBackbone", num_layers=2, use_class_token=False),
        max_label_length=8,
        decoder_hidden_dim=16,
        num_decoder_layers=1,
        num_decoder_heads=2,
        decoder_mlp_dim=32,
    ),
    "PaliGemmaBackbone": dict(
        image_size=16,
        vit_patch_size=8,
        vit_num_heads=2,
        vit_hidden_dim=16,
        vit_num_layers=2,
        vit_intermediate_dim=32,
    ),
    "Qwen3_5Backbone": dict(**_LINEAR_ATTENTION),
    "Qwen3_5MoeBackbone": dict(**_LINEAR_ATTENTION),
    "RWKV7Backbone": dict(gate_lora=4, mv_lora=4, aaa_lora=4, decay_lora=4),
    "SigLIPBackbone": lambda: _towers(
        "SigLIP", max_sequence_length=LENGTH, projection_dim=16
    ),
    "SigLIPTextEncoder": dict(max_sequence_length=LENGTH),
    "SmolLM3Backbone": dict(
        attention_bias=False,
        rope_layer_enabled_list=[True] * LAYERS,
        layer_types=["attention"] * LAYERS,
        mlp_bias=False,
        layer_norm_epsilon=1e-5,
        max_position_embeddings=16,
        rope_theta=10000.0,
        partial_rotary_factor=1.0,
    ),
    "StableDiffusion3Backbone": _stable_diffusion_3,
    "T5Gemma2Backbone": dict(**_T5GEMMA),
    "T5GemmaBackbone": dict(**_T5GEMMA),
    "WhisperBackbone": dict(
        num_mels=8,
        num_layers=3,
        max_encoder_sequence_length=16,
        max_decoder_sequence_length=8,
    ),
}


def names():
    """Returns the names of KerasHub's backbone classes, sorted."""
    base = M.Backbone
    # Base classes, which are no models themselves.
    abstract = (base, M.FeaturePyramidBackbone)
    return sorted(
        {
            x.__name__
            for x in vars(M).values()
            if inspect.isclass(x) and issubclass(x, base) and x not in abstract
        }
    )


def tasks_of(name):
    """Returns a backbone's task classes, sorted by name.

    Assistants of other tasks come last.
    """
    found = {
        x
        for x in vars(M).values()
        if inspect.isclass(x)
        and issubclass(x, M.Task)
        and getattr(x.backbone_cls, "__name__", None) == name
    }
    return sorted(found, key=lambda x: ("Assistant" in x.__name__, x.__name__))


def make(name):
    """Returns a new backbone of the class `name`."""
    made = _MAKERS.get(name, {})
    return made() if callable(made) else tiny(name, **made)
