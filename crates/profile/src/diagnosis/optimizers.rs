//! Remedies for an optimizer that updates tensor by tensor.

use crate::{Phase, ProfiledSteps};

/// The kind of optimizer, by the operators of its loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Adam,
    /// Square roots, but no bias correction: RMSprop, Adagrad.
    RootMeanSquare,
    Sgd,
    Sign,
    Unknown,
}

impl Family {
    /// # Source
    /// The loops of libtorch's `adam.cpp`, `adamw.cpp`, `rmsprop.cpp`, `adagrad.cpp` and `sgd.cpp`
    fn of(profiled: &ProfiledSteps) -> Self {
        let own = || profiled.ops.iter().filter(|op| op.phase == Phase::Optimizer);
        let calls = |names: &[&str]| -> f64 {
            let is_one = |name: &str| name.strip_prefix("aten::").is_some_and(|name| names.contains(&name));
            own().filter(|op| is_one(&op.name)).map(|op| op.calls).sum()
        };
        let updates = calls(&["add_", "sub_", "mul_", "addcdiv_", "addcmul_", "lerp_"]);
        // Rarer operators are not part of each tensor's update. AdamW after clipping has up to 4 multiplications per
        // tensor.
        let often = |names: &[&str]| updates > 0.0 && calls(names) >= 0.08 * updates;
        let has_root = often(&["sqrt", "sqrt_", "rsqrt", "rsqrt_"]);
        if has_root && often(&["addcdiv", "addcdiv_", "div", "div_"]) {
            let corrects_bias = often(&["div", "div_", "lerp_"]);
            if corrects_bias { Self::Adam } else { Self::RootMeanSquare }
        } else if often(&["sign", "sign_"]) {
            Self::Sign
        } else if !has_root && !often(&["addcdiv_", "addcmul_"]) && often(&["add_", "sub_"]) {
            Self::Sgd
        } else {
            Self::Unknown
        }
    }
}

/// The line to change.
pub(super) fn remedy(profiled: &ProfiledSteps) -> String {
    let which = match Family::of(profiled) {
        Family::Adam => {
            "`AdamW::builder(vs.trainable_variables()).fused(true).build()?`, or `Adam` if weight decay is added to \
             the gradient"
        }
        Family::RootMeanSquare => {
            "`RmsProp::builder(vs.trainable_variables()).build()?`, or `Adagrad` if squares are only summed; they \
             update lists of tensors"
        }
        Family::Sgd => {
            "`Sgd::builder(vs.trainable_variables()).fused(true).build()?`, with `.momentum(..)` if you use momentum"
        }
        Family::Sign => "`Lion::builder(vs.trainable_variables()).build()?`, which updates lists of tensors",
        Family::Unknown => {
            "the optimizer's fused counterpart in overdrive-optim (`Adam`, `AdamW`, `Sgd`, `Adagrad`), or one that \
             updates lists of tensors (`RmsProp`, `Adadelta`, `Adamax`, `Asgd`, `NAdam`, `RAdam`, `Rprop`, \
             `Adafactor`, `Lion`, `Lamb`, `Lars`, `Muon`)"
        }
    };
    format!("update all tensors at once: {which}")
}
