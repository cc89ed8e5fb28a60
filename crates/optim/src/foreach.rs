//! Arithmetic over lists of tensors, by libtorch's `_foreach_*` operators. Functions whose names end in `_` change
//! their first list in place.

use std::ops::Deref;

use overdrive_core::TorchError;
use overdrive_ffi::{Arg, LazyOp, TensorList, Value};
use tch::Tensor;

/// A borrowed list, or an owned one made from it.
pub(crate) enum Lent<'a> {
    Given(&'a TensorList),
    Made(TensorList),
}

impl Deref for Lent<'_> {
    type Target = TensorList;

    fn deref(&self) -> &TensorList {
        match self {
            Self::Given(list) => list,
            Self::Made(list) => list,
        }
    }
}

macro_rules! in_place {
    ($($name:ident = $op:literal, $overload:literal ($($arg:ident: $kind:ident $type:ty),+);)+) => {$(
        pub(crate) fn $name($($arg: $type),+) -> Result<(), TorchError> {
            static OP: LazyOp = LazyOp::new(concat!("aten::_foreach_", $op), $overload);
            OP.call(&[$(Arg::$kind($arg)),+]).map(drop)
        }
    )+};
}

macro_rules! making {
    ($($name:ident = $op:literal, $overload:literal ($($arg:ident: $kind:ident $type:ty),+);)+) => {$(
        pub(crate) fn $name($($arg: $type),+) -> Result<TensorList, TorchError> {
            static OP: LazyOp = LazyOp::new(concat!("aten::_foreach_", $op), $overload);
            match OP.call(&[$(Arg::$kind($arg)),+])?.pop() {
                Some(Value::TensorList(list)) => Ok(list),
                _ => TensorList::new::<Tensor>(&[]),
            }
        }
    )+};
}

in_place! {
    abs_ = "abs_", "" (xs: TensorList &TensorList);
    add_ = "add_", "List" (xs: TensorList &TensorList, ys: TensorList &TensorList, alpha: Double f64);
    add_each_ = "add_", "ScalarList" (xs: TensorList &TensorList, ys: ScalarList &[f64]);
    add_scalar_ = "add_", "Scalar" (xs: TensorList &TensorList, y: Double f64);
    addcdiv_ = "addcdiv_", "Scalar"
        (xs: TensorList &TensorList, ys: TensorList &TensorList, zs: TensorList &TensorList, factor: Double f64);
    addcdiv_each_ = "addcdiv_", "ScalarList"
        (xs: TensorList &TensorList, ys: TensorList &TensorList, zs: TensorList &TensorList, factors: ScalarList &[f64]);
    addcmul_ = "addcmul_", "Scalar"
        (xs: TensorList &TensorList, ys: TensorList &TensorList, zs: TensorList &TensorList, factor: Double f64);
    clamp_max_ = "clamp_max_", "Scalar" (xs: TensorList &TensorList, high: Double f64);
    clamp_min_ = "clamp_min_", "Scalar" (xs: TensorList &TensorList, low: Double f64);
    copy_ = "copy_", "" (xs: TensorList &TensorList, ys: TensorList &TensorList);
    div_ = "div_", "List" (xs: TensorList &TensorList, ys: TensorList &TensorList);
    div_each_ = "div_", "ScalarList" (xs: TensorList &TensorList, ys: ScalarList &[f64]);
    div_scalar_ = "div_", "Scalar" (xs: TensorList &TensorList, y: Double f64);
    lerp_ = "lerp_", "Scalar" (xs: TensorList &TensorList, ys: TensorList &TensorList, weight: Double f64);
    lerp_each_ = "lerp_", "ScalarList"
        (xs: TensorList &TensorList, ys: TensorList &TensorList, weights: ScalarList &[f64]);
    maximum_ = "maximum_", "List" (xs: TensorList &TensorList, ys: TensorList &TensorList);
    mul_ = "mul_", "List" (xs: TensorList &TensorList, ys: TensorList &TensorList);
    mul_each_ = "mul_", "ScalarList" (xs: TensorList &TensorList, ys: ScalarList &[f64]);
    mul_scalar_ = "mul_", "Scalar" (xs: TensorList &TensorList, y: Double f64);
    mul_tensor_ = "mul_", "Tensor" (xs: TensorList &TensorList, y: Tensor &Tensor);
    neg_ = "neg_", "" (xs: TensorList &TensorList);
    reciprocal_ = "reciprocal_", "" (xs: TensorList &TensorList);
    rsqrt_ = "rsqrt_", "" (xs: TensorList &TensorList);
    sign_ = "sign_", "" (xs: TensorList &TensorList);
    sqrt_ = "sqrt_", "" (xs: TensorList &TensorList);
    sub_ = "sub_", "List" (xs: TensorList &TensorList, ys: TensorList &TensorList);
    sub_scalar_ = "sub_", "Scalar" (xs: TensorList &TensorList, y: Double f64);
    zero_ = "zero_", "" (xs: TensorList &TensorList);
}

making! {
    abs = "abs", "" (xs: TensorList &TensorList);
    add = "add", "List" (xs: TensorList &TensorList, ys: TensorList &TensorList, alpha: Double f64);
    add_scalar = "add", "Scalar" (xs: TensorList &TensorList, y: Double f64);
    addcmul = "addcmul", "Scalar"
        (xs: TensorList &TensorList, ys: TensorList &TensorList, zs: TensorList &TensorList, factor: Double f64);
    addcdiv_each = "addcdiv", "ScalarList"
        (xs: TensorList &TensorList, ys: TensorList &TensorList, zs: TensorList &TensorList, factors: ScalarList &[f64]);
    clamp_min = "clamp_min", "Scalar" (xs: TensorList &TensorList, low: Double f64);
    div = "div", "List" (xs: TensorList &TensorList, ys: TensorList &TensorList);
    div_scalar = "div", "Scalar" (xs: TensorList &TensorList, y: Double f64);
    lerp = "lerp", "Scalar" (xs: TensorList &TensorList, ys: TensorList &TensorList, weight: Double f64);
    mul = "mul", "List" (xs: TensorList &TensorList, ys: TensorList &TensorList);
    mul_each = "mul", "ScalarList" (xs: TensorList &TensorList, ys: ScalarList &[f64]);
    neg = "neg", "" (xs: TensorList &TensorList);
    norm = "norm", "Scalar" (xs: TensorList &TensorList, order: Double f64);
    scalar_pow = "pow", "ScalarAndTensor" (base: Double f64, exponents: TensorList &TensorList);
    sign = "sign", "" (xs: TensorList &TensorList);
    sqrt = "sqrt", "" (xs: TensorList &TensorList);
    sub = "sub", "List" (xs: TensorList &TensorList, ys: TensorList &TensorList);
}
