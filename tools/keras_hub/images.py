"""Makes KerasHub's image backbones at tiny size."""

from keras_hub import layers as L
from keras_hub import models as M

from tools.keras_hub.tiny import IMAGE
from tools.keras_hub.tiny import tiny

_SWIN = dict(
    embed_dim=8, depths=(2, 2), num_heads=(2, 2), window_size=4, patch_size=4
)


def _resnet(stages=4, **kwargs):
    return tiny(
        "ResNetBackbone",
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64] + [8] * (stages - 1),
        stackwise_num_blocks=[1] * stages,
        stackwise_num_strides=[1, *[2] * (stages - 1)],
        block_type="basic_block",
        **kwargs,
    )


def _mit(stages=2):
    return tiny(
        "MiTBackbone",
        layerwise_depths=[2] * stages,
        num_layers=stages,
        layerwise_num_heads=[1, 2, 2, 2][:stages],
        layerwise_sr_ratios=[4, 2, 2, 2][:stages],
        layerwise_patch_sizes=[7, 3, 3, 3][:stages],
        layerwise_strides=[4, 2, 2, 2][:stages],
        hidden_dims=[8, 16, 24, 32][:stages],
        image_shape=(64, 64, 3),
    )


def _hgnet(**kwargs):
    kwargs.setdefault("image_shape", IMAGE)
    return tiny(
        "HGNetV2Backbone",
        depths=[1, 2, 1],
        embedding_size=8,
        hidden_sizes=[8, 16, 16],
        stem_channels=[3, 4, 8],
        hidden_act="relu",
        use_learnable_affine_block=False,
        stackwise_stage_filters=[
            [8, 4, 8, 1, 1, 3],
            [8, 4, 16, 2, 1, 3],
            [16, 4, 16, 1, 1, 3],
        ],
        apply_downsample=[False, True, True],
        use_lightweight_conv_block=[False, False, False],
        **kwargs,
    )


def _basnet():
    encoder = _resnet(image_shape=(None, None, 3))
    return tiny("BASNetBackbone", image_encoder=encoder, num_classes=1)


def _deep_lab():
    return tiny(
        "DeepLabV3Backbone",
        image_encoder=_resnet(),
        spatial_pyramid_pooling_key="P4",
        upsampling_size=(2, 2),
        dilation_rates=(2, 4),
        low_level_feature_key="P3",
        projection_filters=8,
    )


def _depth_anything():
    return M.DepthAnythingBackbone(
        image_encoder=tiny(
            "DINOV2Backbone",
            patch_size=4,
            position_embedding_shape=IMAGE,
            apply_layernorm=True,
        ),
        reassemble_factors=[4, 2, 1, 0.5],
        neck_hidden_dims=[8] * 4,
        fusion_hidden_dim=8,
        head_hidden_dim=8,
        head_in_index=-1,
        feature_keys=["stage1", "stage2", "stage3", "stage4"],
    )


def _d_fine():
    return tiny(
        "DFineBackbone",
        backbone=_hgnet(out_features=["stage2", "stage3"]),
        decoder_in_channels=[16, 16],
        encoder_hidden_dim=16,
        num_labels=4,
        num_denoising=0,
        learn_initial_query=False,
        num_queries=8,
        anchor_image_size=(32, 32),
        feat_strides=[8, 16],
        num_feature_levels=2,
        encoder_in_channels=[16, 16],
        encode_proj_layers=[1],
        encoder_ffn_dim=16,
        num_encoder_layers=1,
        hidden_expansion=0.5,
        depth_multiplier=0.5,
        eval_idx=-1,
        num_decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        decoder_n_points=[2, 2],
        lqe_hidden_dim=8,
        num_lqe_layers=2,
        out_features=["stage2", "stage3"],
        seed=0,
    )


def _efficient_net():
    return M.EfficientNetBackbone(
        stackwise_kernel_sizes=[3, 3, 3],
        stackwise_num_repeats=[1, 2, 2],
        stackwise_input_filters=[8, 8, 16],
        stackwise_output_filters=[8, 16, 16],
        stackwise_expansion_ratios=[1, 2, 2],
        stackwise_squeeze_and_excite_ratios=[0.0, 0.25, 0.25],
        stackwise_strides=[1, 2, 2],
        stackwise_block_types=["fused", "unfused", "unfused"],
        width_coefficient=1.0,
        depth_coefficient=1.0,
        dropout=0.0,
        input_shape=IMAGE,
        num_features=16,
    )


def _mobile_net():
    return tiny(
        "MobileNetBackbone",
        stackwise_expansion=[[8, 8], [16, 16]],
        stackwise_num_blocks=[2, 2],
        stackwise_num_filters=[[8, 8], [16, 16]],
        stackwise_kernel_size=[[3, 3], [3, 3]],
        stackwise_num_strides=[[2, 1], [2, 1]],
        stackwise_se_ratio=[[None, None], [0.25, 0.25]],
        stackwise_activation=[["relu"] * 2, ["hard_swish"] * 2],
        stackwise_padding=[[1, 1], [1, 1]],
        output_num_filters=16,
        depthwise_filters=8,
        depthwise_stride=2,
        depthwise_residual=False,
        last_layer_filter=16,
        squeeze_and_excite=0.5,
    )


