//! The operators that safe code may call with any arguments.

/// Where invalid arguments are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Checks {
    /// The operator itself.
    Own,
    /// This crate, before it calls a fused optimizer, which iterates over all lists by one index and checks only the
    /// parameters' sizes.
    Fused,
}

/// Where this operator's arguments are checked; `None` for an operator that is not in the tables.
pub(crate) fn checks(name: &str, overload: &str) -> Option<Checks> {
    let is_in = |table: &[(&str, &str)]| table.contains(&(name, overload));
    match (is_in(&OWN), is_in(&FUSED)) {
        (true, _) => Some(Checks::Own),
        (_, true) => Some(Checks::Fused),
        _ => None,
    }
}

/// These check by themselves, on every device, that lists are equally long, numbers in range and indices within the
/// tensor. (`_foreach_copy` does not, and must not be listed.)
const OWN: [(&str, &str); 92] = [
    ("aten::_amp_foreach_non_finite_check_and_unscale_", ""),
    ("aten::_amp_update_scale_", ""),
    ("aten::_foreach_abs", ""),
    ("aten::_foreach_abs_", ""),
    ("aten::_foreach_add", "List"),
    ("aten::_foreach_add", "Scalar"),
    ("aten::_foreach_add_", "List"),
    ("aten::_foreach_add_", "Scalar"),
    ("aten::_foreach_add_", "ScalarList"),
    ("aten::_foreach_addcdiv", "ScalarList"),
    ("aten::_foreach_addcdiv_", "Scalar"),
    ("aten::_foreach_addcdiv_", "ScalarList"),
    ("aten::_foreach_addcmul", "Scalar"),
    ("aten::_foreach_addcmul_", "Scalar"),
    ("aten::_foreach_clamp_max_", "Scalar"),
    ("aten::_foreach_clamp_min", "Scalar"),
    ("aten::_foreach_clamp_min_", "Scalar"),
    ("aten::_foreach_clamp_min_", "ScalarList"),
    ("aten::_foreach_copy_", ""),
    ("aten::_foreach_div", "List"),
    ("aten::_foreach_div", "Scalar"),
    ("aten::_foreach_div_", "List"),
    ("aten::_foreach_div_", "Scalar"),
    ("aten::_foreach_div_", "ScalarList"),
    ("aten::_foreach_lerp", "Scalar"),
    ("aten::_foreach_lerp_", "Scalar"),
    ("aten::_foreach_lerp_", "ScalarList"),
    ("aten::_foreach_maximum_", "List"),
    ("aten::_foreach_mul", "List"),
    ("aten::_foreach_mul", "ScalarList"),
    ("aten::_foreach_mul_", "List"),
    ("aten::_foreach_mul_", "Scalar"),
    ("aten::_foreach_mul_", "ScalarList"),
    ("aten::_foreach_mul_", "Tensor"),
    ("aten::_foreach_neg", ""),
    ("aten::_foreach_neg_", ""),
    ("aten::_foreach_norm", "Scalar"),
    ("aten::_foreach_pow", "ScalarAndTensor"),
    ("aten::_foreach_reciprocal_", ""),
    ("aten::_foreach_rsqrt_", ""),
    ("aten::_foreach_sign", ""),
    ("aten::_foreach_sign_", ""),
    ("aten::_foreach_sqrt", ""),
    ("aten::_foreach_sqrt_", ""),
    ("aten::_foreach_sub", "List"),
    ("aten::_foreach_sub_", "List"),
    ("aten::_foreach_sub_", "Scalar"),
    ("aten::_foreach_zero_", ""),
    ("aten::_nested_tensor_from_mask", ""),
    ("aten::_nested_tensor_from_mask_left_aligned", ""),
    ("aten::add", "Scalar"),
    ("aten::add_", "Scalar"),
    ("aten::add_", "Tensor"),
    ("aten::addcmul_", ""),
    ("aten::addmm", ""),
    ("aten::alias", ""),
    ("aten::baddbmm", ""),
    ("aten::bitwise_and_", "Scalar"),
    ("aten::bucketize", "Tensor"),
    ("aten::clamp_", ""),
    ("aten::clamp_max", ""),
    ("aten::clamp_min", ""),
    ("aten::clone", ""),
    ("aten::constant_pad_nd", ""),
    ("aten::copy_", ""),
    ("aten::div", "Scalar"),
    ("aten::div_", "Scalar"),
    ("aten::elu", ""),
    ("aten::empty_like", ""),
    ("aten::eq", "Scalar"),
    ("aten::fill_", "Scalar"),
    ("aten::full_like", ""),
    ("aten::ge", "Scalar"),
    ("aten::index_add_", ""),
    ("aten::index_copy_", ""),
    ("aten::index_fill_", "int_Scalar"),
    ("aten::index_select", ""),
    ("aten::is_pinned", ""),
    ("aten::leaky_relu", ""),
    ("aten::lerp_", "Scalar"),
    ("aten::linalg_vector_norm", ""),
    ("aten::masked_fill_", "Scalar"),
    ("aten::mul", "Scalar"),
    ("aten::mul_", "Scalar"),
    ("aten::nan_to_num", ""),
    ("aten::ne", "Scalar"),
    ("aten::new_zeros", ""),
    ("aten::pin_memory", ""),
    ("aten::pow", "Tensor_Scalar"),
    ("aten::random_", "to"),
    ("aten::relu6", ""),
    ("aten::relu6_", ""),
];

const FUSED: [(&str, &str); 4] =
    [("aten::_fused_adagrad_", ""), ("aten::_fused_adam_", ""), ("aten::_fused_adamw_", ""), ("aten::_fused_sgd_", "")];
