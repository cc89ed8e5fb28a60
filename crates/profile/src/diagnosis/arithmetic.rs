//! Which operators are arithmetic.

/// Matrix products, convolutions, attention and recurrent layers, forward and backward: the operators that do the work
/// themselves, on a CPU and a GPU, in libtorch 2.11.
const NAMES: &[&str] = &[
    "_addmm_activation",
    "_conv_depthwise2d",
    "_convolution",
    "_cudnn_attention_backward",
    "_cudnn_attention_forward",
    "_cudnn_rnn",
    "_cudnn_rnn_backward",
    "_efficient_attention_backward",
    "_efficient_attention_forward",
    "_flash_attention_backward",
    "_flash_attention_forward",
    "_grouped_mm",
    "_int_mm",
    "_nnpack_spatial_convolution",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_grouped_mm",
    "_scaled_mm",
    "_slow_conv2d_backward",
    "_slow_conv2d_forward",
    "_trilinear",
    "addbmm",
    "addmm",
    "addmm_",
    "addmv",
    "addmv_",
    "baddbmm",
    "baddbmm_",
    "bmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_depthwise3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolution",
    "convolution_backward",
    "cudnn_convolution",
    "cudnn_convolution_add_relu",
    "cudnn_convolution_relu",
    "cudnn_convolution_transpose",
    "dot",
    "gru",
    "linear",
    "lstm",
    "matmul",
    "mkldnn_convolution",
    "mkldnn_linear",
    "mkldnn_linear_backward",
    "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward",
    "mm",
    "mv",
    "slow_conv3d_forward",
    "slow_conv_dilated2d",
    "slow_conv_dilated3d",
    "slow_conv_transpose2d",
    "slow_conv_transpose3d",
];

/// Whether an operator is arithmetic, by its name: `aten::mm`.
pub(super) fn is_arithmetic(op: &str) -> bool {
    op.strip_prefix("aten::").is_some_and(|name| NAMES.binary_search(&name).is_ok())
}

#[cfg(test)]
mod tests {
    use super::{NAMES, is_arithmetic};

    #[test]
    fn only_whole_names_match() {
        assert!(NAMES.is_sorted());
        for name in ["aten::mm", "aten::addmm", "aten::mkldnn_convolution", "aten::_flash_attention_forward"] {
            assert!(is_arithmetic(name), "{name}");
        }
        for name in
            ["aten::upsample_bilinear2d", "aten::_convert_indices", "aten::_thnn_fused_lstm_cell", "mm", "dots::mm"]
        {
            assert!(!is_arithmetic(name), "{name}");
        }
    }
}