def _mobile_net_v5():
    def both(first, second):
        return [[first], [second, second]]

    return tiny(
        "MobileNetV5Backbone",
        stackwise_block_types=both("er", "uir"),
        stackwise_num_blocks=[1, 2],
        stackwise_num_filters=both(8, 16),
        stackwise_strides=[[2], [2, 1]],
        stackwise_act_layers=both("relu", "relu"),
        stackwise_exp_ratios=both(2.0, 2.0),
        stackwise_se_ratios=both(0.0, 0.0),
        stackwise_dw_kernel_sizes=both(0, 3),
        stackwise_dw_start_kernel_sizes=both(0, 0),
        stackwise_dw_end_kernel_sizes=both(0, 0),
        stackwise_exp_kernel_sizes=both(3, 0),
        stackwise_pw_kernel_sizes=both(1, 0),
        stackwise_num_heads=both(0, 0),
        stackwise_key_dims=both(0, 0),
        stackwise_value_dims=both(0, 0),
        stackwise_kv_strides=both(0, 0),
        stackwise_use_cpe=both(False, False),
        use_msfa=False,
        num_features=16,
    )


def _sam():
    return M.SAMBackbone(
        image_encoder=_vit_det(),
        prompt_encoder=L.SAMPromptEncoder(
            hidden_size=8,
            image_embedding_size=(4, 4),
            input_image_size=IMAGE[:2],
            mask_in_channels=4,
        ),
        mask_decoder=L.SAMMaskDecoder(
            num_layers=2,
            hidden_size=8,
            intermediate_dim=16,
            num_heads=2,
            embedding_dim=8,
            num_multimask_outputs=3,
            iou_head_depth=2,
            iou_head_hidden_dim=8,
        ),
    )


def _sam3():
    shared = dict(hidden_dim=16, intermediate_dim=32, num_heads=2)
    image = dict(image_shape=(56, 56, 3), patch_size=14)
    return M.SAM3PromptableConceptBackbone(
        vision_encoder=L.SAM3VisionEncoder(
            num_layers=2,
            fpn_hidden_dim=16,
            fpn_scale_factors=[4.0, 2.0, 1.0, 0.5],
            pretrain_image_shape=(56, 56, 3),
            window_size=2,
            global_attn_indexes=[1],
            **image,
            **shared,
        ),
        text_encoder=L.SAM3TextEncoder(
            vocabulary_size=32, embedding_dim=16, num_layers=2, **shared
        ),
        geometry_encoder=L.SAM3GeometryEncoder(
            num_layers=1, roi_size=7, **shared
        ),
        detr_encoder=L.SAM3DetrEncoder(num_layers=2, **shared),
        detr_decoder=L.SAM3DetrDecoder(
            num_layers=2, num_queries=6, **image, **shared
        ),
        mask_decoder=L.SAM3MaskDecoder(
            num_upsampling_stages=3, hidden_dim=16, num_heads=2
        ),
    )


def _vit_det():
    return tiny(
        "ViTDetBackbone",
        global_attention_layer_indices=[1, 3],
        num_output_channels=8,
        window_size=2,
    )


# As `backbones._MAKERS`.
MAKERS = {
    "BASNetBackbone": _basnet,
    "CSPNetBackbone": dict(
        stem_filters=8,
        stem_kernel_size=3,
        stem_strides=1,
        stackwise_depth=[1, 2],
        stackwise_strides=[1, 2],
        stackwise_num_filters=[8, 16],
        block_type="dark_block",
        stage_type="dark",
    ),
    "DFineBackbone": _d_fine,
    "DINOV2Backbone": dict(position_embedding_shape=IMAGE),
    "DeepLabV3Backbone": _deep_lab,
    "DenseNetBackbone": dict(stackwise_num_repeats=[2, 2, 2], growth_rate=8),
    "DepthAnythingBackbone": _depth_anything,
    "EfficientNetBackbone": _efficient_net,
    "HGNetV2Backbone": _hgnet,
    "MiTBackbone": _mit,
    "MobileNetBackbone": _mobile_net,
    "MobileNetV5Backbone": _mobile_net_v5,
    "ResNetBackbone": _resnet,
    "RetinaNetBackbone": lambda: tiny(
        "RetinaNetBackbone",
        image_encoder=_resnet(),
        min_level=3,
        max_level=4,
        use_p5=False,
    ),
    "SAM3PromptableConceptBackbone": _sam3,
    "SAMBackbone": _sam,
    "SegFormerBackbone": lambda: M.SegFormerBackbone(
        image_encoder=_mit(4), projection_filters=8
    ),
    "SwinTransformerBackbone": dict(**_SWIN),
    "VGGBackbone": dict(
        stackwise_num_repeats=[2, 2, 2],
        stackwise_num_filters=[8, 8, 16],
        # `IMAGE` is too small for the head's 7 x 7 kernels.
        image_shape=(64, 64, 3),
    ),
    "ViTDetBackbone": _vit_det,
    "VideoPrismBackbone": dict(
        num_frames=2,
        num_spatial_layers=2,
        num_temporal_layers=2,
        num_auxiliary_layers=0,
    ),
    "XceptionBackbone": dict(
        stackwise_conv_filters=[[8, 8], [8, 16], [16, 16]],
        stackwise_pooling=[True, True, False],
    ),
}
